"""What a routing policy is told, and what is asked of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec


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
    seconds: float | None
    """From the decision to the completion; None: it waited there for something else, such as new weights."""
    prefill_s: float | None = None
    decode_s: float | None = None
    """The replica's own; None where it does not say."""


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

    def sleep(self, replica_ids: Iterable[str]) -> None:
        """These replicas are given nothing while another one is awake, and have lost their caches. Turns in flight
        there wait for their waking, which is not load."""
        ...

    def wake(self, replica_ids: Iterable[str]) -> None: ...

    def lose_caches(self, replica_ids: Iterable[str]) -> None:
        """These replicas have new weights: what they held is of no use."""
        ...

    def in_flight(self) -> dict[str, int]:
        """Turns now in flight, by replica."""
        ...
