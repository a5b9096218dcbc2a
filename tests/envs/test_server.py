"""The server as a process: how it starts, refuses, ends, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from makespan.envs.client import EnvClient, status
from makespan.envs.config import ServerConfig, hosted_environments, parse_config
from makespan.envs.spawn import spawn_server
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.errors import ConfigError, EnvironmentUnreachable, MakespanError
from makespan.rollout.trajectory import Progress, Task
from tests.envs.plane import descendants, gone

CONFIG = '{"slots": {"counting.start": 1, "counting.step": 1}}'


def start(*arguments: str, announced: bool = False) -> tuple[subprocess.Popen[bytes], str]:
    """A server process, and its address (or all that it announced)."""
    command = [sys.executable, "-m", "makespan.envs.server", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    return process, line if announced else json.loads(line)["address"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_cleanly_and_leaves_no_process(number: signal.Signals) -> None:
    process, address = start(CONFIG)
    family = descendants(process.pid) | {process.pid}
    process.send_signal(number)
    assert process.wait(10.0) == 0
    assert gone(family)
    host, port = address.removeprefix("tcp://").split(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0


def test_a_signal_ends_the_server_although_a_thread_is_stuck_in_an_environment() -> None:
    process, address = start('{"slots": {"counting_sync.start": 1, "counting_sync.step": 1}}')

    async def get_stuck() -> None:
        async with EnvClient(address, job="test", request_timeout_s=0.5) as client:
            task = Task(task_id="a", environment="counting_sync", payload={"reset_s": 600.0})
            with pytest.raises(MakespanError):
                await client.open("a", task, key=0.0, progress=Progress())

    asyncio.run(get_stuck())
    family = descendants(process.pid) | {process.pid}
    process.terminate()
    process.wait(15.0)
    assert gone(family)


def test_the_server_ends_when_its_parent_is_killed() -> None:
    parent_code = (
        "import subprocess, sys, time\n"
        f"server = subprocess.Popen([sys.executable, '-m', 'makespan.envs.server', {CONFIG!r}, '--with-parent'],\n"
        "    stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    address = json.loads(parent.stdout.readline())["address"]
    asyncio.run(status(address))
    family = descendants(parent.pid)
    assert family
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert gone(family)


def test_the_server_s_children_end_when_it_is_killed() -> None:
    process, address = start('{"slots": {"counting.start": 1, "counting.step": 1}, "workers": 2}')
    asyncio.run(status(address))
    family = descendants(process.pid)
    assert len(family) == 3  # a broker and two workers
    process.kill()
    process.wait()
    assert gone(family)


def test_spawn_server_leaves_no_process(tmp_path: Path) -> None:
    async def main() -> set[int]:
        before = descendants(os.getpid())
        async with spawn_server(parse_config(CONFIG), log_path=tmp_path / "log") as address:
            assert (await status(address)).sessions == 0
            family = descendants(os.getpid()) - before
            assert family
        return family

    assert gone(asyncio.run(main()), within_s=1.0)


def test_a_server_that_fails_to_start_shows_why(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            slots = {"counting.start": 1, "counting.step": 1}
            config = ServerConfig(slots=slots, port=taken.getsockname()[1])
            with pytest.raises(EnvironmentUnreachable, match="Address already in use"):
                async with spawn_server(config, log_path=tmp_path / "log"):
                    pass

    asyncio.run(main())


def test_a_ctrl_c_in_the_terminal_does_not_reach_a_spawned_server(tmp_path: Path) -> None:
    async def main() -> None:
        before = descendants(os.getpid())
        async with spawn_server(parse_config(CONFIG), log_path=tmp_path / "log"):
            for pid in descendants(os.getpid()) - before:
                assert os.getpgid(pid) != os.getpgid(os.getpid())

    asyncio.run(main())


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({}, "slots is empty"),
        ({"counting.start": 0, "counting.step": 1}, r"slots\.counting\.start is 0; it must be at least 1"),
        ({"counting.start": 1, "counting.step": -2}, r"slots\.counting\.step is -2; it must be at least 1"),
        ({"counting.start": 1}, r"slots\.counting\.step is missing"),
        ({"counting.start": 1, "counting.stop": 1}, r"slots\.counting\.stop: a slot class is named"),
        ({"countin.start": 1, "countin.step": 1}, "no bundled environment 'countin' .did you mean 'counting'"),
        ({"no.such:thing.start": 1, "no.such:thing.step": 1}, "cannot import 'no.such'"),
        ({"json:lods.start": 1, "json:lods.step": 1}, "'json' has no 'lods' .did you mean 'loads'"),
        ({"json:__name__.start": 1, "json:__name__.step": 1}, "is a str, not a class or a function"),
    ],
)
def test_a_configuration_that_cannot_work_is_one_clear_error(slots: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hosted_environments(ServerConfig(slots=slots))


def test_an_unknown_setting_is_refused_with_exit_code_2() -> None:
    command = [sys.executable, "-m", "makespan.envs.server", '{"slots": {}, "slotz": {}}']
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: environment server: Object contains unknown field `slotz`")
    assert done.stdout == ""


def test_figures_for_prometheus_are_served(tmp_path: Path) -> None:
    process, address = start('{"slots": {"counting.start": 3, "counting.step": 5}, "metrics_port": 0}', announced=True)

    def get(url: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    try:
        facts = json.loads(address)
        asyncio.run(status(facts["address"]))
        code, text = get(facts["metrics"])
        assert code == 200
        lines = text.splitlines()
        assert 'makespan_env_slots{slot_class="counting.step"} 5' in lines
        assert "# TYPE makespan_env_grants_total counter" in lines
        assert "makespan_env_workers 1" in lines
        names = {line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")}
        declared = {line.split(" ")[2] for line in lines if line.startswith("# TYPE")}
        assert names <= declared
        assert get(facts["metrics"].replace("/metrics", "/other"))[0] == 404
    finally:
        process.terminate()
        process.wait(10.0)


def test_the_log_is_json_lines_with_session_and_trajectory(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            spawn_server(parse_config(CONFIG), log_path=tmp_path / "log") as address,
            EnvClient(address, job="test") as client,
        ):
            task = Task(task_id="a", environment="counting", payload={"raise_in": 0})
            with pytest.raises(EnvironmentFailure):
                await client.open("trajectory-7", task, key=0.0, progress=Progress())

    asyncio.run(main())
    records = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    (raised,) = [record for record in records if record["message"] == "the environment raised"]
    assert (raised["trajectory"], raised["session"], raised["job"]) == ("trajectory-7", "trajectory-7/1", "test")
    assert raised["exception"].endswith("RuntimeError: told to raise in action 0")
