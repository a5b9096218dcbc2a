import gzip
import json

import pytest

from makespan.rollout.errors import ConfigError, FormatError
from makespan.rollout.replay.importers import guess, load
from makespan.rollout.telemetry.atif import to_atif
from makespan.rollout.trajectory import Segment, TrajectoryResult, TrajectoryState, Turn
from tests.rollout.telemetry import logs

SESSION = {
    "id": "session_1",
    "steps": [
        {"prompt_tokens": 1000, "completion_tokens": 50, "gap_s": 0.0, "stop": "tool_use", "inference_s": 2.0},
        {"prompt_tokens": 1200, "completion_tokens": 40, "gap_s": 12.0, "stop": "tool_use", "inference_s": None},
        {"prompt_tokens": 1100, "completion_tokens": 30, "gap_s": 500.0, "stop": "end_turn", "inference_s": 1.0},
        {"prompt_tokens": 1300, "completion_tokens": 20, "gap_s": 900.0, "stop": "tool_use", "inference_s": 1.0},
        {"prompt_tokens": 1400, "completion_tokens": 10, "gap_s": None, "stop": "", "inference_s": 1.0},
    ],
}

ABENCH = {
    "session_id": "s1",
    "source": {"dataset": "d"},
    "system_prompt": "…",
    "turns": [
        {
            "index": 0,
            "input_delta": [],
            "input_tokens": 500,
            "output_tokens": 20,
            "cached_tokens": 0,
            "pre_gap_ms": 0.0,
        },
        {"index": 1, "input_tokens": 600, "output_tokens": 30, "cached_tokens": 512, "pre_gap_ms": 1500.0},
        {"index": 2, "input_tokens": 700, "output_tokens": 10, "cached_tokens": 600, "pre_gap_ms": 90000.0},
    ],
}


def agent_step(number, prompt, completion, **more):
    metrics = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"step_id": number, "source": "agent", "message": "x", "metrics": metrics} | more


ATIF = {
    "schema_version": "ATIF-v1.8",
    "trajectory_id": "math_1#3",
    "agent": {"name": "a", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "?"},
        agent_step(2, 100, 10, observation={"results": [{"content": "y", "extra": {"service_s": 3.5}}]}),
        agent_step(3, 140, 20),
    ],
    "extra": {"task_id": "math_1", "group": "math_1", "reward": 1.0},
}


def write_lines(path, *documents):
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_sessions_become_growing_contexts_with_capped_gaps(tmp_path):
    trace = load(write_lines(tmp_path / "s.jsonl", SESSION))
    (trajectory,) = trace.trajectories
    turns = trajectory.turns
    # 1,200 - 1,000 - 50; the third prompt shrank; 1,300 - 1,100 - 30; 1,400 - 1,300 - 20.
    assert [turn.observation_tokens for turn in turns] == [150, 0, 170, 80, 0]
    assert [turn.prompt_tokens for turn in turns] == [1000, 1200, 1240, 1440, 1540]
    # A tool's 12 s; 500 s capped at 30; a person's 900 s; an unknown gap; no action after the last turn.
    assert [turn.environment_s for turn in turns] == [12.0, 30.0, 0.5, 0.5, None]
    assert any("30 s" in assumption for assumption in trace.header.assumptions)


def test_abench_sessions_take_the_gap_before_a_turn_as_the_time_of_the_action_before_it(tmp_path):
    (trajectory,) = load(write_lines(tmp_path / "a.jsonl", ABENCH)).trajectories
    assert [turn.prompt_tokens for turn in trajectory.turns] == [500, 600, 700]
    assert [turn.observation_tokens for turn in trajectory.turns] == [80, 70, 0]
    assert [turn.environment_s for turn in trajectory.turns] == [1.5, 30.0, None]
    assert [turn.cached_tokens for turn in trajectory.turns] == [0, 512, 600]


def test_atif_documents_carry_their_durations_and_groups(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps(ATIF, indent=2))
    (trajectory,) = load(path).trajectories
    assert (trajectory.trajectory_id, trajectory.group, trajectory.reward) == ("math_1#3", "math_1", 1.0)
    assert [(turn.prompt_tokens, turn.generated_tokens, turn.observation_tokens) for turn in trajectory.turns] == [
        (100, 10, 30),
        (140, 20, 0),
    ]
    assert [turn.environment_s for turn in trajectory.turns] == [3.5, None]


