"""Parking: taking back what was admitted, when contexts grow out of the memory.

A limit on the number of trajectories goes by their mean context. Contexts grow while they run, and where they grow
together a number that fitted at the start does not fit later; admission alone cannot undo what it has admitted. So a
trajectory asks again before every inference (`reach`). While the contexts of the active ones exceed the limit, the
newest-admitted active one is *paused*: it may finish what it is doing, and is *parked* when it next asks. It goes on,
before anybody new starts, once all fit again with a little to spare. One trajectory is always active, so that the batch
goes on whatever the limit. The newest give way because the oldest are nearest to their end, which is when memory comes
back for good.

**Evenly, where lengths are alike.** If most trajectories end at about the same length, at a cap of turns or tokens,
then whoever starts last ends last, by nearly a whole trajectory. Where the order says so (`AdmissionOrder.evenly`), all
start, and those that have come least far go first: who has reached another *level* (10, 20, 40 … turns) gives way to
whoever has not and is kept out. Each does so at most once a level, so that its prompt is computed again a few times in
all. Where lengths differ this would be wrong: a long trajectory that waits for the short ones ends after all of them.

**The limit** begins at `LIMIT_SHARE` of all replicas' memory, and is corrected by what the caches are seen to do
(`CacheCorrection`). How much may be overbooked cannot be said beforehand: where trajectories wait long for their
environments they miss their caches little and a recomputed prompt costs little beside the wait, and where they do
not, one percent too much has everybody recompute. Both show in the same figure: the share of the tokens that a
returning turn should have found cached and did not. Turns that another replica serves count like the others: who has
lost its cache may go anywhere, and who leaves one behind does so because its replica is overfull.

**The reference** says how many the whole memory is meant for. As much of it may start as the limit leaves of the memory
for starting, so that the correction governs how many are taken in, too. Those whom the reference alone keeps out do not
let the limit grow: what nobody books is not too little. Rounded up, for one of a few is much, and who is one too many
can be parked.
"""

from __future__ import annotations

import heapq
import math

from makespan.rollout.admission_policy import AdmissionStatistics, ReturningTurn
from makespan.rollout.errors import ConfigError
from makespan.rollout.memory import ReplicaMemory
from makespan.rollout.order import AdmissionOrder, ArrivalOrder, smaller_limit

LIMIT_SHARE = 0.95
"""Of the memory: the rest is for what finished trajectories leave behind, and for replicas that are unequally full."""
HYSTERESIS = 0.05
"""A paused trajectory goes on only when so much of the memory stays free, or it would be paused again a turn later."""
FIRST_LEVEL = 10
"""Turns of the first level; each further one is as long as all before it. 20 was no different."""

ROUNDING = 1e-9
"""What floating point may add to a whole number that is rounded up."""

