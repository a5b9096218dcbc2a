"""Which turns are in flight, and how a turn ends whose caller does not say so.

A router counts a turn as in flight from `acquire` to `release`. In verl the caller of `acquire` may vanish in between:
its task is cancelled while the call is under way (verl then never releases), or its whole process dies. The count
would stay too high for ever, and the router would avoid a replica that is idle.

So every grant is a *ticket*, and a ticket closes at the first of these:

* its release, with what became of the turn where somebody says so;
* the end of its trajectory, or the start of the trajectory's next turn (a trajectory has one turn in flight);
* the death of the worker that asked for it, or the removal of its replica;
* its age: `ttl_s`.

A release that arrives after that finds no ticket and changes nothing. A grant that arrives after its trajectory ended
(calls of a cancelled task may overtake each other) never opens a ticket.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from makespan.rollout.route import Served

REMEMBERED_ENDS = 65_536
"""How many ended trajectories are remembered, to recognise a grant that arrives late. An end and a late grant are at
most seconds apart, so this covers thousands of trajectories a second."""


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One turn in flight. `trajectory_id` is empty when the caller named none: such a turn is never superseded."""

    request_id: str
    trajectory_id: str
    replica_id: str
    worker: str
    """The name of the Ray actor that asked, or empty."""
    granted_s: float
    reported: bool = False
    """Whether its caller will say what became of the turn, later than it is released."""
    weights_version: int | None = None
    """Of the replica when the turn was granted, as far as it was known."""


class TicketCounters(msgspec.Struct, frozen=True, kw_only=True):
    """How the tickets so far were closed."""

    open: int
    released: int
    superseded: int
    """By their trajectory's end or next turn, which may also just have overtaken the release."""
    worker_lost: int
    replica_lost: int
    expired: int
    late_releases: int


class TicketLedger:
    """All open tickets. `close` is called once for each that closes, with what became of its turn if that is known."""

    def __init__(self, *, ttl_s: float, close: Callable[[Ticket, Served | None], None]) -> None:
        self._ttl_s = ttl_s
        self._closes = close
        self._open: OrderedDict[int, Ticket] = OrderedDict()  # in order of granting: the oldest is first
        self._by_request: dict[str, list[int]] = {}
        self._turn_of: dict[str, int] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._next = 0
        closings = ("released", "superseded", "worker_lost", "replica_lost", "expired", "late_releases")
        self._closed = dict.fromkeys(closings, 0)

    def grant(self, ticket: Ticket) -> bool:
        """The router gave `ticket.replica_id` to this turn; False: to a trajectory that is over, for nothing."""
        number = self._next
        self._next += 1
        self._open[number] = ticket
        self._by_request.setdefault(ticket.request_id, []).append(number)
        if ticket.trajectory_id in self._ended:
            self._close(number, "superseded")
            return False
        if ticket.trajectory_id:
            self.supersede(ticket.trajectory_id)
            self._turn_of[ticket.trajectory_id] = number
        return True

    def find(self, request_id: str) -> Ticket | None:
        """The open ticket of this request; the oldest, where it has several."""
        numbers = self._by_request.get(request_id)
        return self._open[numbers[0]] if numbers else None

    def release(self, request_id: str, served: Served | None = None) -> None:
        """The turn is over. Without an open ticket this is a late release: counted, without effect."""
        numbers = self._by_request.get(request_id)
        if numbers:
            self._close(numbers[0], "released", served)
        else:
            self._closed["late_releases"] += 1

    def supersede(self, trajectory_id: str) -> None:
        """The trajectory's last turn is over, though nobody said so: close its ticket, if it is open."""
        number = self._turn_of.get(trajectory_id)
        if number is not None:
            self._close(number, "superseded")

    def end(self, trajectory_id: str) -> None:
        """The trajectory is over and asks for nothing any more."""
        self.supersede(trajectory_id)
        self._ended[trajectory_id] = None
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def expire(self, now: float) -> None:
        """Close the tickets that are older than `ttl_s` at `now` (seconds on the clock of `granted_s`)."""
        while self._open:
            number, oldest = next(iter(self._open.items()))
            if now - oldest.granted_s <= self._ttl_s:
                return
            self._close(number, "expired")

    def lose_workers(self, workers: Iterable[str]) -> None:
        """These workers are dead: close their tickets."""
        dead = frozenset(workers)
        for number, ticket in list(self._open.items()):
            if ticket.worker in dead:
                self._close(number, "worker_lost")

    def lose_replicas(self, replica_ids: Iterable[str]) -> None:
        """These replicas are gone: close their tickets, so that a replica that comes back under its id starts at 0."""
        gone = frozenset(replica_ids)
        for number, ticket in list(self._open.items()):
            if ticket.replica_id in gone:
                self._close(number, "replica_lost")

    def workers(self) -> set[str]:
        """The workers that hold open tickets, as far as they gave their names."""
        return {ticket.worker for ticket in self._open.values() if ticket.worker}

    def counters(self) -> TicketCounters:
        return TicketCounters(open=len(self._open), **self._closed)

    def _close(self, number: int, how: str, served: Served | None = None) -> None:
        ticket = self._open.pop(number)
        numbers = self._by_request[ticket.request_id]
        numbers.remove(number)
        if not numbers:
            del self._by_request[ticket.request_id]
        if self._turn_of.get(ticket.trajectory_id) == number:
            del self._turn_of[ticket.trajectory_id]
        self._closed[how] += 1
        self._closes(ticket, served)
