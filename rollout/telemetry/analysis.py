"""What the event log says of a batch: how long, where the time went, and how much sooner it could have ended.

Everything here is a function of the merged log. A figure that some event did not carry is None ("not measured").

Seconds of a phase are summed over trajectories: with 16 trajectories in decode at once a second of wall clock is 16
seconds of decode. `overhead` is what is left of an inference or an action after the times that its owner measured:
messages, queues between processes, and the engine's own work.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog

RATE_SAMPLE_TOKENS = 256
"""Prefills of fewer uncached tokens say more of a step's fixed cost than of the rate, and are not used for it."""


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by phase, summed over trajectories."""

    admission: float
    replica_queue: float | None
    prefill: float | None
    decode: float | None
    slot_queue: float
    environment: float
    overhead: float | None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of all inferences."""

    prompt: int
    cached: int | None
    recomputed: int | None
    """Uncached prompt tokens that some replica had already computed for the same trajectory."""
    generated: int


class SlotClass(msgspec.Struct, frozen=True, kw_only=True):
    """One class of environment slots over the batch."""

    slots: int | None
    actions: int
    queue_s: float
    service_s: float
    utilisation: float | None
    """Share of the slots' time that actions ran, over the makespan."""


class Completions(msgspec.Struct, frozen=True, kw_only=True):
    """When trajectories ended, in seconds from the batch's start."""

    p50: float | None
    p90: float | None
    p99: float | None


