"""Bad input on the command line: one sentence, exit code 2, nothing started."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest
import yaml

from makespan.cli import main

RUN = {
    "version": 1,
    "tasks": 2,
    "actions": "script",
    "environment": {"name": "bfcl"},
}


@pytest.fixture
def config(tmp_path):
    """Writes a configuration like the README's, with some settings changed, and gives its path."""

    def write(**changes):
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump({**RUN, "runs_directory": str(tmp_path / "runs"), **changes}))
        return str(path)

    return write


def refused(capsys, arguments: list[str]) -> str:
    """Run the command; it must answer with one line on standard error and exit code 2. Gives the line."""
    code = main(arguments)
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.startswith("makespan: ")
    assert error.count("\n") == 1, error
    return error


def test_an_unknown_setting_is_answered_with_the_nearest_one(capsys, config):
    assert "admission.concurency (did you mean 'concurrency'?)" in refused(
        capsys, ["run", config(), "--set", "admission.concurency=4"]
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tasks=-1", "tasks: Expected `int` >= 1 (seen: -1)"),
        ("admission.concurrency=0", "admission.concurrency: Expected `int` >= 1 (seen: 0)"),
        ("environment.slots.step=0", "environment.slots.step: at least 1 slot is needed, not 0"),
        ("replicas.count=0", "replicas.count: Expected `int` >= 1 (seen: 0)"),
        ("tasks=100000", "200"),
        ("routing.policy=magic", "routing.policy: unknown policy 'magic' (known: cost, sticky-least-inflight)"),
        ("scheduling.policy=fifoo", "scheduling.policy: unknown policy 'fifoo' (did you mean 'fifo'?)"),
        ("admission.policy=fixd", "admission.policy: unknown policy 'fixd' (did you mean 'fixed'?)"),
        ("environment.category=multi_turn_bass", "environment.category: 'multi_turn_bass' is not a category of bfcl"),
        ("environment.name=counting", "environment.tasks_file: environment 'counting' has no tasks of its own"),
        ("environment.tasks_file=nowhere.jsonl", "environment.tasks_file: cannot read 'nowhere.jsonl'"),
        ("replicas.max_model_len=1000000", "replicas.max_model_len is 1000000, and embedded-"),
        ("name=a/b", "name: 'a/b' cannot be a directory's name"),
        ('name="a\\0b"', "cannot be a directory's name"),
        ("version=2", "configuration of version 2; this makespan reads 1"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(capsys, config, setting, message):
    assert message in refused(capsys, ["run", config(), "--set", setting])


def test_a_model_path_without_a_model_is_refused(capsys, config, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(capsys, ["run", config(), "--model", str(tmp_path / "empty")])
    for name in ("llama", "null", "123", "a: b"):  # a name is a name, whatever YAML makes of it
        assert f"{name!r} is neither a directory nor one of" in refused(capsys, ["run", config(), "--model", name])
    (tmp_path / "empty" / "config.json").write_text("[1, 2")
    assert "is not a model's configuration" in refused(capsys, ["run", config(), "--model", str(tmp_path / "empty")])


def test_an_environment_address_where_nobody_listens_is_refused_after_the_stated_time(capsys, config):
    with socket.socket() as listener:  # a port that is taken, so that nobody else answers there
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        started = time.monotonic()
        error = refused(
            capsys, ["run", config(environment={"name": "bfcl", "address": address, "connect_timeout_s": 1.5})]
        )
        took_s = time.monotonic() - started
    assert address in error
    assert "1.5 s" in error
    assert 1.5 <= took_s < 20
    assert address in refused(capsys, ["env", "status", address, "--timeout-s", "0.5"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"task_id": "a"}\n{"task": "b"}', "line 2"),
        ('{"task_id": "a"}\n{"task_id": "a"}', "a task_id stands more than once"),
        ('{"task_id": "a", "script": "x"}', "line 1"),
        ('{"task_id": "a"}\n', "tasks: 2 were asked for, and there are 1"),
        ('{"task_id": "a", "script": ["x"]}\n{"task_id": "b"}', "needs a script for each task, and 'b' has none"),
    ],
)
def test_a_task_file_that_cannot_be_used_is_refused(capsys, config, tmp_path, text, message):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(text)
    assert message in refused(capsys, ["run", config(environment={"name": "counting", "tasks_file": str(tasks)})])


def test_a_server_configuration_that_cannot_be_used_is_refused(capsys, tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text("slots: {counting.start: 0, counting.step: 1}\n")
    assert "slots.counting.start is 0" in refused(capsys, ["env", "serve", str(path)])
    path.write_text("slotz: {}\n")
    assert "slotz" in refused(capsys, ["env", "serve", str(path)])
    assert "cannot read" in refused(capsys, ["env", "serve", str(tmp_path / "nowhere.yaml")])


def test_a_worker_configuration_that_cannot_be_used_is_refused(capsys, tmp_path):
    path = tmp_path / "worker.yaml"
    path.write_text("broker: tcp://127.0.0.1:1\nenvironments: {count: {}}\n")
    assert "did you mean 'counting'" in refused(capsys, ["env", "worker", str(path)])
    path.write_text("brokr: tcp://127.0.0.1:1\n")
    assert "brokr" in refused(capsys, ["env", "worker", str(path)])


@pytest.mark.parametrize("command", [["run"], ["doctor"], ["env", "status", "tcp://127.0.0.1:1"]])
def test_a_path_for_figures_that_cannot_be_written_is_refused_before_the_work(capsys, config, tmp_path, command):
    arguments = [*command, config()] if command == ["run"] else command
    error = refused(capsys, [*arguments, "--json", str(tmp_path / "nowhere" / "figures.json")])
    assert "--json: cannot write" in error
    assert not (tmp_path / "runs").exists()


def test_a_reader_that_went_away_is_no_error(tmp_path):
    command = f"{sys.executable} -m makespan doctor --json - 2>/dev/null | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_doctor_reports_each_part_as_json(capsys):
    assert main(["doctor", "--json", "-"]) == 0
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["python"]["state"] == "ok"
    assert findings["vllm"]["state"] == "ok"
    assert findings["verl plug-in makespan"]["state"] == "ok"
    assert findings["verl contract"]["state"] == "ok"
    assert "800 tasks" in findings["environment bfcl"]["detail"]  # four categories of 200


def test_an_interrupt_while_the_command_is_loaded_ends_it_in_silence():
    """As when Ctrl-C comes in the first moments: the import of the command line is interrupted."""
    interrupted = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'makespan.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt)\n"
        "from makespan.__main__ import main\n"
        "sys.exit(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
