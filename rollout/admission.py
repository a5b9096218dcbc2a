"""Who may start, and how many may run at once.

Admission decides when a trajectory's first action begins; it says nothing of environment slots, which an action holds
only while it runs (`gate.py`). The baseline is a fixed concurrency in order of arrival. A ticket is taken with
`async with admission.admit(trajectory_id):` and is given back on every way out, cancellation included.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.order import AdmissionOrder, ArrivalOrder
from makespan.rollout.trajectory import TrajectoryResult, TrajectoryState


class AdmissionStatistics(msgspec.Struct, frozen=True):
    """A snapshot: how many trajectories hold a ticket, how many wait, and the most that may hold one."""

    admitted: int
    waiting: int
    concurrency: int | None
    """None: no limit."""


class AdmissionPolicy(Protocol):
    """The pure part: trajectory ids in, trajectory ids out."""

    def submit(self, trajectory_id: str) -> None: ...

    def start(self) -> list[str]:
        """The trajectories that may start or go on now, in the order in which they do; they count as admitted from
        here."""
        ...

    def reach(self, trajectory_id: str, context_tokens: int) -> bool:
        """An admitted trajectory is about to ask for an inference with so much context: whether it may. If not it
        waits until `start` names it."""
        ...

    def finish(self, trajectory_id: str) -> None:
        """A trajectory is over or was withdrawn, whether it had started or not."""
        ...

    def statistics(self) -> AdmissionStatistics: ...


class FixedConcurrency:
    """At most `concurrency` trajectories run at once (None: all of them); they start in the given order."""

    def __init__(self, concurrency: int | None, order: AdmissionOrder | None = None) -> None:
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"admission.concurrency must be at least 1 or null for no limit, not {concurrency}")
        self._concurrency = concurrency
        self._admitted: set[str] = set()
        self._waiting = ArrivalOrder() if order is None else order

    def submit(self, trajectory_id: str) -> None:
        self._waiting.submit(trajectory_id)

    def start(self) -> list[str]:
        started = []
        while len(self._waiting) and (self._concurrency is None or len(self._admitted) < self._concurrency):
            trajectory_id = self._waiting.next()
            self._admitted.add(trajectory_id)
            started.append(trajectory_id)
        return started

    def reach(self, trajectory_id: str, context_tokens: int) -> bool:
        return True

    def finish(self, trajectory_id: str) -> None:
        self._admitted.discard(trajectory_id)
        self._waiting.withdraw(trajectory_id)

    def statistics(self) -> AdmissionStatistics:
        return AdmissionStatistics(len(self._admitted), len(self._waiting), self._concurrency)


class Admission:
    """The asyncio shell around a policy: trajectories wait here for their ticket."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._policy = policy
        self._tickets: dict[str, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def admit(self, trajectory_id: str) -> AsyncIterator[None]:
        """Wait for a ticket and hold it for the body of the `async with`.

        Cancelled while waiting, the trajectory leaves the queue; a ticket granted in the same instant passes on to the
        next one.
        """
        if trajectory_id not in self._tickets:
            self.enqueue([trajectory_id])
        try:
            await self._tickets[trajectory_id]
            yield
        finally:
            self.withdraw(trajectory_id)

    async def resume(self, trajectory_id: str, context_tokens: int, on_park: Callable[[str], None]) -> float:
        """Before each inference: wait while the trajectory is parked. Gives the seconds that it was."""
        if self._policy.reach(trajectory_id, context_tokens):
            self._grant()
            return 0.0
        on_park(trajectory_id)
        loop = asyncio.get_running_loop()
        parked_s = loop.time()
        self._tickets[trajectory_id] = loop.create_future()
        self._grant()
        await self._tickets[trajectory_id]
        return loop.time() - parked_s

    def enqueue(self, trajectory_ids: Iterable[str]) -> None:
        """Let trajectories wait before they ask with `admit`: all of a batch are known before the first one starts.

        They are granted in the loop's next round, when tasks made by the caller have reached `admit` and go on in the
        order of their grants.
        """
        loop = asyncio.get_running_loop()
        for trajectory_id in trajectory_ids:
            self._tickets[trajectory_id] = loop.create_future()
            self._policy.submit(trajectory_id)
        loop.call_soon(self._grant)

    def withdraw(self, trajectory_id: str) -> None:
        """The trajectory is over, or will never ask for its ticket."""
        self._tickets.pop(trajectory_id, None)
        self._policy.finish(trajectory_id)
        self._grant()

    def statistics(self) -> AdmissionStatistics:
        return self._policy.statistics()

    def _grant(self) -> None:
        for trajectory_id in self._policy.start():
            ticket = self._tickets.get(trajectory_id)
            if ticket is not None and not ticket.done():
                ticket.set_result(None)


def _everything(concurrency: int | None, order: AdmissionOrder | None = None) -> AdmissionPolicy:
    """All trajectories at once, whatever the memory: what a trainer without admission control does."""
    if concurrency is not None:
        raise ConfigError(
            f"admission.concurrency: 'everything' admits all at once, so it must be null, not {concurrency}"
        )
    return FixedConcurrency(None, order)


def _coupled(concurrency: int | None, order: AdmissionOrder | None = None) -> AdmissionPolicy:
    """As many trajectories as there are environment slots.

    A trajectory that holds its slot from start to end (a sandbox a rollout, a semaphore around the whole loop) keeps
    everyone else out for as long, inference included; the slots then never make anybody wait, and half of them idle.
    """
    if concurrency is None:
        raise ConfigError("admission.concurrency: 'coupled' needs the number of environment slots here, not null")
    return FixedConcurrency(concurrency, order)


class OversampleCut:
    """Stops a batch when enough trajectories have finished; what still runs is thrown away.

    Starting more than are needed hides stragglers and pays twice: in the tokens of those that are cut, and in what is
    kept being the short ones. To be passed to `RolloutEngine.run` as `on_end`, with the engine's `stop`.
    """

    def __init__(self, needed: int, stop: Callable[[], None]) -> None:
        if needed < 1:
            raise ConfigError(f"oversampling needs at least 1 trajectory to keep, not {needed}")
        self._needed = needed
        self._stop = stop

    def __call__(self, result: TrajectoryResult) -> None:
        if result.state in (TrajectoryState.FINISHED, TrajectoryState.TRUNCATED):
            self._needed -= 1
            if self._needed == 0:
                self._stop()


ADMISSION: dict[str, Callable[[int | None, AdmissionOrder | None], AdmissionPolicy]] = {
    "fixed": FixedConcurrency,
    "everything": _everything,
    "coupled": _coupled,
}
"""Admission policies by the name that a configuration uses."""


def make_admission(name: str, concurrency: int | None, order: AdmissionOrder | None = None) -> Admission:
    """The shell around the policy of this name; trajectories start in `order`, by default in that of their arrival.

    Raises `ConfigError` for an unknown name.
    """
    if name not in ADMISSION:
        raise ConfigError(f"admission.policy: unknown policy {name!r}{nearest(name, ADMISSION)}")
    return Admission(ADMISSION[name](concurrency, order))