class BatchAnalysis(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, from its event log."""

    makespan_s: float
    complete: bool
    """False when the log ends before the batch did."""
    lower_bound_s: float | None
    states: dict[str, int]
    completion_s: Completions
    phases_s: Phases
    tokens: Tokens
    preemptions: int | None
    inferences: int
    slot_classes: dict[str, SlotClass]
    rewards: dict[str, list[float]]
    """Rewards of the trajectories that have one, by task."""
    failures: dict[str, int]
    """Failed trajectories by kind of failure."""


def percentile(values: list[float], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the values lie, interpolated linearly; None of an empty list."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def analyse(log: MergedLog) -> BatchAnalysis:
    """Analyse the batch of a run. Raises `FormatError` when the log holds no batch."""
    start = next(log.of("batch_start"), None)
    if start is None:
        raise FormatError("the event log holds no batch: the run ended before its batch began")
    end = next(log.of("batch_end"), None)
    last_s = max(event.monotonic_s for role, event in log.events if role == "engine")
    makespan_s = (end.monotonic_s if end else last_s) - start.monotonic_s
    ended = list(log.of("ended"))
    generations = list(log.of("generate"))
    actions = [*log.of("reset"), *log.of("act")]
    slots = _slots(log)
    return BatchAnalysis(
        makespan_s=makespan_s,
        complete=end is not None,
        lower_bound_s=_lower_bound(actions, generations, slots),
        states=_count(event.data["state"] for event in ended),
        completion_s=_completions(ended, start),
        phases_s=_phases(log, start, generations, actions),
        tokens=_tokens(generations),
        preemptions=_total(generations, "preemptions"),
        inferences=len(generations),
        slot_classes=_slot_classes(actions, slots, makespan_s),
        rewards=_rewards(log, ended),
        failures=_count(e.data["failure"]["kind"] for e in ended if e.data["state"] == "failed"),
    )


def _count(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for name in names:
        counts[name] += 1
    return dict(counts)


def _total(events: list[Event], field: str) -> Any:
    """The sum of a field over events, None as soon as one of them did not measure it."""
    values = [event.data[field] for event in events]
    return None if any(value is None for value in values) else sum(values)


def _slots(log: MergedLog) -> dict[str, int]:
    return next((dict(event.data["slots"]) for event in log.of("environment_server")), {})


def _completions(ended: list[Event], start: Event) -> Completions:
    times = [event.monotonic_s - start.monotonic_s for event in ended if event.data["state"] != "cancelled"]
    return Completions(p50=percentile(times, 0.5), p90=percentile(times, 0.9), p99=percentile(times, 0.99))


def _phases(log: MergedLog, start: Event, generations: list[Event], actions: list[Event]) -> Phases:
    queue, prefill, decode = (_total(generations, field) for field in ("queue_s", "prefill_s", "decode_s"))
    slot_queue, environment = _total(actions, "queue_s"), _total(actions, "service_s")
    elapsed = sum(event.monotonic_s - event.data["start_s"] for event in (*generations, *actions))
    measured = (queue, prefill, decode)
    overhead = None if None in measured else elapsed - sum(measured) - slot_queue - environment
    return Phases(
        admission=sum(event.monotonic_s - start.monotonic_s for event in log.of("admitted")),
        replica_queue=queue,
        prefill=prefill,
        decode=decode,
        slot_queue=slot_queue,
        environment=environment,
        overhead=overhead,
    )


def _tokens(generations: list[Event]) -> Tokens:
    return Tokens(
        prompt=_total(generations, "prompt_tokens"),
        cached=_total(generations, "cached_tokens"),
        recomputed=_total(generations, "recomputed_tokens"),
        generated=_total(generations, "generated_tokens"),
    )


def _slot_classes(actions: list[Event], slots: dict[str, int], makespan_s: float) -> dict[str, SlotClass]:
    by_class: dict[str, list[Event]] = defaultdict(list)
    for event in actions:
        by_class[event.data["slot_class"]].append(event)
    classes = {}
    for name, events in sorted(by_class.items()):
        service_s, count = _total(events, "service_s"), slots.get(name)
        classes[name] = SlotClass(
            slots=count,
            actions=len(events),
            queue_s=_total(events, "queue_s"),
            service_s=service_s,
            utilisation=service_s / (count * makespan_s) if count and makespan_s > 0 else None,
        )
    return classes


def _rewards(log: MergedLog, ended: list[Event]) -> dict[str, list[float]]:
    task_of = {event.trajectory_id: event.data["task_id"] for event in log.of("submitted")}
    rewards: dict[str, list[float]] = defaultdict(list)
    for event in ended:
        if event.data["reward"] is not None:
            rewards[task_of[event.trajectory_id]].append(event.data["reward"])
    return dict(rewards)


def _lower_bound(actions: list[Event], generations: list[Event], slots: dict[str, int]) -> float | None:
    """No schedule of the same work ends before this, in seconds.

    The larger of two bounds. *Slots*: the environment work of a class over its slots. *Chain*: the longest trajectory
    alone on an idle system, its environment actions without waiting and its inference at the best prefill and decode
    rates that this run saw; tokens that were computed twice count once.
    """
    if not actions:
        return None
    work: dict[str, float] = defaultdict(float)
    chain: dict[str, float] = defaultdict(float)
    for event in actions:
        work[event.data["slot_class"]] += event.data["service_s"]
        chain[event.trajectory_id] += event.data["service_s"]
    bounds = [seconds / slots[name] for name, seconds in work.items() if name in slots]
    prefill_rate, decode_rate = _best_rates(generations)
    for event in generations:
        data = event.data
        if decode_rate is not None:
            chain[event.trajectory_id] += max(0, data["generated_tokens"] - 1) * decode_rate
        if prefill_rate is not None and data["cached_tokens"] is not None:
            needed = data["prompt_tokens"] - data["cached_tokens"] - data["recomputed_tokens"]
            chain[event.trajectory_id] += max(0, needed) * prefill_rate
    return max([*bounds, *chain.values()])


def _best_rates(generations: list[Event]) -> tuple[float | None, float | None]:
    """The fewest seconds a token that any inference of the run took in prefill and in decode."""

    def best(seconds: str, tokens: Callable[[dict[str, Any]], int], at_least: int) -> float | None:
        rates = [
            event.data[seconds] / tokens(event.data)
            for event in generations
            if event.data[seconds] is not None and tokens(event.data) >= at_least
        ]
        return min(rates, default=None)

    prefill = best("prefill_s", lambda d: d["prompt_tokens"] - (d["cached_tokens"] or 0), RATE_SAMPLE_TOKENS)
    decode = best("decode_s", lambda d: int(d["generated_tokens"]) - 1, 8)
    return prefill, decode
