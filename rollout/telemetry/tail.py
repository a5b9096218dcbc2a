"""What stood idle while the batch waited for its last trajectories.

The tail begins when a share of the trajectories has ended and lasts until the last one ends. In it few run, and the
machine is paid for all the same: a replica without a request and a slot without an action are idle.
"""

from __future__ import annotations

import msgspec

from makespan.rollout.telemetry.analysis import BatchAnalysis
from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.telemetry.occupancy import busy_s, covered_s, requests, slot_intervals
from makespan.rollout.telemetry.timeline import batch_start


class TailUse(msgspec.Struct, frozen=True, kw_only=True):
    """One tail. Idle seconds are summed over replicas, and over the slots of a class."""

    start_s: float
    """From the batch's start."""
    seconds: float
    idle_replica_s: float
    replica_s: float
    """All replicas' time in the tail."""
    idle_slot_s: dict[str, float | None]
    """By slot class with a known number of slots; None: not measured."""
    slot_s: dict[str, float]


def tail_use(log: MergedLog, analysis: BatchAnalysis, after_s: float | None) -> TailUse | None:
    """The tail of `after_s` seconds (of `analysis.tail_s`); None without one."""
    ends = [event.monotonic_s for event in log.of("ended") if event.data["state"] != "cancelled"]
    if after_s is None or not ends:
        return None
    end_s = max(ends) - batch_start(log).monotonic_s
    start_s = end_s - after_s
    by_replica = requests(log)
    intervals = slot_intervals(log)
    idle_slot_s: dict[str, float | None] = {}
    slot_s = {}
    for name, figures in analysis.slot_classes.items():
        if figures.slots is None:
            continue
        slot_s[name] = figures.slots * after_s
        known = intervals.get(name)
        idle_slot_s[name] = None if known is None else slot_s[name] - busy_s(known.running, start_s, end_s)
    return TailUse(
        start_s=start_s,
        seconds=after_s,
        idle_replica_s=sum(after_s - covered_s(found, start_s, end_s) for found in by_replica.values()),
        replica_s=after_s * len(by_replica),
        idle_slot_s=idle_slot_s,
        slot_s=slot_s,
    )
