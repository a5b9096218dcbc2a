"""The engine's figures for Prometheus, while a batch runs (`makespan_engine_…` and `makespan_replica_…`).

Counters come from what the engine writes into its event log, as everything does: `CountedEventLog` is an event log that
also adds up what passes through it, so that the endpoint and the log cannot tell different stories. Gauges are the
engine's and the replicas' state at the moment of the question. A figure that a replica does not measure has no sample.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from makespan.rollout.engine import EngineStatus
from makespan.rollout.replicas.base import ReplicaLoad
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.telemetry.exposition import Family, Sample

TOKENS = ("prompt", "cached", "recomputed", "generated")


class CountedEventLog(EventLog):
    """An event log that counts what is written into it, whether the file can still be written or not."""

    def __init__(self, path: Path | None, role: str, clock: Callable[[], float]) -> None:
        super().__init__(path, role, clock)
        self._now = clock
        self._events: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._actions: Counter[tuple[str, str]] = Counter()
        self._turns: Counter[str] = Counter()
        self._sums: dict[tuple[str, str], float] = defaultdict(float)
        self._unmeasured: set[tuple[str, str]] = set()

    def emit(self, kind: str, trajectory_id: str = "", /, **data: Any) -> None:
        """Append one event, and count it."""
        self._events[kind] += 1
        if kind == "generate":
            self._count_inference(data)
        elif kind in ("act", "reset"):
            self._count_action(data)
        elif kind == "ended":
            self._ended[data["state"]] += 1
            if data["state"] == "failed":
                self._failures[data["failure"]["kind"]] += 1
        super().emit(kind, trajectory_id, **data)

    def _count_inference(self, data: dict[str, Any]) -> None:
        replica = data["replica"]
        self._turns[replica] += 1
        for name in TOKENS:
            self._add(f"{name}_tokens", replica, data[f"{name}_tokens"])
        self._add("preemptions", replica, data["preemptions"])
        self._add("inference_s", replica, self._now() - data["start_s"])

    def _count_action(self, data: dict[str, Any]) -> None:
        slot_class = data["slot_class"]
        self._actions[slot_class, data["outcome"]] += 1
        if data["outcome"] == "ok":  # how long a failed one waited and ran is not told to the engine
            self._add("wait_s", slot_class, data["queue_s"])
            self._add("service_s", slot_class, data["service_s"])

    def _add(self, figure: str, owner: str, value: float | None) -> None:
        if value is None:
            self._unmeasured.add((figure, owner))
        else:
            self._sums[figure, owner] += value

    def families(self) -> list[Family]:
        """What was counted since the log was opened."""
        succeeded: Counter[str] = Counter()
        for (slot_class, outcome), count in self._actions.items():
            succeeded[slot_class] += count if outcome == "ok" else 0
        return [
            Family(
                "makespan_engine_trajectories_ended_total",
                "counter",
                "Trajectories that ended, by state.",
                [({"state": state}, count) for state, count in sorted(self._ended.items())],
            ),
            Family(
                "makespan_engine_failures_total",
                "counter",
                "Failed trajectories by kind of failure.",
                [({"kind": kind}, count) for kind, count in sorted(self._failures.items())],
            ),
            *(
                Family(
                    f"makespan_engine_{name}_tokens_total",
                    "counter",
                    f"{name.capitalize()} tokens of all inferences.",
                    self._of("replica", f"{name}_tokens"),
                )
                for name in TOKENS
            ),
            Family(
                "makespan_engine_preemptions_total",
                "counter",
                "Sequences that a replica threw out and began again.",
                self._of("replica", "preemptions"),
            ),
            Family(
                "makespan_engine_inference_seconds",
                "summary",
                "Inferences as the engine saw them, queue included.",
                self._of("replica", "inference_s"),
                [({"replica": replica}, count) for replica, count in sorted(self._turns.items())],
            ),
            Family(
                "makespan_engine_actions_total",
                "counter",
                "Resets and actions, by slot class and outcome.",
                [
                    ({"slot_class": slot_class, "outcome": outcome}, count)
                    for (slot_class, outcome), count in sorted(self._actions.items())
                ],
            ),
            Family(
                "makespan_engine_action_wait_seconds",
                "summary",
                "Waiting of successful actions for their slot.",
                self._of("slot_class", "wait_s"),
                [({"slot_class": name}, count) for name, count in sorted(succeeded.items()) if count],
            ),
            Family(
                "makespan_engine_action_seconds",
                "summary",
                "Successful actions in their slot.",
                self._of("slot_class", "service_s"),
                [({"slot_class": name}, count) for name, count in sorted(succeeded.items()) if count],
            ),
            Family(
                "makespan_engine_events_total",
                "counter",
                "Events written into the engine's log, by kind.",
                [({"event": kind}, count) for kind, count in sorted(self._events.items())],
            ),
        ]

    def _of(self, label: str, figure: str) -> list[Sample]:
        return [
            ({label: owner}, value)
            for (name, owner), value in sorted(self._sums.items())
            if name == figure and (name, owner) not in self._unmeasured
        ]


def engine_families(status: EngineStatus, loads: Mapping[str, ReplicaLoad | None]) -> list[Family]:
    """The state of the engine and of its replicas (their last reports, by replica)."""
    known = [({"replica": name}, load) for name, load in sorted(loads.items()) if load is not None]
    kv_used: Iterable[Sample] = [(at, load.kv_used_fraction) for at, load in known if load.kv_used_fraction is not None]
    return [
        Family("makespan_engine_trajectories", "gauge", "Trajectories of the batch.", [({}, status.total)]),
        Family("makespan_engine_trajectories_waiting", "gauge", "Trajectories to be admitted.", [({}, status.waiting)]),
        Family(
            "makespan_engine_trajectories_running",
            "gauge",
            "Trajectories admitted and not ended.",
            [({}, status.running)],
        ),
        Family(
            "makespan_engine_trajectories_acting",
            "gauge",
            "Running trajectories that are in, or wait for, their environment.",
            [({}, status.acting)],
        ),
        Family(
            "makespan_replica_requests_running",
            "gauge",
            "Requests that a replica computes.",
            [(at, load.running) for at, load in known],
        ),
        Family(
            "makespan_replica_requests_waiting",
            "gauge",
            "Requests in a replica's queue.",
            [(at, load.waiting) for at, load in known],
        ),
        Family(
            "makespan_replica_kv_used_ratio",
            "gauge",
            "Cache blocks in use over all; cached blocks without an owner count as free.",
            kv_used,
        ),
    ]
