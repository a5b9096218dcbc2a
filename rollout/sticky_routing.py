"""The baseline of routing: a trajectory stays where it began."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from makespan.rollout.errors import ReplicaFailure
from makespan.rollout.route import RouteRequest, Served


class StickyLeastInflight:
    """The baseline: a trajectory stays where its first turn went, and that is the replica with the fewest in flight.

    Decision for decision what verl's `GlobalRequestLoadBalancer` does: ties are broken by `rng.choice` over the
    candidates in order of registration, the memory of placements is an LRU of `memory` trajectories, and a placement
    is never reconsidered while its replica exists and is awake.

    Args:
        homes: placements to begin with, replica by trajectory; the others are chosen as they come.
    """

    def __init__(
        self,
        replica_ids: Iterable[str] = (),
        *,
        rng: random.Random,
        memory: int = 10_000,
        homes: Mapping[str, str] | None = None,
    ) -> None:
        self._rng = rng
        self._memory = memory
        self._in_flight: dict[str, int] = dict.fromkeys(replica_ids, 0)
        self._home: OrderedDict[str, str] = OrderedDict(homes or {})
        self._asleep: set[str] = set()

    def route(self, request: RouteRequest) -> str:
        home = self._home.get(request.trajectory_id)
        if home is None or home not in self._in_flight or (home in self._asleep and self._awake()):
            home = self._place()
        self._home[request.trajectory_id] = home
        self._home.move_to_end(request.trajectory_id)
        if len(self._home) > self._memory:
            self._home.popitem(last=False)
        self._in_flight[home] += 1
        return home

    def _place(self) -> str:
        if not self._in_flight:
            raise ReplicaFailure("no replica is left to serve a turn: all of them were removed or died")
        candidates = self._awake() or self._in_flight
        least = min(candidates.values())
        return self._rng.choice([replica for replica, count in candidates.items() if count == least])

    def _awake(self) -> dict[str, int]:
        if not self._asleep:
            return self._in_flight
        return {replica: count for replica, count in self._in_flight.items() if replica not in self._asleep}

    def release(self, replica_id: str, trajectory_id: str = "", served: Served | None = None) -> None:
        if self._in_flight.get(replica_id, 0) > 0:
            self._in_flight[replica_id] -= 1

    def pause(self, trajectory_id: str) -> None:
        """Nothing changes: it comes back to where it was."""

    def finish(self, trajectory_id: str) -> None:
        self._home.pop(trajectory_id, None)

    def forget(self) -> int:
        forgotten = len(self._home)
        self._home.clear()
        return forgotten

    def add(self, replica_ids: Iterable[str]) -> None:
        for replica in replica_ids:
            self._in_flight[replica] = 0

    def remove(self, replica_ids: Iterable[str]) -> None:
        for replica in replica_ids:
            self._in_flight.pop(replica, None)
            self._asleep.discard(replica)

    def sleep(self, replica_ids: Iterable[str]) -> None:
        self._asleep.update(replica_ids)

    def wake(self, replica_ids: Iterable[str]) -> None:
        self._asleep.difference_update(replica_ids)

    def lose_caches(self, replica_ids: Iterable[str]) -> None:
        """Nothing changes: it never knew of them."""

    def in_flight(self) -> dict[str, int]:
        return dict(self._in_flight)
