"""The action gate: who gets the next free slot.

A *slot class* (`swe.start`, `swe.step`, ...) has a fixed number of slots. An action waits in the gate until it is
granted a slot, holds it while it runs and gives it back when it is over; while the model thinks it holds nothing.
`ActionGate` is the policy for one slot class, and only the policy: it owns no clock, task or socket. Its owner tells it
what happened (`submit`, `release`, `cancel`, `rekey`) and then asks `grant(now)` who may start. The same object runs
behind the broker, in a replay and in the simulator.

Who wakes next
    1. the *job* that holds the fewest slots among those with waiting actions (ties: the job whose last grant is
       longest ago), so that jobs share a class equally and an unused share goes to whoever can use it;
    2. within the job the action with the smallest key, ties in order of arrival;
    3. except that every `oldest_every`-th grant of a job goes to its oldest waiting action.

What cancel does
    A waiting action leaves the queue, and nobody else's place changes. A running action cannot be taken back: its
    owner stops it and then calls `release`.

Invariants, kept here
    - Work conservation: after `grant(now)` there is no free slot, or nobody waits, or the rate limit has no token.
    - No starvation: an action with `q` older actions of its job waiting is granted at the latest at its job's
      `oldest_every * (q + 1)`-th grant after its arrival, whatever the keys.
    - A slot is held by at most one action, and an action is granted at most once.

`submit`, `release`, `cancel`, `rekey` and one grant cost O(log n) for n waiting actions (amortised; withdrawn heap
entries are dropped when they outnumber the live ones) plus a scan of the jobs that have waiting actions.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import msgspec

from makespan.rollout.errors import ConfigError

Ticket = TypeVar("Ticket", bound=Hashable)

OLDEST_EVERY = 32
"""Every 32nd grant goes to the oldest: bounds every wait, and costs a key order 3% of its grants at most."""


class GateStatistics(msgspec.Struct, frozen=True):
    """A gate at one moment. `granted` and `cancelled` count since the gate was made."""

    slots: int
    running: int
    waiting: int
    granted: int
    cancelled: int
    jobs: int
    """Jobs with waiting or running actions."""


class Grant(msgspec.Struct, frozen=True):
    """Why an action got its slot: the key that it had then, or its age."""

    key: float
    by_age: bool
    """It was the oldest at a grant that goes to the oldest, whatever its key."""


class RateLimit(msgspec.Struct, frozen=True):
    """At most `per_s` grants a second on average, and at most `burst` at once (a token bucket that starts full)."""

    per_s: float
    burst: int = 1


class _Waiting(Generic[Ticket]):
    """One waiting action. Heap entries that no longer match its `version` are stale."""

    __slots__ = ("arrival", "by_age", "job", "key", "ticket", "version")

    def __init__(self, ticket: Ticket, job: _Job[Ticket], key: float, arrival: int) -> None:
        self.ticket = ticket
        self.job = job
        self.key = key
        self.arrival = arrival
        self.version = 0  # -1 once it waits no longer
        self.by_age = False


class _Job(Generic[Ticket]):
    """The waiting actions of one job, by key and by age, and how many slots the job holds."""

    __slots__ = ("by_age", "by_key", "grants", "last_grant", "name", "running", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.by_key: list[tuple[float, int, int, _Waiting[Ticket]]] = []  # (key, arrival, version, action)
        self.by_age: deque[_Waiting[Ticket]] = deque()
        self.waiting = 0
        self.running = 0
        self.grants = 0
        self.last_grant = -1

    def push(self, action: _Waiting[Ticket]) -> None:
        heapq.heappush(self.by_key, (action.key, action.arrival, action.version, action))

    def oldest(self) -> _Waiting[Ticket]:
        while self.by_age[0].version < 0:
            self.by_age.popleft()
        return self.by_age[0]

    def smallest(self) -> _Waiting[Ticket]:
        while True:
            _, _, version, action = self.by_key[0]
            if version == action.version:
                return action
            heapq.heappop(self.by_key)

    def forget(self, action: _Waiting[Ticket]) -> None:
        """`action` waits no longer; its entries become stale."""
        action.version = -1
        self.waiting -= 1
        self.compact()

    def compact(self) -> None:
        """Drop stale entries once they outnumber the live ones (amortised O(1) a withdrawal)."""
        bound = 2 * self.waiting + 16
        if len(self.by_key) > bound:
            self.by_key = [entry for entry in self.by_key if entry[2] == entry[3].version]
            heapq.heapify(self.by_key)
        if len(self.by_age) > bound:
            self.by_age = deque(action for action in self.by_age if action.version >= 0)


class ActionGate(Generic[Ticket]):
    """Slots of one class and the ordered queue in front of them.

    A *ticket* is whatever the owner names an action by (any hashable). Methods raise `ValueError` for a ticket in the
    wrong state and for a key that is not a number: those are mistakes of the caller, not of the user.

    Args:
        slots: how many actions may run at once, at least 1.
        rate: an optional limit on grants a second; its tokens are counted on the clock of the `now` handed in.
        oldest_every: every how many grants of a job the oldest goes first (1 is first come, first served).
    """

    def __init__(self, slots: int, *, rate: RateLimit | None = None, oldest_every: int = OLDEST_EVERY) -> None:
        if slots < 1:
            raise ConfigError(f"a slot class needs at least 1 slot, not {slots}")
        if rate is not None and not (rate.per_s > 0 and math.isfinite(rate.per_s) and rate.burst >= 1):
            raise ConfigError(f"a rate limit needs per_s > 0 and burst >= 1, not {rate.per_s} and {rate.burst}")
        if oldest_every < 1:
            raise ConfigError(f"oldest_every must be at least 1, not {oldest_every}")
        self.slots = slots
        self._rate = rate
        self._tokens = float(rate.burst) if rate else math.inf
        self._tokens_at: float | None = None
        self._oldest_every = oldest_every
        self._waiting: dict[Ticket, _Waiting[Ticket]] = {}
        self._running: dict[Ticket, _Waiting[Ticket]] = {}  # as which it waited
        self._jobs: dict[str, _Job[Ticket]] = {}
        self._backlog: dict[str, _Job[Ticket]] = {}  # the jobs with waiting actions
        self._arrivals = 0
        self._granted = 0
        self._cancelled = 0

    def submit(self, ticket: Ticket, key: float = 0.0, *, job: str = "") -> None:
        """Queue an action; it starts when `grant` returns it."""
        if ticket in self._waiting or ticket in self._running:
            raise ValueError(f"{ticket!r} is in the gate already")
        if math.isnan(key):
            raise ValueError(f"the key of {ticket!r} is not a number")
        queue = self._job(job)
        action = _Waiting(ticket, queue, key, self._arrivals)
        self._arrivals += 1
        self._waiting[ticket] = action
        queue.push(action)
        queue.by_age.append(action)
        queue.waiting += 1
        self._backlog[job] = queue

    def adopt(self, ticket: Ticket, *, job: str = "") -> None:
        """Count an action that runs already (a worker told of it after a broker's restart), even above `slots`."""
        if ticket in self._waiting or ticket in self._running:
            raise ValueError(f"{ticket!r} is in the gate already")
        queue = self._job(job)
        queue.running += 1
        self._running[ticket] = _Waiting(ticket, queue, 0.0, self._arrivals)

    def release(self, ticket: Ticket) -> None:
        """The action is over: its slot is free."""
        action = self._running.pop(ticket, None)
        if action is None:
            raise ValueError(f"{ticket!r} holds no slot")
        action.job.running -= 1
        self._drop_if_idle(action.job)

    def cancel(self, ticket: Ticket) -> bool:
        """Withdraw a waiting action; False when it does not wait (it runs, is over, or was never here)."""
        action = self._waiting.pop(ticket, None)
        if action is None:
            return False
        self._cancelled += 1
        self._leave_queue(action)
        self._drop_if_idle(action.job)
        return True

    def rekey(self, ticket: Ticket, key: float) -> bool:
        """Change the key of a waiting action (its arrival stands); False when it does not wait."""
        if math.isnan(key):
            raise ValueError(f"the key of {ticket!r} is not a number")
        action = self._waiting.get(ticket)
        if action is None:
            return False
        if key != action.key:
            action.key = key
            action.version += 1
            action.job.push(action)
            action.job.compact()
        return True

    def rekey_all(self, keys: Iterable[tuple[Ticket, float]]) -> int:
        """Change many keys in one pass, O(n) for n waiting actions; gives how many of them were waiting."""
        changed = 0
        touched: dict[int, _Job[Ticket]] = {}
        for ticket, key in keys:
            if key != key:
                raise ValueError(f"the key of {ticket!r} is not a number")
            action = self._waiting.get(ticket)
            if action is not None:
                action.key = key
                touched[id(action.job)] = action.job
                changed += 1
        for queue in touched.values():
            live = (action for action in queue.by_age if action.version >= 0)
            queue.by_key = [(action.key, action.arrival, action.version, action) for action in live]
            heapq.heapify(queue.by_key)
        return changed

    def grant(self, now: float) -> list[Ticket]:
        """The actions that may start now, in the order they were chosen; each holds a slot from here on."""
        granted: list[Ticket] = []
        if not self._backlog:
            return granted
        self._refill(now)
        while self._backlog and len(self._running) < self.slots and self._tokens >= 1.0:
            queue = self._next_job()
            queue.grants += 1
            by_age = queue.grants % self._oldest_every == 0
            action = queue.oldest() if by_age else queue.smallest()
            action.by_age = by_age
            del self._waiting[action.ticket]
            self._leave_queue(action)
            queue.running += 1
            queue.last_grant = self._granted
            self._running[action.ticket] = action
            self._granted += 1
            self._tokens -= 1.0
            granted.append(action.ticket)
        return granted

    def granted_as(self, ticket: Ticket) -> Grant:
        """What a running action was granted by. Raises `ValueError` when it does not run."""
        action = self._running.get(ticket)
        if action is None:
            raise ValueError(f"{ticket!r} holds no slot")
        return Grant(action.key, action.by_age)

    def next_grant_s(self, now: float) -> float | None:
        """When the rate limit lets the next action start; None when time alone will not start one."""
        if self._rate is None or not self._backlog or len(self._running) >= self.slots:
            return None
        self._refill(now)
        return now + max(0.0, 1.0 - self._tokens) / self._rate.per_s

    def is_waiting(self, ticket: Ticket) -> bool:
        return ticket in self._waiting

    def is_running(self, ticket: Ticket) -> bool:
        return ticket in self._running

    def oldest_waiting(self) -> Ticket | None:
        """The action that has waited longest over all jobs."""
        queues = self._backlog.values()
        return min((queue.oldest() for queue in queues), key=lambda action: action.arrival).ticket if queues else None

    def statistics(self) -> GateStatistics:
        return GateStatistics(
            slots=self.slots,
            running=len(self._running),
            waiting=len(self._waiting),
            granted=self._granted,
            cancelled=self._cancelled,
            jobs=sum(1 for queue in self._jobs.values() if queue.waiting or queue.running),
        )

    def _job(self, name: str) -> _Job[Ticket]:
        queue = self._jobs.get(name)
        if queue is None:
            queue = self._jobs[name] = _Job(name)
        return queue

    def _next_job(self) -> _Job[Ticket]:
        if len(self._backlog) == 1:
            return next(iter(self._backlog.values()))
        return min(self._backlog.values(), key=lambda queue: (queue.running, queue.last_grant))

    def _leave_queue(self, action: _Waiting[Ticket]) -> None:
        queue = action.job
        queue.forget(action)
        if not queue.waiting:
            del self._backlog[queue.name]
            queue.by_key.clear()
            queue.by_age.clear()

    def _drop_if_idle(self, queue: _Job[Ticket]) -> None:
        """Forget a job without actions, beyond the first thousand: names must not pile up over a broker's life."""
        if not queue.waiting and not queue.running and len(self._jobs) > 1_000:
            del self._jobs[queue.name]

    def _refill(self, now: float) -> None:
        if self._rate is None:
            return
        if self._tokens_at is not None and now > self._tokens_at:
            self._tokens = min(float(self._rate.burst), self._tokens + (now - self._tokens_at) * self._rate.per_s)
        if self._tokens_at is None or now > self._tokens_at:
            self._tokens_at = now
