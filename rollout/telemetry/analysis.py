"""What the event log says of a batch: how long, where the time went, and how much sooner it could have ended.

Everything here is a function of the merged log. A figure that some event did not carry is None ("not measured").

Seconds of a phase are summed over trajectories: with 16 trajectories in decode at once a second of wall clock is 16
seconds of decode. `overhead` is what is left of an inference or an action after the times that its owner measured:
messages, queues between processes, and the engine's own work.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.bounds import Bounds, lower_bounds
from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.last_chain import LastChain, last_chain
from makespan.rollout.telemetry.merge import MergedLog, failed
from makespan.rollout.telemetry.slot_use import SlotUse, slot_uses, total


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by phase, summed over trajectories; None: not measured."""

    admission: float
    replica_queue: float | None
    prefill: float | None
    decode: float | None
    slot_queue: float | None
    environment: float | None
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
    """Those that failed included."""
    queue_s: float | None
    service_s: float | None
    utilisation: float | None
    """Share of the slots' time that actions ran, over the makespan."""


class Completions(msgspec.Struct, frozen=True, kw_only=True):
    """When trajectories ended, in seconds from the batch's start."""

    p50: float | None
    p90: float | None
    p99: float | None


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from when a share of the trajectories had ended to the end of the last one: few run, and most idles.

    Cancelled trajectories do not count.
    """

    after_90: float | None
    after_99: float | None


class BatchAnalysis(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, from its event log."""

    makespan_s: float
    complete: bool
    """False when the log ends before the batch did."""
    lower_bound_s: float | None
    """The largest of `bounds_s`."""
    bounds_s: Bounds
    states: dict[str, int]
    completion_s: Completions
    tail_s: Tail
    last_chain: LastChain | None
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
    """Analyse the batch of a run. Raises `FormatError` when the log holds no batch, or more than one."""
    starts = list(log.of("batch_start"))
    if not starts:
        raise FormatError("the event log holds no batch: the run ended before its batch began")
    if len(starts) > 1:
        raise FormatError(f"the event log holds {len(starts)} batches, and figures are of one: give each its own log")
    start = starts[0]
    end = next(log.of("batch_end"), None)
    last_s = max(event.monotonic_s for role, event in log.events if role == "engine")
    makespan_s = (end.monotonic_s if end else last_s) - start.monotonic_s
    ended = list(log.of("ended"))
    generations = list(log.of("generate"))
    uses = slot_uses(log)
    slots = _slots(log)
    needed = [event for kind in ("reset", "act") for event in log.of(kind) if not failed(event)]
    bounds = lower_bounds(log, needed, generations, slots, len(start.data["replicas"]))
    return BatchAnalysis(
        makespan_s=makespan_s,
        complete=end is not None,
        lower_bound_s=bounds.largest(),
        bounds_s=bounds,
        states=_count(event.data["state"] for event in ended),
        completion_s=_completions(ended, start),
        tail_s=_tail(ended),
        last_chain=last_chain(log, start),
        phases_s=_phases(log, start, generations, uses),
        tokens=_tokens(generations),
        preemptions=_total(generations, "preemptions"),
        inferences=len(generations),
        slot_classes=_slot_classes(uses, slots, makespan_s),
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


def _tail(ended: list[Event]) -> Tail:
    times = sorted(event.monotonic_s for event in ended if event.data["state"] != "cancelled")

    def after(share: float) -> float | None:
        return times[-1] - times[math.ceil(share * len(times)) - 1] if times else None

    return Tail(after_90=after(0.90), after_99=after(0.99))


def _phases(log: MergedLog, start: Event, generations: list[Event], uses: list[SlotUse]) -> Phases:
    queue, prefill, decode = (_total(generations, field) for field in ("queue_s", "prefill_s", "decode_s"))
    seconds = [use.seconds() or (None, None) for use in uses]
    slot_queue, environment = total([waited for waited, _ in seconds]), total([ran for _, ran in seconds])
    elapsed = sum(event.monotonic_s - event.data["start_s"] for event in generations)
    elapsed += sum(use.elapsed_s for use in uses)
    inside = total([queue, prefill, decode, slot_queue, environment])
    return Phases(
        admission=sum(event.monotonic_s - start.monotonic_s for event in log.of("admitted"))
        + sum(event.monotonic_s - event.data["start_s"] for event in log.of("parked")),
        replica_queue=queue,
        prefill=prefill,
        decode=decode,
        slot_queue=slot_queue,
        environment=environment,
        overhead=None if inside is None else elapsed - inside,
    )


def _tokens(generations: list[Event]) -> Tokens:
    return Tokens(
        prompt=_total(generations, "prompt_tokens"),
        cached=_total(generations, "cached_tokens"),
        recomputed=_total(generations, "recomputed_tokens"),
        generated=_total(generations, "generated_tokens"),
    )


def _slot_classes(uses: list[SlotUse], slots: dict[str, int], makespan_s: float) -> dict[str, SlotClass]:
    by_class: dict[str, list[SlotUse]] = defaultdict(list)
    for use in uses:
        by_class[use.slot_class].append(use)
    # Without a class: turns that led to no action, or failures that nobody measured, which may be of any class.
    anywhere = by_class.pop("", [])
    classes = {}
    for name, own in sorted(by_class.items()):
        queue_s = total([use.queue_s for use in (*own, *anywhere)])
        service_s = total([use.service_s for use in (*own, *anywhere)])
        count = slots.get(name)
        classes[name] = SlotClass(
            slots=count,
            actions=sum(use.actions for use in own),
            queue_s=queue_s,
            service_s=service_s,
            utilisation=service_s / (count * makespan_s)
            if service_s is not None and count and makespan_s > 0
            else None,
        )
    return classes


def _rewards(log: MergedLog, ended: list[Event]) -> dict[str, list[float]]:
    task_of = {event.trajectory_id: event.data["task_id"] for event in log.of("submitted")}
    rewards: dict[str, list[float]] = defaultdict(list)
    for event in ended:
        if event.data["reward"] is None:
            continue
        if event.trajectory_id not in task_of:
            raise FormatError(f"trajectory {event.trajectory_id!r} ended and was never submitted: its log lacks events")
        rewards[task_of[event.trajectory_id]].append(event.data["reward"])
    return dict(rewards)
