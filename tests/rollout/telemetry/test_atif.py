"""Trajectories as files: one for each, whatever their ids look like, and each a valid document."""

from __future__ import annotations

import json

import atif

from makespan.rollout.telemetry.atif import file_name, write_trajectories
from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.trajectory import Failure, Segment, TrajectoryResult, TrajectoryState, Turn

NO_LOG = MergedLog(headers=(), events=(), elsewhere=(), torn=())


def result(trajectory_id: str, **changes) -> TrajectoryResult:
    values = {
        "trajectory_id": trajectory_id,
        "task_id": "t",
        "group": "t",
        "state": TrajectoryState.FINISHED,
        "reward": 1.0,
        "failure": None,
        "first_prompt": (("system", "rules"), ("user", "go")),
        "turns": (
            Turn(
                index=0,
                replica_id="replica-0",
                prompt_tokens=3,
                generated_tokens=2,
                cached_tokens=None,
                action="hi",
                observation=(("user", "well"),),
            ),
        ),
        "segments": (Segment([5, 6, 7], False), Segment([8, 9], True, [-0.5, -1.5])),
    }
    return TrajectoryResult(**{**values, **changes})


def test_ids_that_are_file_names_stay_as_they_are():
    assert file_name("multi_turn_base_7#0") == "multi_turn_base_7#0"


def test_other_ids_never_share_a_file_and_never_exceed_what_file_systems_allow():
    ids = ["a/b#0", "a_b#0", "a b#0", "a\nb#0", "a\0b#0", "x" * 300, "x" * 301, "é" * 150, "\ud800", "..", "a/../b"]
    names = [file_name(name) for name in ids]
    assert len(set(names)) == len(ids)
    for name in names:
        assert len(name.encode()) <= 200
        assert "/" not in name
        assert "\0" not in name


def test_each_trajectory_has_a_file_that_the_format_accepts(tmp_path):
    failed = result(
        "a/b#1",
        state=TrajectoryState.FAILED,
        reward=None,
        failure=Failure("refused", "no such task"),
        first_prompt=(),
        turns=(),
        segments=(),
    )
    write_trajectories(tmp_path, [result("a/b#0"), failed], NO_LOG, model="m", source="model")
    documents = {}
    for path in tmp_path.glob("*.json"):
        document = atif.Trajectory.model_validate_json(path.read_text())
        documents[document.trajectory_id] = document
    assert set(documents) == {"a/b#0", "a/b#1"}
    agent = documents["a/b#0"].steps[2]
    assert (agent.message, agent.metrics.completion_token_ids, agent.metrics.logprobs) == ("hi", [8, 9], [-0.5, -1.5])
    assert agent.metrics.cached_tokens is None
    assert agent.observation.results[0].content == "well"
    assert documents["a/b#1"].steps[0].message == "failed (refused): no such task"
    assert json.loads((tmp_path / f"{file_name('a/b#1')}.json").read_text())["extra"]["reward"] is None
