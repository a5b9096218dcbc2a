"""What admission asks of a policy, and the policy that goes by a number alone.

A policy is pure: trajectory ids in, trajectory ids out. It reads no clock and waits for nothing; `admission.py` is the
shell in which trajectories wait, and verl's coordinator, which serves many processes, is another.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from makespan.rollout.errors import ConfigError
from makespan.rollout.order import AdmissionOrder, ArrivalOrder


class AdmissionStatistics(msgspec.Struct, frozen=True):
    """A snapshot: how many trajectories hold a ticket, how many wait, and the most that may hold one."""

    admitted: int
    waiting: int
    concurrency: int | None
    """None: no limit."""
    parked: int = 0
    """Admitted trajectories that wait to go on."""


class ReturningTurn(NamedTuple):
    """What a turn that was not its trajectory's first found of what the one before had left."""

    prompt_tokens: int
    """Of the turn before."""
    computed_tokens: int
    """Of this turn's prompt, those that the turn before had computed."""
    cached_tokens: int
    """Of this turn's prompt, those that need not be computed where it was served."""
    preemptions: int


class AdmissionPolicy(Protocol):
    """The pure part: trajectory ids in, trajectory ids out."""

    def submit(self, trajectory_id: str) -> None: ...

    def adopt(self, trajectory_id: str) -> None:
        """A trajectory runs that was admitted elsewhere: it counts as admitted, whatever the limit."""
        ...

    def start(self) -> list[str]:
        """The trajectories that may start or go on now, in the order in which they do; they count as admitted from
        here."""
        ...

    def reach(self, trajectory_id: str, context_tokens: int) -> bool:
        """An admitted trajectory is about to ask for an inference with so long a prompt: whether it may.

        If not it is parked until `start` names it.
        """
        ...

    def served(self, turn: ReturningTurn) -> None:
        """A turn was served that was not its trajectory's first."""
        ...

    def resize(self, replicas: int) -> None:
        """So many replicas are left, or are back."""
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

    def adopt(self, trajectory_id: str) -> None:
        self._waiting.withdraw(trajectory_id)
        self._admitted.add(trajectory_id)

    def start(self) -> list[str]:
        started = []
        while len(self._waiting) and (self._concurrency is None or len(self._admitted) < self._concurrency):
            trajectory_id = self._waiting.next()
            self._admitted.add(trajectory_id)
            started.append(trajectory_id)
        return started

    def reach(self, trajectory_id: str, context_tokens: int) -> bool:
        return True

    def served(self, turn: ReturningTurn) -> None: ...

    def resize(self, replicas: int) -> None: ...

    def finish(self, trajectory_id: str) -> None:
        self._admitted.discard(trajectory_id)
        self._waiting.withdraw(trajectory_id)

    def statistics(self) -> AdmissionStatistics:
        return AdmissionStatistics(len(self._admitted), len(self._waiting), self._concurrency)
