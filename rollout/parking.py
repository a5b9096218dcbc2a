"""Parking: taking back what was admitted, when contexts grow out of the memory.

A limit on the number of trajectories goes by their mean context. Contexts grow while they run, and where they grow
together a number that fitted at the start does not fit later; admission alone cannot undo what it has admitted. So a
trajectory asks again before every inference (`reach`). While the contexts of the active ones exceed the limit, the
newest-admitted active one is *paused*: it may finish what it is doing, and is *parked* when it next asks. It goes on,
before anybody new starts, once all fit again with a little to spare. One trajectory is always active, so that the batch
goes on whatever the limit. The newest give way because the oldest are nearest to their end, which is when memory comes
back for good.

**The limit** begins at `LIMIT_SHARE` of all replicas' memory, and is corrected by what the caches are seen to do
(`CacheCorrection`). How much may be overbooked cannot be said beforehand: where trajectories wait long for their
environments they miss their caches little and a recomputed prompt costs little beside the wait, and where they do
not, one percent too much has everybody recompute. Both show in the same figure: the share of the tokens that a
returning turn should have found cached and did not.
"""

from __future__ import annotations

import heapq

from makespan.rollout.admission_policy import AdmissionStatistics
from makespan.rollout.errors import ConfigError
from makespan.rollout.memory import ReplicaMemory
from makespan.rollout.order import AdmissionOrder, ArrivalOrder

LIMIT_SHARE = 0.95
"""Of the memory: the rest is for what finished trajectories leave behind, and for replicas that are unequally full."""
HYSTERESIS = 0.05
"""A paused trajectory goes on only when so much of the memory stays free, or it would be paused again a turn later."""


class CacheCorrection:
    """How much of the memory may be booked, corrected by how many cached tokens were lost.

    A slow controller: one step a *round* (as many returning turns as there are active trajectories, at least
    `MIN_ROUND`), since a change shows only when everybody has come back once.

    Args:
        share: where it begins, as a share of the memory.
    """

    LOST_SHARE = 0.1
    """Up to so many of the expected tokens may be lost. Losing none means that memory lies idle behind environments."""
    DOWN = 0.5
    """The limit shrinks by so many times what is lost beyond that…"""
    MOST_DOWN = 0.1
    """… and by at most so much a round, preemptions included."""
    UP = 0.02
    """A round with less than half of `LOST_SHARE` lost, while somebody is kept out, lets in so much more."""
    LOWEST, HIGHEST = 0.7, 1.3
    MIN_ROUND = 16

    def __init__(self, share: float = LIMIT_SHARE) -> None:
        self.share = share
        self._turns = self._expected = self._lost = self._preemptions = 0

    def observe(self, expected_tokens: int, cached_tokens: int, preemptions: int, active: int, kept_out: bool) -> None:
        """A turn came back to the replica that served its last one.

        Args:
            expected_tokens: had that replica lost nothing, so many of the prompt's tokens were cached.
            active: trajectories that run now.
            kept_out: whether the limit keeps anybody from running.
        """
        self._turns += 1
        self._expected += expected_tokens
        self._lost += max(0, expected_tokens - cached_tokens)
        self._preemptions += preemptions
        if self._turns < max(self.MIN_ROUND, active):
            return
        lost = self._lost / max(1, self._expected)
        if self._preemptions > self._turns // self.MIN_ROUND:  # the late alarm: running sequences alone overflow
            self.share *= 1 - self.MOST_DOWN
        elif lost > self.LOST_SHARE:
            self.share *= 1 - min(self.MOST_DOWN, self.DOWN * (lost - self.LOST_SHARE))
        elif kept_out and lost < self.LOST_SHARE / 2:
            self.share *= 1 + self.UP
        self.share = min(self.HIGHEST, max(self.LOWEST, self.share))
        self._turns = self._expected = self._lost = self._preemptions = 0