def test_the_documents_that_a_run_writes_are_read_with_their_durations_and_ids(tmp_path):
    turns = tuple(
        Turn(
            index=index,
            replica_id="replica-0",
            prompt_tokens=prompt,
            generated_tokens=2,
            cached_tokens=0,
            action="x",
            observation=(("tool", "y"), ("user", "z")),
        )
        for index, prompt in enumerate((5, 10))
    )
    segments = (Segment([1] * 5, False), Segment([2, 3], True), Segment([1] * 3, False), Segment([4, 5], True))
    result = TrajectoryResult(
        trajectory_id="t#0",
        task_id="t",
        group="t",
        state=TrajectoryState.FINISHED,
        reward=0.5,
        failure=None,
        first_prompt=(("user", "?"),),
        turns=turns,
        segments=segments,
    )
    measured = {("t#0", 0, "act"): {"service_s": 2.5}, ("t#0", 1, "act"): {"service_s": 4.0}}
    document = to_atif(result, model="m", source="model", measured=measured).to_json_dict()
    (tmp_path / "t.json").write_text(json.dumps(document))
    (trajectory,) = load(tmp_path).trajectories
    assert [turn.environment_s for turn in trajectory.turns] == [2.5, 4.0]
    assert [turn.generated_ids for turn in trajectory.turns] == [[2, 3], [4, 5]]
    assert [turn.observation_tokens for turn in trajectory.turns] == [3, 0]
    assert trajectory.reward == 0.5


def test_atif_timestamps_stand_in_for_durations(tmp_path):
    steps = [
        agent_step(1, 100, 10, timestamp="2026-01-01T00:00:00Z"),
        agent_step(2, 140, 20, timestamp="2026-01-01T00:00:07.5Z"),
    ]
    path = write_lines(tmp_path / "t.json", ATIF | {"steps": steps})
    assert load(path).trajectories[0].turns[0].environment_s == 7.5


def test_a_directory_of_atif_documents_is_one_trace_and_bad_ones_are_counted(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ATIF, indent=2))
    with gzip.open(tmp_path / "b.json.gz", "wt") as zipped:
        json.dump(ATIF | {"trajectory_id": "math_1#4"}, zipped)
    (tmp_path / "c.json").write_text(json.dumps(ATIF | {"steps": [agent_step(1, 10, 5), agent_step(2, 30, 5)]}))
    with pytest.raises(FormatError, match="no durations"):
        load(tmp_path)
    trace = load(tmp_path, skip_bad=True)
    assert [trajectory.trajectory_id for trajectory in trace.trajectories] == ["math_1#3", "math_1#4"]
    assert trace.header.dropped == {"bad": 1}


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (SESSION | {"steps": [SESSION["steps"][0] | {"gap_s": -1.0}]}, r"steps\[0\].gap_s: time goes backwards"),
        (SESSION | {"steps": [SESSION["steps"][0] | {"completion_tokens": -3}]}, r"steps\[0\].completion_tokens"),
        (ABENCH | {"turns": [ABENCH["turns"][0] | {"cached_tokens": 501}]}, r"turns\[0\].cached_tokens"),
        (ABENCH | {"turns": [ABENCH["turns"][0] | {"pre_gap_ms": -1}]}, r"turns\[0\].pre_gap_ms"),
        (ATIF | {"schema_version": "ATIF-v9.0"}, "schema_version"),
    ],
)
def test_inconsistent_imports_are_refused_by_line_and_field_or_skipped(tmp_path, document, field):
    good = {"id": SESSION, "session_id": ABENCH, "schema_version": ATIF}[next(iter(document))]
    path = write_lines(tmp_path / "x.jsonl", good, document)
    with pytest.raises(FormatError, match=rf"line 2: .*{field}"):
        load(path)
    assert load(path, skip_bad=True).header.dropped == {"bad": 1}


@pytest.mark.parametrize(("document", "format_"), [(SESSION, "sessions"), (ABENCH, "abench"), (ATIF, "atif")])
def test_a_format_is_known_by_its_content_plain_or_gzipped(tmp_path, document, format_):
    plain = write_lines(tmp_path / "plain", document)
    zipped = tmp_path / "zipped"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert guess(plain) == guess(zipped) == format_
    assert load(plain).trajectories == load(zipped).trajectories


def test_a_runs_directory_and_its_event_log_are_recorded(tmp_path):
    (tmp_path / "events").mkdir()
    log = logs.write(tmp_path / "events" / "engine.jsonl", logs.two_trajectories())
    names = [trajectory.trajectory_id for trajectory in load(tmp_path).trajectories]
    assert names == ["a#0", "b#0"]
    assert load(log).trajectories == load(tmp_path).trajectories


def test_an_unknown_format_is_refused_by_name_and_by_content(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", {"some": "thing"})
    with pytest.raises(FormatError, match="line 1: no known trace format"):
        load(path)
    with pytest.raises(ConfigError, match="did you mean 'abench'"):
        load(path, "abenc")


def test_a_file_without_a_usable_trajectory_is_refused(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", SESSION | {"steps": []})
    with pytest.raises(FormatError, match="no trajectory"):
        load(path, skip_bad=True)
