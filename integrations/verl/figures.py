"""What a trajectory reports of itself, and what a step's trajectories say together.

An agent loop measures its trajectory on its own clock and puts the figures beside the tokens, in verl's
`extra_fields["makespan"]`. The sampler collects them where a step's batch is complete and returns them to the trainer,
which logs them with the rest of the step. Nothing here subtracts two hosts' clocks, and a figure that was not measured
is left out, never reported as 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

import msgspec

EXTRA_FIELD = "makespan"
"""The key in verl's `extra_fields` that holds a trajectory's figures."""


class TrajectoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory, as measured by the process that ran it. Times in seconds."""

    state: Literal["finished", "truncated", "failed"]
    failure: str = ""
    """Of a failed trajectory: what kind of failure, e.g. `timeout` or `unreachable`."""
    turns: int = 0
    """Turns of the assistant."""
    prompt_tokens: int = 0
    """Prompt tokens over all turns: each turn's prompt is the whole context so far."""
    generated_tokens: int = 0
    cached_tokens: int | None = None
    """Of the prompt tokens, those that the replica had in its cache."""
    recomputed_tokens: int | None = None
    """Uncached prompt tokens that some replica had computed for this trajectory before."""
    preemptions: int | None = None
    completion_s: float = 0.0
    """From the trajectory's start to its end."""
    admission_s: float = 0.0
    """Waiting for admission: to start, or parked."""
    generate_s: float = 0.0
    """Waiting for verl's `generate`: routing, the replica's queue, prefill and decode (verl does not part them)."""
    slot_queue_s: float = 0.0
    """Waiting for environment slots, measured by their owner."""
    environment_s: float = 0.0
    """Environment actions running, measured by the owner of the slots."""


def step_metrics(trajectories: Sequence[TrajectoryFigures]) -> dict[str, float]:
    """The figures of a step under the names they have in verl's log; empty without trajectories.

    The percentiles are nearest-rank: a p99 of 8 trajectories is the slowest one. `makespan/slowest/*` parts the
    completion time of the slowest trajectory; `other_s` is what remains (tokenisation, the network, the event loop).
    """
    if not trajectories:
        return {}
    completions = sorted(t.completion_s for t in trajectories)
    slowest = max(trajectories, key=lambda t: t.completion_s)
    metrics: dict[str, float] = {
        "makespan/trajectories/total": len(trajectories),
        **{
            f"makespan/trajectories/{state}": sum(t.state == state for t in trajectories)
            for state in ("finished", "truncated", "failed")
        },
        **{f"makespan/completion_s/p{p}": _nearest_rank(completions, p) for p in (50, 90, 99)},
        "makespan/turns/mean": _mean([t.turns for t in trajectories]),
        "makespan/turns/max": max(t.turns for t in trajectories),
        "makespan/phases_s/admission": _mean([t.admission_s for t in trajectories]),
        "makespan/phases_s/generate": _mean([t.generate_s for t in trajectories]),
        "makespan/phases_s/slot_queue": _mean([t.slot_queue_s for t in trajectories]),
        "makespan/phases_s/environment": _mean([t.environment_s for t in trajectories]),
        "makespan/slowest/completion_s": slowest.completion_s,
        **{f"makespan/slowest/{name}": seconds for name, seconds in _phases(slowest).items()},
        "makespan/tokens/prompt": sum(t.prompt_tokens for t in trajectories),
        "makespan/tokens/generated": sum(t.generated_tokens for t in trajectories),
    }
    for name, measured in (
        ("makespan/tokens/cached", [t.cached_tokens for t in trajectories]),
        ("makespan/tokens/recomputed", [t.recomputed_tokens for t in trajectories]),
        ("makespan/preemptions", [t.preemptions for t in trajectories]),
    ):
        known = [value for value in measured if value is not None]
        if len(known) == len(trajectories):
            metrics[name] = sum(known)
    return metrics


SLOWEST = 20
"""Rows of the table of slowest trajectories."""

PHASES = ("admission_s", "generate_s", "slot_queue_s", "environment_s", "other_s")


def slowest_table(
    keys: Sequence[str], trajectories: Sequence[TrajectoryFigures], step: int
) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the step's slowest trajectories, the slowest first, each with the reason: the phase in which
    it spent the most seconds beyond the median trajectory. `keys` are their rows in verl's queue."""
    spent = [_phases(t) for t in trajectories]
    usual = {name: median([phases[name] for phases in spent]) for name in PHASES} if spent else {}
    order = sorted(range(len(keys)), key=lambda k: -trajectories[k].completion_s)[:SLOWEST]
    rows: list[list[Any]] = []
    for k in order:
        t, phases = trajectories[k], spent[k]
        why = max(PHASES, key=lambda name: phases[name] - usual[name])
        reason = f"{why} {phases[why]:.1f}, {phases[why] - usual[why]:.1f} beyond the median"
        reason = f"{t.state} ({t.failure}): {reason}" if t.failure else reason
        times = [t.completion_s, *(phases[name] for name in PHASES)]
        rows.append([step, keys[k], t.state, reason, t.turns, *times, t.cached_tokens, t.recomputed_tokens])
    columns = ["step", "trajectory", "state", "why_late", "turns", "completion_s", *PHASES]
    return [*columns, "cached_tokens", "recomputed_tokens"], rows


def _phases(t: TrajectoryFigures) -> dict[str, float]:
    measured = {name: getattr(t, name) for name in PHASES[:-1]}
    return {**measured, "other_s": t.completion_s - sum(measured.values())}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _nearest_rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
