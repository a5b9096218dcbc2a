"""`summary.json`: what a run says of itself, for people and for programs.

Every figure comes from the event log (`analysis.py`); what was not measured is null.
"""

from __future__ import annotations

from typing import Any

import msgspec

from makespan.rollout.agent import ActionSource
from makespan.rollout.telemetry.analysis import BatchAnalysis, Completions, Phases, SlotClass, Tail, Tokens
from makespan.rollout.telemetry.bounds import Bounds
from makespan.rollout.telemetry.last_chain import LastChain

SUMMARY_VERSION = 1


class TrajectoryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many trajectories ended in which state; `total` is all that were submitted."""

    total: int
    finished: int
    truncated: int
    failed: int
    cancelled: int


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of the trajectories that have one.

    `source` says whose actions they reward: with `script` they show that system and script work, and say nothing of
    the model.
    """

    source: ActionSource
    mean: float | None
    by_task: dict[str, float]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in figures."""

    version: int
    name: str
    makespan_s: float
    complete: bool
    lower_bound_s: float | None
    """The largest of `bounds_s`."""
    bounds_s: Bounds
    tail_s: Tail
    last_chain: LastChain | None
    """Where the time of the trajectory that ended last went; its parts add up to `total`."""
    trajectories: TrajectoryCounts
    completion_s: Completions
    phases_s: Phases
    tokens: Tokens
    preemptions: int | None
    inferences: int
    reward: Reward
    environment_utilisation: float | None
    """Of the busiest slot class; each class is in `slot_classes`."""
    slot_classes: dict[str, SlotClass]
    failures: dict[str, int]
    notes: list[str]
    """What a reader must know to take the figures for what they are (injected latency, scripted actions, …)."""
    setup_s: float | None
    """From the command's start to the batch's: replicas and environment server coming up."""
    machine: dict[str, Any]


def summarise(
    analysis: BatchAnalysis,
    *,
    name: str,
    source: ActionSource,
    notes: list[str],
    setup_s: float | None,
    machine: dict[str, Any],
    total: int,
) -> Summary:
    """The summary of an analysed batch of `total` trajectories."""
    by_task = {task: sum(rewards) / len(rewards) for task, rewards in sorted(analysis.rewards.items())}
    every = [reward for rewards in analysis.rewards.values() for reward in rewards]
    states = analysis.states
    utilisations = [c.utilisation for c in analysis.slot_classes.values()]
    known = [utilisation for utilisation in utilisations if utilisation is not None]
    return Summary(
        version=SUMMARY_VERSION,
        name=name,
        makespan_s=analysis.makespan_s,
        complete=analysis.complete,
        lower_bound_s=analysis.lower_bound_s,
        bounds_s=analysis.bounds_s,
        tail_s=analysis.tail_s,
        last_chain=analysis.last_chain,
        trajectories=TrajectoryCounts(
            total=total,
            finished=states.get("finished", 0),
            truncated=states.get("truncated", 0),
            failed=states.get("failed", 0),
            cancelled=states.get("cancelled", 0),
        ),
        completion_s=analysis.completion_s,
        phases_s=analysis.phases_s,
        tokens=analysis.tokens,
        preemptions=analysis.preemptions,
        inferences=analysis.inferences,
        reward=Reward(source=source, mean=sum(every) / len(every) if every else None, by_task=by_task),
        # The busiest class may be the one that was not measured: then nobody knows how busy the busiest was.
        environment_utilisation=max(known, default=None) if len(known) == len(utilisations) else None,
        slot_classes=analysis.slot_classes,
        failures=analysis.failures,
        notes=notes,
        setup_s=setup_s,
        machine=machine,
    )
