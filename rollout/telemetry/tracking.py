"""The figures of a batch that a tracker shows from step to step: one flat table, each with its meaning.

`METRICS` says of every figure what it is and which way is good; the tracker, the report and the documentation take it
from there. `tracked` computes them from the merged log. A figure that was not measured is None: a tracker leaves it
out, a page says so, and neither shows a 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from makespan.rollout.telemetry.analysis import BatchAnalysis
from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.forecast_error import forecast_error
from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.telemetry.occupancy import admitted, busy_s, most_at_once
from makespan.rollout.telemetry.slot_use import slot_uses
from makespan.rollout.telemetry.tail import TailUse, tail_use
from makespan.rollout.telemetry.timeline import Row, batch_start

Better = Literal["lower", "higher", "neither"]


class Metric(NamedTuple):
    """One figure, or one for each slot class or kind of failure where its name has a part in angle brackets."""

    name: str
    better: Better
    meaning: str


METRICS = (
    Metric("makespan_s", "lower", "From the batch's start to its end."),
    Metric("lower_bound_s", "neither", "No schedule of the same work ends before it."),
    Metric("over_lower_bound", "lower", "Makespan over the lower bound; 1 cannot be beaten."),
    Metric("completion_s/p50", "lower", "When half of the trajectories had ended."),
    Metric("completion_s/p90", "lower", "When 90% had."),
    Metric("completion_s/p99", "lower", "When 99% had."),
    Metric("tail/after_90_s", "lower", "From when 90% of the trajectories had ended to the end of the last."),
    Metric("tail/after_99_s", "lower", "The same from 99%."),
    Metric("tail/idle_replica_90_s", "lower", "Seconds in the tail after 90% without a request, over all replicas."),
    Metric("tail/idle_replica_99_s", "lower", "The same after 99%."),
    Metric("tail/idle_slot_90_s/<class>", "lower", "Seconds in the tail after 90% that slots of a class were free."),
    Metric("tail/idle_slot_99_s/<class>", "lower", "The same after 99%."),
    Metric("last_chain/total_s", "lower", "The last trajectory to end, from the batch's start; its parts follow."),
    Metric("last_chain/admission_s", "lower", "Waiting to be admitted."),
    Metric("last_chain/replica_queue_s", "lower", "Waiting in a replica's queue."),
    Metric("last_chain/prefill_s", "lower", "Prefill of tokens that had not been computed before."),
    Metric("last_chain/recomputation_s", "lower", "Prefill of tokens that had: a cache was lost, or the chain moved."),
    Metric("last_chain/decode_s", "lower", "Generating tokens."),
    Metric("last_chain/slot_queue_s", "lower", "Waiting for an environment slot."),
    Metric("last_chain/environment_s", "lower", "Environment actions running."),
    Metric("last_chain/overhead_s", "lower", "Messages, and the engine's own work."),
    Metric("phase_sum_s/admission", "lower", "Waiting to be admitted, summed over trajectories; so the next six."),
    Metric("phase_sum_s/replica_queue", "lower", "Waiting in a replica's queue."),
    Metric("phase_sum_s/prefill", "lower", "Prefill, recomputation included."),
    Metric("phase_sum_s/decode", "lower", "Generating tokens."),
    Metric("phase_sum_s/slot_queue", "lower", "Waiting for an environment slot."),
    Metric("phase_sum_s/environment", "lower", "Environment actions running."),
    Metric("phase_sum_s/overhead", "lower", "Messages between processes, and the engine's own work."),
    Metric("tokens/prompt", "neither", "Prompt tokens of all turns: each turn's prompt is the whole context so far."),
    Metric("tokens/cached", "higher", "Of those, tokens that the replica still held."),
    Metric("tokens/recomputed", "lower", "Of the others, tokens that a replica had computed before."),
    Metric("tokens/generated", "neither", "Tokens generated."),
    Metric("tokens/cached_share", "higher", "Cached over prompt tokens."),
    Metric("tokens/recomputed_share", "lower", "Recomputed over prompt tokens."),
    Metric("preemptions", "lower", "Sequences that a replica threw out and began again."),
    Metric("slots/<class>/wait_mean_s", "lower", "An action's mean wait for a slot of the class."),
    Metric("slots/<class>/wait_max_s", "lower", "The longest wait."),
    Metric("slots/<class>/utilisation", "higher", "Share of the slots' time in which actions ran."),
    Metric("forecast/turns_error", "lower", "Mean error of the forecast of remaining turns, in turns."),
    Metric("forecast/turns_bias", "neither", "The same with its sign; above 0: chains were expected to be longer."),
    Metric("forecast/error_share", "lower", "Errors over the turns that really remained."),
    Metric("concurrency/mean", "neither", "Trajectories admitted and not ended, on average over the makespan."),
    Metric("concurrency/max", "neither", "The most at once."),
    Metric("concurrency/reference", "neither", "The most that admission allows at the start; absent: no limit."),
    Metric("reward/mean", "higher", "Over the trajectories that have a reward; a failed one has none."),
    Metric("trajectories/total", "neither", "Trajectories of the batch."),
    Metric("trajectories/finished", "higher", "Ended by the environment."),
    Metric("trajectories/truncated", "lower", "Cut by a limit on turns or context, or by the environment's own."),
    Metric("trajectories/failed", "lower", "Without a result: a faster batch that fails more is not faster."),
    Metric("trajectories/cancelled", "lower", "Stopped from outside."),
    Metric("failures/<kind>", "lower", "Failed trajectories by kind of failure."),
    Metric("turns/mean", "neither", "Turns of a trajectory that ended."),
    Metric("turns/max", "neither", "Of the one with the most."),
)
"""Every figure, in the order in which pages show them."""


def tracked(log: MergedLog, analysis: BatchAnalysis, timeline: Sequence[Row]) -> dict[str, float | None]:
    """The figures of a batch by name; None: not measured."""
    start = batch_start(log)
    makespan_s, bound_s, tokens, chain = (
        analysis.makespan_s,
        analysis.lower_bound_s,
        analysis.tokens,
        analysis.last_chain,
    )
    return {
        "makespan_s": makespan_s,
        "lower_bound_s": bound_s,
        "over_lower_bound": makespan_s / bound_s if bound_s else None,
        **{f"completion_s/{name}": value for name, value in msgspec.structs.asdict(analysis.completion_s).items()},
        "tail/after_90_s": analysis.tail_s.after_90,
        "tail/after_99_s": analysis.tail_s.after_99,
        **_idle("90", tail_use(log, analysis, analysis.tail_s.after_90)),
        **_idle("99", tail_use(log, analysis, analysis.tail_s.after_99)),
        **{f"last_chain/{name}_s": None if chain is None else getattr(chain, name) for name in LAST_CHAIN},
        **{f"phase_sum_s/{name}": value for name, value in msgspec.structs.asdict(analysis.phases_s).items()},
        **{f"tokens/{name}": value for name, value in msgspec.structs.asdict(tokens).items()},
        "tokens/cached_share": _share(tokens.cached, tokens.prompt),
        "tokens/recomputed_share": _share(tokens.recomputed, tokens.prompt),
        "preemptions": analysis.preemptions,
        **_slots(log, analysis),
        **_forecast(log),
        **_concurrency(timeline, makespan_s, start),
        **_outcomes(analysis, timeline),
    }


LAST_CHAIN = (
    "total",
    "admission",
    "replica_queue",
    "prefill",
    "recomputation",
    "decode",
    "slot_queue",
    "environment",
    "overhead",
)


def _share(part: float | None, whole: float) -> float | None:
    return None if part is None or not whole else part / whole


def _idle(share: str, use: TailUse | None) -> dict[str, float | None]:
    if use is None:
        return {f"tail/idle_replica_{share}_s": None}
    slots = {f"tail/idle_slot_{share}_s/{name}": value for name, value in use.idle_slot_s.items()}
    return {f"tail/idle_replica_{share}_s": use.idle_replica_s, **slots}


def _slots(log: MergedLog, analysis: BatchAnalysis) -> dict[str, float | None]:
    waits: dict[str, list[float | None]] = {name: [] for name in analysis.slot_classes}
    for use in slot_uses(log):
        for name in [use.slot_class] if use.slot_class else waits:
            # Several attempts at one action give the sum of their waits; with one attempt it is the action's wait.
            waits[name].append(use.queue_s)
    found: dict[str, float | None] = {}
    for name, figures in analysis.slot_classes.items():
        known = [wait for wait in waits[name] if wait is not None]
        complete = len(known) == len(waits[name]) and bool(known)
        mean = figures.queue_s / figures.actions if figures.queue_s is not None and figures.actions else None
        found[f"slots/{name}/wait_mean_s"] = mean
        found[f"slots/{name}/wait_max_s"] = max(known) if complete else None
        found[f"slots/{name}/utilisation"] = figures.utilisation
    return found


def _forecast(log: MergedLog) -> dict[str, float | None]:
    error = forecast_error(log)
    return {
        "forecast/turns_error": None if error is None else error.absolute_turns,
        "forecast/turns_bias": None if error is None else error.bias_turns,
        "forecast/error_share": None if error is None else error.share,
    }


def _concurrency(timeline: Sequence[Row], makespan_s: float, start: Event) -> dict[str, float | None]:
    intervals = admitted(timeline)
    return {
        "concurrency/mean": busy_s(intervals, 0.0, makespan_s) / makespan_s if makespan_s > 0 else None,
        "concurrency/max": most_at_once(intervals),
        "concurrency/reference": start.data["concurrency"],
    }


def _outcomes(analysis: BatchAnalysis, timeline: Sequence[Row]) -> dict[str, float | None]:
    rewards = [reward for own in analysis.rewards.values() for reward in own]
    turns = [row.turns for row in timeline if row.state not in ("cancelled", "unfinished")]
    return {
        "reward/mean": sum(rewards) / len(rewards) if rewards else None,
        "trajectories/total": len(timeline),
        **{
            f"trajectories/{state}": analysis.states.get(state, 0)
            for state in ("finished", "truncated", "failed", "cancelled")
        },
        **{f"failures/{kind}": count for kind, count in analysis.failures.items()},
        "turns/mean": sum(turns) / len(turns) if turns else None,
        "turns/max": max(turns, default=None),
    }


def metric_of(name: str) -> Metric:
    """What a figure is: its entry in `METRICS`. Raises `KeyError` for a name that no batch has."""
    for metric in METRICS:
        before, bracket, rest = metric.name.partition("<")
        after = rest.partition(">")[2]
        if name == metric.name or (bracket and name.startswith(before) and name.endswith(after)):
            return metric
    raise KeyError(name)
