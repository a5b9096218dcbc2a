"""What the page's script gets of a run: figures as JSON, and the timeline's segments as packed numbers.

A batch of 10,000 trajectories has millions of segments. As JSON they would be a hundred megabytes; here a segment is
eight bytes (its length in ticks, phase, turn, place), column by column, compressed and as base64 text, which a
browser unpacks by itself. Ends are rounded to ticks, and lengths are their differences: nothing drifts.
"""

from __future__ import annotations

import base64
import gzip
import sys
from array import array
from collections import defaultdict
from typing import Any

from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.telemetry.occupancy import Interval, mean_in_buckets, requests, slot_intervals
from makespan.rollout.telemetry.report.run import ReportedRun
from makespan.rollout.telemetry.slowest import slowest
from makespan.rollout.telemetry.timeline import Phase, Row, batch_start

TICKS_PER_S = 10_000
"""A tenth of a millisecond: finer than any screen, and days still fit into 32 bits."""

BUCKETS = 300
"""Points of a curve over time: about what a chart has pixels for, and exact means, so that nothing falls between."""

CACHE_BUCKETS = 60
"""Points of the curve of cached shares: few enough that one has some requests in it."""

REASONS = 100
"""So many of the last trajectories are shown with the reason why they were late."""


def packed_run(run: ReportedRun) -> dict[str, Any]:
    """Everything the script draws of a run."""
    makespan_s = run.analysis.makespan_s
    return {
        "name": run.name,
        "makespan_s": makespan_s,
        "reference": run.figures["concurrency/reference"],
        "lower_bound_s": run.analysis.lower_bound_s,
        "rows": _rows(run),
        "segments": _segments(run.timeline),
        "phases": _phases(run.timeline, makespan_s),
        "ends_s": sorted(round(row.end_s, 4) for row in run.timeline if row.state not in ("cancelled", "unfinished")),
        "slots": _slots(run),
        "replicas": _replicas(run.log, makespan_s),
    }


def _rows(run: ReportedRun) -> dict[str, list[Any]]:
    """The trajectories, column by column."""
    reasons = {slow.row.trajectory_id: slow.reason for slow in slowest(run.timeline, REASONS)}
    timeline = run.timeline
    return {
        "id": [row.trajectory_id for row in timeline],
        "group": [row.group for row in timeline],
        "state": [row.state for row in timeline],
        "turns": [row.turns for row in timeline],
        "reward": [row.reward for row in timeline],
        "failure": [row.failure for row in timeline],
        "generated_tokens": [row.generated_tokens for row in timeline],
        "context_tokens": [row.context_tokens for row in timeline],
        "cached_tokens": [row.cached_tokens for row in timeline],
        "recomputed_tokens": [row.recomputed_tokens for row in timeline],
        "replicas": [row.replicas for row in timeline],
        "reason": [reasons.get(row.trajectory_id, "") for row in timeline],
    }


def _segments(timeline: list[Row]) -> dict[str, Any]:
    places: dict[str, int] = {"": 0}
    counts = array("I")
    ticks, phases, turns, sites = array("I"), array("B"), array("h"), array("H")
    for row in timeline:
        at, kept = 0, 0
        for segment in row.segments:
            end = round(segment.end_s * TICKS_PER_S)
            if end == at:
                continue  # shorter than a tick
            ticks.append(end - at)
            phases.append(segment.phase)
            turns.append(min(segment.turn, 32_767))
            sites.append(places.setdefault(segment.place, len(places)))
            at, kept = end, kept + 1
        counts.append(kept)
    return {
        "ticks_per_s": TICKS_PER_S,
        "places": list(places),
        "counts": _packed(counts),
        "ticks": _packed(ticks),
        "phases": _packed(phases),
        "turns": _packed(turns),
        "sites": _packed(sites),
    }


def _packed(numbers: array[int]) -> str:
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()  # browsers run on little-endian machines
    return base64.b64encode(gzip.compress(numbers.tobytes(), compresslevel=6, mtime=0)).decode()


def _phases(timeline: list[Row], makespan_s: float) -> list[list[float]]:
    """How many trajectories were in each phase, on average in each bucket of time."""
    by_phase: dict[Phase, list[Interval]] = {phase: [] for phase in Phase}
    for row in timeline:
        for segment in row.segments:
            by_phase[segment.phase].append(Interval(segment.start_s, segment.end_s))
    return [_curve(by_phase[phase], makespan_s) for phase in Phase]


def _curve(intervals: list[Interval], makespan_s: float) -> list[float]:
    return [round(value, 3) for value in mean_in_buckets(intervals, makespan_s, BUCKETS)]


def _slots(run: ReportedRun) -> dict[str, dict[str, Any]]:
    makespan_s, found = run.analysis.makespan_s, {}
    for name, intervals in slot_intervals(run.log).items():
        figures = run.analysis.slot_classes.get(name)
        found[name] = {
            "slots": None if figures is None else figures.slots,
            "running": None if intervals is None else _curve(list(intervals.running), makespan_s),
            "waiting": None if intervals is None else _curve(list(intervals.waiting), makespan_s),
        }
    return found


def _replicas(log: MergedLog, makespan_s: float) -> dict[str, dict[str, Any]]:
    """Requests of each replica over time, and the cached share of the prompts that were answered in each bucket."""
    zero_s = batch_start(log).monotonic_s
    prompt: dict[str, list[int]] = defaultdict(lambda: [0] * CACHE_BUCKETS)
    cached: dict[str, list[int | None]] = defaultdict(lambda: [0] * CACHE_BUCKETS)
    for event in log.of("generate"):
        name = event.data["replica"]
        share = (event.monotonic_s - zero_s) / makespan_s if makespan_s > 0 else 0.0
        bucket = min(max(int(share * CACHE_BUCKETS), 0), CACHE_BUCKETS - 1)
        prompt[name][bucket] += event.data["prompt_tokens"]
        so_far, tokens = cached[name][bucket], event.data["cached_tokens"]
        cached[name][bucket] = None if so_far is None or tokens is None else so_far + tokens
    found = {}
    for name, intervals in requests(log).items():
        pairs = zip(cached[name], prompt[name], strict=True)
        found[name] = {
            "requests": _curve(intervals, makespan_s),
            "cached_share": [None if part is None or not whole else round(part / whole, 4) for part, whole in pairs],
        }
    return found
