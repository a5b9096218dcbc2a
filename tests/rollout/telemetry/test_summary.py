"""The summary says what the analysis found, and nothing that was not measured."""

from __future__ import annotations

import pytest

from makespan.rollout.telemetry.analysis import SlotClass, analyse
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.telemetry.merge import merge
from makespan.rollout.telemetry.summary import Summary, summarise


@pytest.fixture
def written(tmp_path):
    """A batch of two trajectories, one with a reward of 1, one failed, on a clock of whole seconds."""

    def write(*actions: dict) -> Summary:
        times = iter(range(100))
        log = EventLog(tmp_path / "engine.jsonl", "engine", clock=lambda: float(next(times)))
        log.emit("environment_server", slots={"x.step": 2, "x.start": 1})
        log.emit("batch_start", trajectories=2, replicas=["r"], concurrency=None, source="script")
        for name in ("a#0", "b#0"):
            log.emit("submitted", name, task_id=name[0], group=name[0])
        for action in actions:
            log.emit("act", "a#0", turn=0, start_s=0.0, **action)
        log.emit("ended", "a#0", state="finished", reward=1.0, turns=1, failure=None)
        log.emit("ended", "b#0", state="failed", reward=None, turns=0, failure={"kind": "raised", "message": "boom"})
        log.emit("batch_end", stopped=False)
        log.close()
        analysis = analyse(merge([tmp_path / "engine.jsonl"]))
        return summarise(analysis, name="n", source="script", notes=[], setup_s=None, machine={}, total=3)

    return write


def test_counts_rewards_and_failures_are_those_of_the_log(written):
    summary = written()
    assert (summary.trajectories.total, summary.trajectories.finished, summary.trajectories.failed) == (3, 1, 1)
    assert summary.reward.by_task == {"a": 1.0}  # a failed trajectory has no reward: not a 0
    assert summary.reward.mean == 1.0
    assert summary.failures == {"raised": 1}


def test_the_utilisation_is_the_busiest_classs(written):
    act = {"queue_s": 0.0, "outcome": "ok"}
    summary = written(
        {"slot_class": "x.step", "service_s": 3.0, **act}, {"slot_class": "x.start", "service_s": 0.7, **act}
    )
    # From the batch's start at second 2 to its end at second 9: 3 of 2 x 7 seconds, 0.7 of 7.
    assert summary.environment_utilisation == pytest.approx(3 / 14)
    assert summary.slot_classes["x.start"].utilisation == pytest.approx(0.1)


def test_nobody_knows_the_busiest_when_one_class_was_not_measured(written):
    summary = written(
        {"slot_class": "x.step", "service_s": None, "queue_s": None, "outcome": "timeout"},
        {"slot_class": "x.start", "service_s": 0.7, "queue_s": 0.0, "outcome": "ok"},
    )
    assert isinstance(summary.slot_classes["x.step"], SlotClass)
    assert summary.slot_classes["x.step"].utilisation is None
    assert summary.environment_utilisation is None
