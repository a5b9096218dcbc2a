"""What each replica still holds of every trajectory, as far as that can be known from outside.

A replica keeps a turn's cache when the turn is over, and overwrites the least recently used one when it needs the room.
`CacheMirror` does the same with lengths instead of tokens: it is told of turns that start and end, and predicts how many
tokens of a prompt a replica would not have to compute. A trajectory may have left caches of different age on several
replicas. What a finished trajectory leaves behind stays in the way until it is overwritten, but nobody misses it.

All steps are O(1), amortised, whatever the prompt's length.
"""

from __future__ import annotations

from collections import OrderedDict

from makespan.rollout.memory import ReplicaMemory

MOST_CACHES = 16_384
"""Caches that are remembered of one replica; more would only matter with a memory without end."""


class CacheMirror:
    """The caches of one replica.

    Args:
        memory: None: nothing is ever overwritten.
    """

    def __init__(self, memory: ReplicaMemory | None) -> None:
        self._memory = memory
        self._caches: OrderedDict[str, tuple[int, int]] = OrderedDict()  # trajectory: (tokens, memory held)
        self._finished: set[str] = set()
        self.waiting = 0
        """Memory of caches that wait for their trajectory's next turn."""
        self.left = 0
        """Memory of caches that finished trajectories left behind."""
        self.running = 0
        """Memory of the turns in flight."""

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self._caches

    def tokens(self, trajectory_id: str) -> int:
        """Tokens of the trajectory that are cached here."""
        cache = self._caches.get(trajectory_id)
        return 0 if cache is None else cache[0]

    def held(self, trajectory_id: str) -> int:
        """Memory that the trajectory's cache takes here while it waits."""
        cache = self._caches.get(trajectory_id)
        return 0 if cache is None else cache[1]

    def start(self, trajectory_id: str, context_tokens: int) -> list[str]:
        """A turn with this context starts here; gives the trajectories whose caches it overwrites."""
        self._take(trajectory_id)
        self.running += self._held(context_tokens)
        return self._make_room()

    def end(self, trajectory_id: str, started_tokens: int, context_tokens: int) -> list[str]:
        """The turn that started with `started_tokens` is over and leaves `context_tokens` cached; gives the
        trajectories whose caches are overwritten."""
        self.running -= self._held(started_tokens)
        self._take(trajectory_id)
        held = self._held(context_tokens)
        self._caches[trajectory_id] = (context_tokens, held)
        self.waiting += held
        return self._make_room()

    def finish(self, trajectory_id: str) -> None:
        """The trajectory will not come back; its cache stays until it is overwritten."""
        cache = self._caches.get(trajectory_id)
        if cache is not None and trajectory_id not in self._finished:
            self._finished.add(trajectory_id)
            self.waiting -= cache[1]
            self.left += cache[1]

    def clear(self) -> list[str]:
        """All caches are gone, and what is in flight counts for nothing; gives whose they were."""
        gone = list(self._caches)
        self._caches.clear()
        self._finished.clear()
        self.waiting = self.left = self.running = 0
        return gone

    def _take(self, trajectory_id: str) -> None:
        cache = self._caches.pop(trajectory_id, None)
        if cache is None:
            return
        if trajectory_id in self._finished:
            self._finished.remove(trajectory_id)
            self.left -= cache[1]
        else:
            self.waiting -= cache[1]

    def _make_room(self) -> list[str]:
        capacity = None if self._memory is None else self._memory.capacity
        gone = []
        while self._caches and (
            len(self._caches) > MOST_CACHES
            or (capacity is not None and self.running + self.waiting + self.left > capacity)
        ):
            oldest = next(iter(self._caches))
            self._take(oldest)
            gone.append(oldest)
        return gone

    def _held(self, context_tokens: int) -> int:
        return context_tokens if self._memory is None else self._memory.held(context_tokens)
