"""A step ends by its deadline, trains on what succeeded, and says what it saw (verl's queue here is a dictionary)."""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar

import msgspec
import pytest
import transfer_queue as tq

from makespan.integrations.verl.figures import TrajectoryFigures
from makespan.integrations.verl.sampler import MakespanReplayBuffer, MakespanReplayBufferAsync, NothingToTrainOn
from makespan.rollout.errors import ConfigError

DEADLINE_S = 0.3


class Queue:
    """The transfer queue as the samplers use it: tags and fields by key, in one partition."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.figures: dict[str, TrajectoryFigures] = {}

    def prompt(self, group: str, status: str) -> None:
        self.tags[group] = {"is_prompt": True, "status": status, "global_steps": 1}

    def row(self, key: str, state: str = "finished", completion_s: float = 1.0) -> None:
        self.tags[key] = {"status": "success", "seq_len": 3}
        self.figures[key] = TrajectoryFigures(
            state=state,  # type: ignore[arg-type]
            failure="timeout" if state == "failed" else "",
            completion_s=completion_s,
        )

    def kv_list(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {"train": {key: dict(tag) for key, tag in self.tags.items()}}

    def kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.setdefault(key, {}).update(tag)

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.tags.pop(key, None)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> dict[str, Any]:
        return {"extra_fields": [{"makespan": msgspec.to_builtins(self.figures[key])} for key in keys]}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    fake = Queue()
    for name in ("kv_list", "kv_put", "kv_clear", "kv_batch_get"):
        monkeypatch.setattr(tq, name, getattr(fake, name))
    return fake


def _sampler(**settings: Any) -> MakespanReplayBuffer:
    return MakespanReplayBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs={"deadline_s": DEADLINE_S, "poll_interval_s": 0.02, **settings},
    )


def test_a_complete_step_is_returned_with_its_figures(queue: Queue) -> None:
    for group in ("a", "b"):
        queue.prompt(group, "finished")
        queue.row(f"{group}_0_0", completion_s=2.0)
        queue.row(f"{group}_1_0", completion_s=6.0)
    batch, metrics = _sampler().sample(1, "train", 2)
    assert sorted(batch.keys) == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    assert metrics["makespan/trajectories/finished"] == 4
    assert metrics["makespan/slowest/completion_s"] == 6.0
    assert metrics["makespan/groups/abandoned"] == metrics["makespan/trajectories/dropped"] == 0
    assert 0.0 <= metrics["makespan/makespan_s"] < DEADLINE_S


def test_wandb_gets_the_step_axis_and_a_table_and_may_fail(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingRun:
        asked: ClassVar[list[str]] = []

        def __getattr__(self, name: str) -> Any:
            self.asked.append(name)
            raise RuntimeError("the service is gone")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=FailingRun(), Table=lambda **data: data))
    queue.prompt("a", "finished")
    queue.row("a_0_0")
    queue.row("a_1_0")
    sampler = _sampler()
    batch, metrics = sampler.sample(7, "train", 1)
    assert len(batch.keys) == 2
    assert metrics["makespan/step"] == 7
    assert FailingRun.asked == ["define_metric", "step"]


def test_a_group_that_never_finishes_is_given_up_and_what_it_has_is_used(queue: Queue) -> None:
    queue.prompt("good", "finished")
    queue.row("good_0_0")
    queue.prompt("stuck", "running")
    queue.row("stuck_0_0")
    queue.row("stuck_2_0")
    queue.prompt("alone", "running")
    queue.row("alone_1_0")
    queue.prompt("lost", "pending")
    batch, metrics = _sampler().sample(1, "train", 4)
    assert sorted(batch.keys) == ["good_0_0", "stuck_0_0", "stuck_2_0"]
    assert metrics["makespan/groups/abandoned"] == 3
    assert metrics["makespan/trajectories/dropped"] == 1  # a lone one has no baseline
    assert metrics["makespan/makespan_s"] >= DEADLINE_S


def test_rows_of_a_given_up_group_that_come_late_are_removed_and_rows_in_training_are_not(queue: Queue) -> None:
    sampler = _sampler()
    queue.prompt("good", "finished")
    queue.row("good_0_0")
    queue.prompt("slow", "running")
    queue.row("slow_0_0")
    queue.row("slow_2_0")
    sampler.sample(1, "train", 2)
    queue.row("slow_1_0")  # its second trajectory arrives, and then the worker says that the group is finished
    queue.kv_put("slow", "train", {"status": "finished"})
    queue.prompt("next", "finished")
    queue.row("next_0_0")
    batch, metrics = sampler.sample(2, "train", 1)
    assert batch.keys == ["next_0_0"]
    assert metrics["makespan/groups/abandoned"] == 0
    assert "slow_1_0" not in queue.tags
    assert "slow" not in queue.tags
    assert "slow_0_0" in queue.tags  # the trainer was given this one and clears it itself


def test_failed_trajectories_are_not_trained_on_nor_is_one_that_they_leave_alone(queue: Queue) -> None:
    queue.prompt("a", "finished")
    for session, state in enumerate(["finished", "failed", "truncated"]):
        queue.row(f"a_{session}_0", state)
    queue.prompt("b", "finished")
    queue.row("b_0_0")
    queue.row("b_1_0", "failed")
    queue.prompt("single", "finished")
    queue.row("single_0_0")
    batch, metrics = _sampler().sample(1, "train", 3)
    assert sorted(batch.keys) == ["a_0_0", "a_2_0", "single_0_0"]
    assert len(batch.tags) == 3
    assert metrics["makespan/trajectories/failed"] == 2
    assert metrics["makespan/trajectories/dropped"] == 3
    assert "b_0_0" not in queue.tags


def test_a_step_of_failures_ends_with_an_error_that_counts_them(queue: Queue) -> None:
    queue.prompt("a", "finished")
    queue.row("a_0_0", "failed")
    queue.row("a_1_0", "failed")
    with pytest.raises(NothingToTrainOn, match=r"none of the step's 2 trajectories .* 2 failed \(timeout: 2\)"):
        _sampler().sample(1, "train", 1)


def test_a_group_may_take_as_long_as_the_deadline_from_when_it_was_first_seen(queue: Queue) -> None:
    """The age is the group's, not the call's: a group that starts late is not given up with an old one."""
    queue.prompt("old", "running")
    sampler = _sampler()
    waits = 0

    def finish_after_a_while(partition_id: str, last: float) -> float:
        nonlocal waits
        waits += 1
        if waits == 12:  # most of the deadline is over
            queue.prompt("young", "running")
        if waits == 20:
            queue.prompt("young", "finished")
            queue.row("young_0_0")
        return MakespanReplayBuffer._wait_for_next_poll(sampler, partition_id, last)

    sampler._wait_for_next_poll = finish_after_a_while  # type: ignore[method-assign]
    batch, metrics = sampler.sample(1, "train", 2)
    assert metrics["makespan/groups/abandoned"] == 1
    assert batch.keys == ["young_0_0"]


def test_each_trainer_mode_has_its_class_and_a_wrong_one_is_named() -> None:
    arguments = {
        "trainer_config": {},
        "max_off_policy_threshold": 8,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
        "refill_fn": lambda n: n,
    }
    with pytest.raises(ConfigError, match="'colocate_async': take MakespanReplayBufferAsync"):
        MakespanReplayBuffer(trainer_mode="colocate_async", **arguments)
    MakespanReplayBufferAsync(trainer_mode="colocate_async", **arguments)
    with pytest.raises(ConfigError, match="unknown key 'deadline'"):
        MakespanReplayBuffer(trainer_mode="sync", **{**arguments, "sampler_kwargs": {"deadline": 3}})