FEW_ENTRIES = 64
"""So many entries that are out of date are left in the heaps, besides one for everybody."""


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
        """A turn was served that was not its trajectory's first.

        Args:
            expected_tokens: had the replica of the one before lost nothing that it can keep, and served it, so many
                tokens were cached.
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
        concurrency: the most that are admitted at once, parked ones included (None: no limit but the memory).
        memory: of one replica.
        replicas: how many there are.
        reference: so many all of the memory is meant for. Of them, the share that the limit leaves for starting may be
            admitted at once, rounded up; no limit where trajectories advance evenly, or with None.
        correction: None: the limit stays at `LIMIT_SHARE`.
    """

    def __init__(
        self,
        concurrency: int | None,
        order: AdmissionOrder | None = None,
        *,
        memory: ReplicaMemory,
        replicas: int,
        reference: int | None = None,
        correction: CacheCorrection | None = None,
    ) -> None:
        for name, number in (("concurrency", concurrency), ("reference", reference)):
            if number is not None and number < 1:
                raise ConfigError(f"admission.{name} must be at least 1 or null for no limit, not {number}")
        if memory.capacity < 1 or replicas < 1:
            raise ConfigError(
                f"admission.policy 'parking' needs the memory of the replicas, not {memory.capacity} on {replicas}"
            )
        self._concurrency = concurrency
        self._reference = reference
        self._waiting = ArrivalOrder() if order is None else order
        self._memory = memory
        self._replicas = replicas
        self._correction = correction
        self._admissions = 0
        self._number: dict[str, int] = {}  # of all admitted ones, by the order of their admission
        self._turns: dict[str, int] = {}  # inferences that they have asked for
        self._held: dict[str, int] = {}  # by their contexts
        self._active: dict[str, None] = {}
        self._booked = 0  # held by the active ones
        self._parked: set[str] = set()
        self._evenly = False
        # Heaps with entries that may be out of date: an entry counts if the trajectory is (not) active now, and has
        # this rank. The last active one gives way first, the first paused one goes on first.
        self._last: list[tuple[int, int, str]] = []
        self._paused: list[tuple[int, int, str]] = []
        self.pauses = 0
        """How often a trajectory was paused so far."""

    # The policy

    def submit(self, trajectory_id: str) -> None:
        self._waiting.submit(trajectory_id)

    def start(self) -> list[str]:
        going: list[str] = []
        if len(self._waiting) or len(self._active) < len(self._number):
            self._advance_evenly(self._waiting.evenly())
        room = self._room()
        while True:
            paused = self._first_paused()
            if paused is not None and not (self._level(paused) and self._may_start()):
                if self._active and self._booked + self._held[paused] > room:
                    return going
                self._activate(paused)
                if paused in self._parked:
                    self._parked.remove(paused)
                    going.append(paused)
            elif self._may_start() and (not self._active or self._booked <= room):
                trajectory_id = self._waiting.next()
                self._take_in(trajectory_id)
                going.append(trajectory_id)
            else:
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
        level = self._level(trajectory_id)
        self._turns[trajectory_id] += 1
        if self._level(trajectory_id) != level:
            self._file(trajectory_id)
        self._pause()
        if trajectory_id in self._active and self._keeps_out(trajectory_id):
            self._give_way(trajectory_id)
        if trajectory_id in self._active:
            return True
        self._parked.add(trajectory_id)
        return False

    def served(self, turn: ReturningTurn) -> None:
        if self._correction is None:
            return
        kept_out = len(self._active) < len(self._number) or self._may_start()
        kept = self._memory.kept(turn.prompt_tokens, turn.computed_tokens + 1)  # the last token was only sampled
        expected_tokens = min(kept.tokens, turn.computed_tokens)
        self._correction.observe(expected_tokens, turn.cached_tokens, turn.preemptions, len(self._active), kept_out)

    def finish(self, trajectory_id: str) -> None:
        self._waiting.withdraw(trajectory_id)
        if trajectory_id in self._number:
            if trajectory_id in self._active:
                self._deactivate(trajectory_id)
            del self._number[trajectory_id], self._held[trajectory_id], self._turns[trajectory_id]
            self._parked.discard(trajectory_id)

    def resize(self, replicas: int) -> None:
        self._replicas = max(1, replicas)
        self._pause()

    def statistics(self) -> AdmissionStatistics:
        return AdmissionStatistics(len(self._number), len(self._waiting), self._most(), len(self._parked))

    # Its parts

    def _capacity(self) -> int:
        return self._replicas * self._memory.capacity

    def _limit(self) -> float:
        return (LIMIT_SHARE if self._correction is None else self._correction.share) * self._capacity()

    def _room(self) -> float:
        return self._limit() - HYSTERESIS * self._capacity()

    def _most(self) -> int | None:
        """How many may be admitted at once."""
        if self._evenly or self._reference is None:
            return self._concurrency
        share = self._room() / self._capacity()
        return smaller_limit(self._concurrency, math.ceil(share * self._reference - ROUNDING))

    def _may_start(self) -> bool:
        """Whether somebody new would start if there were room."""
        most = self._most()
        return len(self._waiting) > 0 and (most is None or len(self._number) < most)

    def _keeps_out(self, trajectory_id: str) -> bool:
        """Whether the memory keeps somebody out who has come less far."""
        level = self._level(trajectory_id)
        if not level or len(self._active) == 1:
            return False
        if self._may_start():
            return self._booked > self._room()
        paused = self._first_paused()
        return paused is not None and self._level(paused) < level and self._booked + self._held[paused] > self._room()

    def _take_in(self, trajectory_id: str) -> None:
        self._admissions += 1
        self._number[trajectory_id] = self._admissions
        self._turns[trajectory_id] = 0
        self._held[trajectory_id] = 0  # until it says how long its prompt is
        self._activate(trajectory_id)

    def _pause(self) -> None:
        while self._booked > self._limit() and len(self._active) > 1:
            level, number, trajectory_id = heapq.heappop(self._last)
            if trajectory_id in self._active and self._rank(trajectory_id) == (-level, -number):
                self._give_way(trajectory_id)

    def _give_way(self, trajectory_id: str) -> None:
        self._deactivate(trajectory_id)
        self._file(trajectory_id)
        self.pauses += 1

    def _first_paused(self) -> str | None:
        while self._paused:
            level, number, trajectory_id = self._paused[0]
            paused = trajectory_id in self._number and trajectory_id not in self._active
            if paused and self._rank(trajectory_id) == (level, number):
                return trajectory_id
            heapq.heappop(self._paused)
        return None

    def _activate(self, trajectory_id: str) -> None:
        self._active[trajectory_id] = None
        self._booked += self._held[trajectory_id]
        self._file(trajectory_id)

    def _deactivate(self, trajectory_id: str) -> None:
        del self._active[trajectory_id]
        self._booked -= self._held[trajectory_id]

    # Ranks

    def _level(self, trajectory_id: str) -> int:
        """How far it has come, where that counts."""
        return (self._turns[trajectory_id] // FIRST_LEVEL).bit_length() if self._evenly else 0

    def _rank(self, trajectory_id: str) -> tuple[int, int]:
        return self._level(trajectory_id), self._number[trajectory_id]

    def _file(self, trajectory_id: str) -> None:
        """Enter it where it will be found by its rank."""
        level, number = self._rank(trajectory_id)
        if trajectory_id in self._active:
            heapq.heappush(self._last, (-level, -number, trajectory_id))
        else:
            heapq.heappush(self._paused, (level, number, trajectory_id))
        if len(self._last) + len(self._paused) > 2 * len(self._number) + FEW_ENTRIES:
            self._file_anew()

    def _file_anew(self) -> None:
        """Enter everybody once, and forget what is out of date."""
        self._last.clear()
        self._paused.clear()
        for trajectory_id in self._number:
            self._file(trajectory_id)

    def _advance_evenly(self, evenly: bool) -> None:
        if evenly != self._evenly:
            self._evenly = evenly
            self._file_anew()
