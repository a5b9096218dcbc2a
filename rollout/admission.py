"""Who may start, and how many may run at once.

Admission decides when a trajectory's first action begins, and when it may ask for its next inference; it says nothing
of environment slots, which an action holds only while it runs (`gate.py`). The baseline is a fixed concurrency in order
of arrival, which never takes back what it admitted; `parking.py` does. A ticket is taken with
`async with admission.admit(trajectory_id):` and is given back on every way out, cancellation included.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from makespan.rollout.admission_policy import AdmissionPolicy, AdmissionStatistics, FixedConcurrency, ReturningTurn
from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.memory import ReplicaMemory
from makespan.rollout.order import AdmissionOrder
from makespan.rollout.parking import CacheCorrection, Parking
from makespan.rollout.trajectory import TrajectoryResult, TrajectoryState

__all__ = [
    "ADMISSION",
    "PARKING",
    "POLICIES",
    "Admission",
    "AdmissionPolicy",
    "AdmissionStatistics",
    "FixedConcurrency",
    "OversampleCut",
    "make_admission",
    "make_policy",
]


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

    def reach(self, trajectory_id: str, context_tokens: int) -> bool:
        """Before each inference: whether the trajectory may go on. If not, await `resume`."""
        goes_on = self._policy.reach(trajectory_id, context_tokens)
        if not goes_on:
            self._tickets[trajectory_id] = asyncio.get_running_loop().create_future()
        self._grant()
        return goes_on

    async def resume(self, trajectory_id: str) -> None:
        """Wait until a parked trajectory may go on. Cancelled meanwhile, it stays parked until `admit` ends."""
        await self._tickets[trajectory_id]

    def served(self, turn: ReturningTurn) -> None:
        """Tell the policy what became of a cache; see `AdmissionPolicy.served`."""
        self._policy.served(turn)

    def resize(self, replicas: int) -> None:
        """So many replicas are left, or are back."""
        self._policy.resize(replicas)
        self._grant()

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
"""Admission policies that know nothing of memory, by the name that a configuration uses."""

PARKING = "parking"
POLICIES = (*ADMISSION, PARKING)
"""All admission policies by name."""


def make_admission(
    name: str,
    concurrency: int | None,
    order: AdmissionOrder | None = None,
    *,
    memory: ReplicaMemory | None = None,
    replicas: int = 1,
    reference: int | None = None,
) -> Admission:
    """The shell around the policy of this name; see `make_policy`."""
    return Admission(make_policy(name, concurrency, order, memory=memory, replicas=replicas, reference=reference))


def make_policy(
    name: str,
    concurrency: int | None,
    order: AdmissionOrder | None = None,
    *,
    memory: ReplicaMemory | None = None,
    replicas: int = 1,
    reference: int | None = None,
) -> AdmissionPolicy:
    """The policy of this name; trajectories start in `order`, by default in that of their arrival.

    Args:
        memory, replicas: one replica's memory and how many there are, for `parking`.
        reference: how many trajectories that memory is meant for, for `parking`.

    Raises `ConfigError` for an unknown name, for parking without a memory, and for a reference without parking.
    """
    if name == PARKING:
        if memory is None:
            raise ConfigError(
                "admission.policy: 'parking' has to know the replicas' memory, and this back end does not say"
            )
        correction = CacheCorrection()
        return Parking(concurrency, order, memory=memory, replicas=replicas, reference=reference, correction=correction)
    if reference is not None:
        raise ConfigError(
            f"admission.reference: only 'parking' goes by it, so it must be null with {name!r}, not {reference}; "
            "a limit for every policy is admission.concurrency"
        )
    if name not in ADMISSION:
        raise ConfigError(f"admission.policy: unknown policy {name!r}{nearest(name, POLICIES)}")
    return ADMISSION[name](concurrency, order)
