"""What a replica still holds of every trajectory, as far as that can be known from outside.

A replica keeps a turn's cache when the turn is over, and overwrites the least recently used one when it needs the room.
`CacheMirror` does the same with lengths instead of tokens: it is told of turns that start and end, and predicts how
many tokens of a prompt need not be computed. What a finished trajectory leaves behind stays until it is overwritten,
but nobody misses it. Every step is O(1), amortised, whatever the prompt's length.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from makespan.rollout.memory import ReplicaMemory

MOST_CACHES = 16_384
"""Caches that are remembered of one replica; more would only matter with a memory without end."""


class Cache(msgspec.Struct):
    """What one trajectory has left on a replica."""

    tokens: int
    """Of the next prompt, that need not be computed."""
    held: int
    """Memory that it takes."""
    needed: bool = True
    """Whether the trajectory may come back."""


class CacheMirror:
    """The caches of one replica.

    Args:
        memory: None: nothing is ever overwritten.
    """

    def __init__(self, memory: ReplicaMemory | None) -> None:
        self._memory = memory
        self._caches: OrderedDict[str, Cache] = OrderedDict()
        self._all = 0
        self.running = 0
        """Memory of the turns in flight, by their prompts."""
        self.needed = 0
        """Memory of the caches whose trajectories may come back."""

    def get(self, trajectory_id: str) -> Cache | None:
        """What the trajectory has left here."""
        return self._caches.get(trajectory_id)

    def held(self, context_tokens: int) -> int:
        """Memory that a sequence takes here while it runs."""
        return context_tokens if self._memory is None else self._memory.held(context_tokens)

    def start(self, trajectory_id: str, context_tokens: int) -> list[str]:
        """A turn with this context starts here; gives the trajectories whose caches it overwrites."""
        self.discard(trajectory_id)
        self.running += self.held(context_tokens)
        return self._make_room()

    def end(self, trajectory_id: str, started_tokens: int, context_tokens: int) -> list[str]:
        """The turn that started with `started_tokens` is over, with `context_tokens` of context; gives the
        trajectories whose caches are overwritten."""
        self.running -= self.held(started_tokens)
        if self._memory is None:
            cache = Cache(context_tokens, context_tokens)
        else:
            cache = Cache(*self._memory.kept(started_tokens, context_tokens))
        self.discard(trajectory_id)
        self._caches[trajectory_id] = cache
        self._all += cache.held
        self.needed += cache.held
        return self._make_room()

    def finish(self, trajectory_id: str) -> None:
        """The trajectory will not come back."""
        cache = self._caches.get(trajectory_id)
        if cache is not None and cache.needed:
            cache.needed = False
            self.needed -= cache.held

    def discard(self, trajectory_id: str) -> None:
        """Its cache is in use again, or of no use."""
        cache = self._caches.pop(trajectory_id, None)
        if cache is not None:
            self._all -= cache.held
            self.needed -= cache.held if cache.needed else 0

    def clear(self) -> list[str]:
        """All caches are gone; gives whose they were. Turns in flight go on."""
        gone = list(self._caches)
        self._caches.clear()
        self._all = self.needed = 0
        return gone

    def _make_room(self) -> list[str]:
        gone: list[str] = []
        while self._caches and (len(self._caches) > MOST_CACHES or self._overfull()):
            oldest = next(iter(self._caches))
            self.discard(oldest)
            gone.append(oldest)
        return gone

    def _overfull(self) -> bool:
        return self._memory is not None and self.running + self._all > self._memory.capacity
