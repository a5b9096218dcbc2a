"""What a report takes a run from."""

import json

import pytest

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.report import read_run
from tests.rollout.telemetry import logs


def run_directory(tmp_path):
    directory = tmp_path / "run-7"
    (directory / "events").mkdir(parents=True)
    logs.write(directory / "events" / "engine.jsonl", logs.two_trajectories())
    (directory / "config.yaml").write_text("seed: 3\nreplicas: {count: 2, num_blocks: null}\n")
    (directory / "summary.json").write_text(json.dumps({"notes": ["scripted"]}))
    return directory


def test_a_runs_directory_gives_its_log_its_settings_and_its_notes(tmp_path):
    run = read_run(run_directory(tmp_path))
    assert run.name == "run-7"
    assert run.configuration == {"seed": "3", "replicas.count": "2", "replicas.num_blocks": "null"}
    assert run.notes == ["scripted"]
    assert [row.trajectory_id for row in run.timeline] == ["a#0", "b#0"]


def test_a_log_alone_gives_what_it_says_of_itself(tmp_path):
    run = read_run(logs.write(tmp_path / "engine.jsonl", logs.two_trajectories(), tail='{"seq": 9'))
    assert run.name == "engine"
    assert run.configuration["batch.trajectories"] == "2"
    assert run.configuration["environment_server.slots.env.step"] == "2"
    assert run.notes == ["the last line of the log engine@boot-a was cut off"]


def test_what_the_view_does_not_know_is_a_note(tmp_path):
    directory = run_directory(tmp_path)
    record = logs.action(0, 1, 20.0, 23.0, trajectory="b#0")
    logs.write(directory / "events" / "broker.jsonl", [logs.header("broker", boot="boot-b"), record])
    (note,) = [note for note in read_run(directory).notes if "clock" in note]
    # The engine sent it at 20 and had the answer at 24, the server had it for 3 of these 4 s: 0.5 s either way.
    assert note == "the clock of broker@boot-b was placed on the engine's to within 500.0 ms"


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_what_is_no_run_is_refused_by_name(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match=r"missing|no engine log"):
        read_run(tmp_path / name)


def test_a_broken_configuration_is_refused_by_name(tmp_path):
    directory = run_directory(tmp_path)
    (directory / "config.yaml").write_text("a: [")
    with pytest.raises(FormatError, match=r"config\.yaml"):
        read_run(directory)
