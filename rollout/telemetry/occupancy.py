"""How many of something were busy when: replicas, slots, trajectories.

Everything is a list of intervals in seconds from the batch's start; what a moment, a window or a bucket of time says
is a sum over them. Slots are taken from the environment server's log where that could be placed on the engine's
clock: it knows every action, other jobs' and failed ones too. Without it they are taken from the engine's, where
an action's time in its slot is laid as the timeline lays it; a class with an action that nobody measured is None then.
An inference that failed is in no log, so that its replica counts as idle.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.telemetry.timeline import Row, batch_end_s, batch_start


class Interval(NamedTuple):
    """From when to when, in seconds from the batch's start."""

    start_s: float
    end_s: float


class SlotIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """The actions of one slot class."""

    running: tuple[Interval, ...]
    waiting: tuple[Interval, ...]


def admitted(timeline: Sequence[Row]) -> list[Interval]:
    """When each trajectory had been admitted and had not ended; those that never were admitted are left out."""
    found = []
    for row in timeline:
        first = next((segment for segment in row.segments if segment.phase.name != "ADMISSION"), None)
        if first is not None:
            found.append(Interval(first.start_s, row.end_s))
    return found


def requests(log: MergedLog) -> dict[str, list[Interval]]:
    """When each replica had a request, one interval a request, as the engine saw it."""
    zero_s = batch_start(log).monotonic_s
    found: dict[str, list[Interval]] = {name: [] for name in batch_start(log).data["replicas"]}
    for event in log.of("generate"):
        interval = Interval(event.data["start_s"] - zero_s, event.monotonic_s - zero_s)
        found.setdefault(event.data["replica"], []).append(interval)
    return found


def slot_intervals(log: MergedLog) -> dict[str, SlotIntervals | None]:
    """When actions ran in and waited for each class of slots; None: not measured."""
    zero_s = batch_start(log).monotonic_s
    records = [event for role, event in log.events if role == "broker" and event.kind == "action"]
    if records:
        return _of_server(records, zero_s, batch_end_s(log) - zero_s)
    found: dict[str, SlotIntervals | None] = {}
    running: dict[str, list[Interval]] = defaultdict(list)
    waiting: dict[str, list[Interval]] = defaultdict(list)
    unknown: set[str] = set()
    for kind in ("reset", "act"):
        for event in log.of(kind):
            data = event.data
            name = data["slot_class"]
            if data["queue_s"] is None or data["service_s"] is None:
                unknown.add(name)
                continue
            start_s = data["start_s"] - zero_s
            end_s = event.monotonic_s - zero_s
            granted_s = min(start_s + data["queue_s"], end_s)
            waiting[name].append(Interval(start_s, granted_s))
            running[name].append(Interval(granted_s, min(granted_s + data["service_s"], end_s)))
    for name in sorted({*running, *unknown} - {""}):
        known = name not in unknown and "" not in unknown
        found[name] = SlotIntervals(running=tuple(running[name]), waiting=tuple(waiting[name])) if known else None
    return found


def _of_server(records: list[Event], zero_s: float, makespan_s: float) -> dict[str, SlotIntervals | None]:
    running: dict[str, list[Interval]] = defaultdict(list)
    waiting: dict[str, list[Interval]] = defaultdict(list)
    for event in records:
        data = event.data
        released_s = event.monotonic_s - zero_s  # placed on the engine's clock; all else are differences of its own
        granted = data["released_s"] if data["granted_s"] is None else data["granted_s"]
        granted_s = released_s - (data["released_s"] - granted)
        submitted_s = granted_s - (granted - data["submitted_s"])
        if released_s < 0 or submitted_s > makespan_s:
            continue  # of other batches
        waiting[data["slot_class"]].append(Interval(submitted_s, granted_s))
        if data["granted_s"] is not None:
            running[data["slot_class"]].append(Interval(granted_s, released_s))
    return {name: SlotIntervals(running=tuple(running[name]), waiting=tuple(waiting[name])) for name in sorted(waiting)}


def busy_s(intervals: Iterable[Interval], low_s: float, high_s: float) -> float:
    """Seconds of a window, summed over the intervals: two at once count twice."""
    return sum(max(0.0, min(end_s, high_s) - max(start_s, low_s)) for start_s, end_s in intervals)


def covered_s(intervals: Iterable[Interval], low_s: float, high_s: float) -> float:
    """Seconds of a window in which there was at least one interval."""
    covered, reached_s = 0.0, low_s
    for start_s, end_s in sorted(intervals):
        start_s, end_s = max(start_s, reached_s), min(end_s, high_s)
        if end_s > start_s:
            covered += end_s - start_s
            reached_s = end_s
    return covered


def most_at_once(intervals: Iterable[Interval]) -> int:
    """The most intervals that shared a moment; one that ends where another begins does not share it."""
    changes = sorted(change for start, end in intervals if end > start for change in ((start, 1), (end, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def mean_in_buckets(intervals: Iterable[Interval], length_s: float, buckets: int) -> list[float]:
    """How many there were on average in each of `buckets` equal parts of `length_s`: exact, not sampled."""
    width_s = length_s / buckets
    if width_s <= 0:
        return [0.0] * buckets
    level = [0.0] * (buckets + 1)  # what begins to count in full from a bucket on, less what ends to
    part = [0.0] * buckets
    for start_s, end_s in intervals:
        start, end = max(0.0, start_s / width_s), min(float(buckets), end_s / width_s)
        if end <= start:
            continue
        first, last = math.floor(start), min(math.floor(end), buckets - 1)
        if first == last:
            part[first] += end - start
            continue
        part[first] += first + 1 - start
        part[last] += end - last
        level[first + 1] += 1
        level[last] -= 1
    means, now = [], 0.0
    for bucket in range(buckets):
        now += level[bucket]
        means.append(now + part[bucket])
    return means
