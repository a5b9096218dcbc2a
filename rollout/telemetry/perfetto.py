"""The batch as a trace that Perfetto's UI (ui.perfetto.dev) and Chrome's tracing page open.

The format is Chrome's JSON trace events: `X` is a slice with a beginning and a duration in microseconds, `C` a counter,
`M` names a process or a thread and gives its place in the list. Slices of one thread must nest or follow each other,
so that what overlaps is dealt out to lanes.

Four groups of tracks, in the order in which one asks: the trajectories (the last to end on top), the requests of each
replica, the actions in each class of slots, and counters.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.telemetry.occupancy import Interval, admitted, requests, slot_intervals
from makespan.rollout.telemetry.timeline import Phase, Row, Segment, rows

TRAJECTORIES, REPLICAS, SLOTS, COUNTERS = 1, 2, 3, 4
"""Process ids of the groups."""

MICROSECONDS = 1_000_000.0

TraceEvent = dict[str, Any]

Slice = tuple[Interval, str, dict[str, Any]]
"""When, its name, its arguments."""


def trace_events(log: MergedLog) -> list[TraceEvent]:
    """The trace of a batch. Raises `FormatError` when the log holds none."""
    timeline = rows(log)
    found = [
        *_process(TRAJECTORIES, "trajectories (last to end first)"),
        *_process(REPLICAS, "replicas: requests"),
        *_process(SLOTS, "environment slots: actions"),
        *_process(COUNTERS, "counts"),
        *_trajectories(timeline),
        *_replicas(timeline, requests(log)),
    ]
    thread = 1
    for name, intervals in slot_intervals(log).items():
        if intervals is None:
            continue
        slices: list[Slice] = [(interval, "action", {}) for interval in intervals.running]
        lanes = list(_lanes(SLOTS, name, slices, thread))
        thread += sum(event["name"] == "thread_name" for event in lanes)
        found += lanes
        found += _counter(f"{name} running", intervals.running)
        found += _counter(f"{name} waiting", intervals.waiting)
    found += _counter("trajectories admitted", admitted(timeline))
    for name, own in requests(log).items():
        found += _counter(f"{name} requests", own)
    return found


def write_trace(path: Path, log: MergedLog) -> None:
    """Write the trace as one JSON document. Raises `OSError`."""
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(log)}
    path.write_bytes(msgspec.json.encode(document))


def _process(number: int, name: str) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}


def _thread(process: int, number: int, name: str) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number, "args": {"sort_index": number}}


def _slice(
    process: int, thread: int, interval: Interval, name: str, category: str, arguments: dict[str, Any]
) -> TraceEvent:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": interval.start_s * MICROSECONDS,
        "dur": (interval.end_s - interval.start_s) * MICROSECONDS,
        "args": arguments,
    }


def _trajectories(timeline: Sequence[Row]) -> Iterator[TraceEvent]:
    for number, row in enumerate(sorted(timeline, key=lambda row: -row.end_s), start=1):
        yield from _thread(TRAJECTORIES, number, f"{row.trajectory_id} ({row.state}, {row.turns} turns)")
        for segment in row.segments:
            interval = Interval(segment.start_s, segment.end_s)
            yield _slice(TRAJECTORIES, number, interval, segment.phase.label, "phase", _arguments(segment))


def _arguments(segment: Segment) -> dict[str, Any]:
    arguments: dict[str, Any] = {} if segment.turn < 0 else {"turn": segment.turn}
    if segment.place:
        arguments["slot_class" if segment.phase >= Phase.SLOT_QUEUE else "replica"] = segment.place
    return arguments


def _replicas(timeline: Sequence[Row], by_replica: dict[str, list[Interval]]) -> Iterator[TraceEvent]:
    """A lane holds one request at a time; a slice is named by its trajectory."""
    served: dict[str, list[Slice]] = {name: [] for name in by_replica}
    inside = (Phase.REPLICA_QUEUE, Phase.PREFILL, Phase.RECOMPUTATION, Phase.DECODE, Phase.INFERENCE)
    for row in timeline:
        turns: dict[tuple[int, str], Interval] = {}
        for segment in row.segments:
            if segment.phase in inside:
                key = (segment.turn, segment.place)
                start_s = turns[key].start_s if key in turns else segment.start_s
                turns[key] = Interval(start_s, segment.end_s)
        for (turn, replica), interval in turns.items():
            served[replica].append((interval, row.trajectory_id, {"turn": turn}))
    thread = 1
    for name, slices in served.items():
        lanes = list(_lanes(REPLICAS, name, slices, thread))
        thread += sum(event["name"] == "thread_name" for event in lanes)
        yield from lanes


def _lanes(process: int, name: str, slices: Iterable[Slice], first: int) -> Iterator[TraceEvent]:
    """Each slice on the lowest lane that is free: as many lanes as slices that ever overlapped."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    lanes = 0
    for interval, title, arguments in sorted(slices, key=lambda entry: entry[0]):
        while busy and busy[0][0] <= interval.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            yield from _thread(process, first + lanes, f"{name} · lane {lanes + 1}")
            heapq.heappush(free, lanes)
            lanes += 1
        lane = heapq.heappop(free)
        heapq.heappush(busy, (interval.end_s, lane))
        yield _slice(process, first + lane, interval, title, name, arguments)


def _counter(name: str, intervals: Iterable[Interval]) -> Iterator[TraceEvent]:
    """A track of how many there are at once, with an entry at each change."""
    changes: dict[float, int] = {}
    for start_s, end_s in intervals:
        if end_s > start_s:
            changes[start_s] = changes.get(start_s, 0) + 1
            changes[end_s] = changes.get(end_s, 0) - 1
    now = 0
    for at_s in sorted(changes):
        if changes[at_s]:
            now += changes[at_s]
            yield {
                "ph": "C",
                "name": name,
                "pid": COUNTERS,
                "tid": 0,
                "ts": max(0.0, at_s) * MICROSECONDS,
                "args": {"count": now},
            }
