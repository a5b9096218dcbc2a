"""Which replica serves a trajectory's next turn.

A router is a pure object: it is told of replicas that come and go, of turns that start and end, and answers with a
replica's id. It reads no clock and its random source is handed to it, so that the same sequence of calls gives the
same decisions live, in verl, in replay and in simulation.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from makespan.rollout.errors import ConfigError, ReplicaFailure, nearest


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a router may know of the turn that it places."""

    trajectory_id: str
    turn: int
    context_tokens: int
    """Length of the prompt of this turn."""
    group: str = ""
    now_s: float = 0.0
    """The caller's steady clock."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a turn that was routed."""

    context_tokens: int
    """Length of the prompt and of what was generated."""
    cached_tokens: int | None
    """Prompt tokens that the replica did not have to compute."""
    seconds: float
    """From the decision to the completion."""


class Router(Protocol):
    """The contract of a routing policy."""

    def route(self, request: RouteRequest) -> str:
        """Choose a replica for this turn and count the turn as in flight there.

        Raises `ReplicaFailure` when there is no replica.
        """
        ...

    def release(self, replica_id: str, trajectory_id: str = "", served: Served | None = None) -> None:
        """A turn that was routed to this replica is over: `served`, or None where it failed, was cancelled, or nobody
        says what became of it."""
        ...

    def pause(self, trajectory_id: str) -> None:
        """The trajectory is parked: until its next turn it is no load on any replica."""
        ...

    def finish(self, trajectory_id: str) -> None:
        """The trajectory will not come back: forget it."""
        ...

    def forget(self) -> int:
        """Place every trajectory anew at its next turn. Returns how many placements were forgotten."""
        ...

    def add(self, replica_ids: Iterable[str]) -> None: ...

    def remove(self, replica_ids: Iterable[str]) -> None:
        """These replicas serve no more turns; their trajectories are placed anew."""
        ...

    def in_flight(self) -> dict[str, int]:
        """Turns now in flight, by replica."""
        ...


class StickyLeastInflight:
    """The baseline: a trajectory stays where its first turn went, and that is the replica with the fewest in flight.

    Decision for decision what verl's `GlobalRequestLoadBalancer` does: ties are broken by `rng.choice` over the
    candidates in order of registration, the memory of placements is an LRU of `memory` trajectories, and a placement
    is never reconsidered while its replica exists.
    """

    def __init__(self, replica_ids: Iterable[str] = (), *, rng: random.Random, memory: int = 10_000) -> None:
        self._rng = rng
        self._memory = memory
        self._in_flight: dict[str, int] = dict.fromkeys(replica_ids, 0)
        self._home: OrderedDict[str, str] = OrderedDict()

    def route(self, request: RouteRequest) -> str:
        home = self._home.get(request.trajectory_id)
        if home is None or home not in self._in_flight:
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
        least = min(self._in_flight.values())
        return self._rng.choice([replica for replica, count in self._in_flight.items() if count == least])

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

    def in_flight(self) -> dict[str, int]:
        return dict(self._in_flight)


ROUTERS: dict[str, Callable[[list[str], random.Random], Router]] = {
    "sticky-least-inflight": lambda replica_ids, rng: StickyLeastInflight(replica_ids, rng=rng),
}
"""Routing policies by the name that a configuration uses."""


def make_router(name: str, replica_ids: list[str], rng: random.Random) -> Router:
    """The policy of this name over these replicas. Raises `ConfigError` for an unknown name."""
    if name not in ROUTERS:
        raise ConfigError(f"routing.policy: unknown policy {name!r}{nearest(name, ROUTERS)}")
    return ROUTERS[name](replica_ids, rng)