class Parking:
    """An admission policy: at most `concurrency` trajectories, and as many of them at work as fit into memory.

    Args:
        concurrency: the reference (None: no limit but the memory).
        memory: of one replica.
        replicas: how many there are.
        correction: None: the limit stays at `LIMIT_SHARE`.
    """

    def __init__(
        self,
        concurrency: int | None,
        order: AdmissionOrder | None = None,
        *,
        memory: ReplicaMemory,
        replicas: int,
        correction: CacheCorrection | None = None,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"admission.concurrency must be at least 1 or null for no limit, not {concurrency}")
        if memory.capacity < 1 or replicas < 1:
            raise ConfigError(
                f"admission.policy 'parking' needs the memory of the replicas, not {memory.capacity} on {replicas}"
            )
        self._concurrency = concurrency
        self._waiting = ArrivalOrder() if order is None else order
        self._memory = memory
        self._replicas = replicas
        self._correction = correction
        self._admissions = 0
        self._number: dict[str, int] = {}  # of all admitted ones, by the order of their admission
        self._held: dict[str, int] = {}  # by their contexts
        self._active: dict[str, None] = {}
        self._booked = 0  # held by the active ones
        self._parked: set[str] = set()
        # Heaps with entries that may be out of date: an entry counts if the trajectory is (not) active now.
        self._newest: list[tuple[int, str]] = []
        self._paused: list[tuple[int, str]] = []
        self.pauses = 0
        """How often a trajectory was paused so far."""

    # The policy

    def submit(self, trajectory_id: str) -> None:
        self._waiting.submit(trajectory_id)

    def start(self) -> list[str]:
        going: list[str] = []
        room = self._limit() - HYSTERESIS * self._capacity()
        while (paused := self._first_paused()) is not None:
            if self._active and self._booked + self._held[paused] > room:
                return going
            self._activate(paused)
            if paused in self._parked:
                self._parked.remove(paused)
                going.append(paused)
        while len(self._waiting) and self._admits(room):
            trajectory_id = self._waiting.next()
            self._take_in(trajectory_id)
            going.append(trajectory_id)
        return going

    def adopt(self, trajectory_id: str) -> None:
        self._waiting.withdraw(trajectory_id)
        if trajectory_id not in self._number:
            self._take_in(trajectory_id)

    def reach(self, trajectory_id: str, context_tokens: int) -> bool:
        if trajectory_id not in self._number:
            return True  # withdrawn in the meantime: it is on its way out
        held = self._memory.held(context_tokens)
        if trajectory_id in self._active:
            self._booked += held - self._held[trajectory_id]
        self._held[trajectory_id] = held
        self._pause()
        if trajectory_id in self._active:
            return True
        self._parked.add(trajectory_id)
        return False

    def served(self, expected_tokens: int, cached_tokens: int, preemptions: int) -> None:
        if self._correction is not None:
            kept_out = len(self._active) < len(self._number) or (
                len(self._waiting) > 0 and (self._concurrency is None or len(self._number) < self._concurrency)
            )
            self._correction.observe(expected_tokens, cached_tokens, preemptions, len(self._active), kept_out)

    def finish(self, trajectory_id: str) -> None:
        self._waiting.withdraw(trajectory_id)
        if self._number.pop(trajectory_id, None) is not None:
            if trajectory_id in self._active:
                self._deactivate(trajectory_id)
            del self._held[trajectory_id]
            self._parked.discard(trajectory_id)

    def resize(self, replicas: int) -> None:
        self._replicas = max(1, replicas)
        self._pause()

    def statistics(self) -> AdmissionStatistics:
        return AdmissionStatistics(len(self._number), len(self._waiting), self._concurrency, len(self._parked))

    # Its parts

    def _capacity(self) -> int:
        return self._replicas * self._memory.capacity

    def _limit(self) -> float:
        return (LIMIT_SHARE if self._correction is None else self._correction.share) * self._capacity()

    def _admits(self, room: float) -> bool:
        below = self._concurrency is None or len(self._number) < self._concurrency
        return below and (not self._active or self._booked <= room)

    def _take_in(self, trajectory_id: str) -> None:
        self._admissions += 1
        self._number[trajectory_id] = self._admissions
        self._held[trajectory_id] = 0  # until it says how long its prompt is
        self._activate(trajectory_id)

    def _pause(self) -> None:
        while self._booked > self._limit() and len(self._active) > 1:
            number, trajectory_id = heapq.heappop(self._newest)
            if trajectory_id in self._active and self._number[trajectory_id] == -number:
                self._deactivate(trajectory_id)
                heapq.heappush(self._paused, (-number, trajectory_id))
                self.pauses += 1

    def _first_paused(self) -> str | None:
        while self._paused:
            number, trajectory_id = self._paused[0]
            if self._number.get(trajectory_id) == number and trajectory_id not in self._active:
                return trajectory_id
            heapq.heappop(self._paused)
        return None

    def _activate(self, trajectory_id: str) -> None:
        self._active[trajectory_id] = None
        self._booked += self._held[trajectory_id]
        heapq.heappush(self._newest, (-self._number[trajectory_id], trajectory_id))

    def _deactivate(self, trajectory_id: str) -> None:
        del self._active[trajectory_id]
        self._booked -= self._held[trajectory_id]
