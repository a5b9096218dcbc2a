"""What a router knows of its replicas: turns in flight, queued prompts, memory; one number a replica in each array.

The arrays are written where something happens (a turn starts or ends at one replica: O(1)) and read whole where a
decision is made. Replicas keep their place in the arrays while they exist; the place of a removed one is used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from makespan.rollout.cached import CacheMirror
from makespan.rollout.memory import ReplicaMemory
from makespan.rollout.simulation.cost import InferenceCost

Floats = NDArray[np.float64]

PRIOR_GENERATED = 250.0
"""Tokens a turn, before any was seen."""
PRIOR_TURN_S = 10.0
"""Seconds from a turn's placement to its end, before any was seen."""
QUEUE, EVICTED, BEYOND = 0, 1, 2


class Flight(msgspec.Struct):
    """A turn in flight."""

    replica: int
    context_tokens: int
    uncached_tokens: float
    """Of its prompt, by what was predicted."""
    shared_tokens: int
    """Of the prompt, what a sibling may have left there; 0 where the trajectory's own cache says more."""


class Fleet:
    """The replicas.

    Args:
        memory: of each; None: it never binds.
        cost: of inference on each, before `scale`.
    """

    def __init__(self, memory: ReplicaMemory | None, cost: InferenceCost) -> None:
        self.memory = memory
        self._cost = cost
        self._prefill_factor = self._decode_factor = 1.0
        self.names: list[str | None] = []
        self.index: dict[str, int] = {}
        self.generated_tokens = PRIOR_GENERATED
        """Of a turn, on average."""
        self.turn_s = PRIOR_TURN_S
        """From a turn's placement to its end, on average: as long as memory that is in use is not given back."""
        self.mirrors: list[CacheMirror] = []
        self.flying: list[OrderedDict[str, Flight]] = []
        """Turns in flight by trajectory, the oldest first."""
        self._contexts: list[int] = []
        self._pending: list[float] = []  # uncached prompt tokens of the turns in flight
        self.token_s = np.zeros(0)
        """A prefilled token, its share of the steps that its chunk takes included."""
        self.decode_s = np.zeros(0)
        """To generate as much as a turn does on average, beside the turns in flight; infinite where nothing may be
        placed."""
        self.crowd_s = np.zeros(0)
        """What the contexts that are at home there make a new trajectory wait; in flight or not, cached or lost."""
        # What is cut off at 0 and at a bound, one row each: when the queue will be empty, memory over the capacity with
        # the waiting caches, and without them. They stand together, as numpy takes longer to begin than to compute.
        self._over = np.zeros((3, 0))
        self._most = np.zeros((3, 0))
        self._weight = np.zeros((3, 0))
        self._nothing = np.zeros((3, 0))
        self._shift = np.zeros((3, 1))
        self._found = np.zeros((3, 0))
        self._found_rows: list[Floats] = []
        self._closed: set[int] = set()

    def add(self, name: str) -> None:
        """A replica that holds nothing."""
        if None in self.names:
            index = self.names.index(None)
            self.names[index] = name
            self.mirrors[index], self.flying[index] = CacheMirror(self.memory), OrderedDict()
            self._contexts[index], self._pending[index] = 0, 0.0
        else:
            index = len(self.names)
            self.names.append(name)
            self.mirrors.append(CacheMirror(self.memory))
            self.flying.append(OrderedDict())
            self._contexts.append(0)
            self._pending.append(0.0)
            self._lengthen()
        self.index[name] = index
        self.crowd_s[index] = self._over[QUEUE, index] = 0.0
        self.open(index)

    def remove(self, name: str) -> int:
        """The replica is gone; gives the place that it had. It must have no turns in flight."""
        index = self.index.pop(name)
        self.names[index] = None
        self.close(index)
        return index

    def close(self, index: int) -> None:
        """Nothing may be placed there."""
        self._closed.add(index)
        self._refresh(index)

    def open(self, index: int) -> None:
        """Turns may be placed there again."""
        self._closed.discard(index)
        self._refresh(index)

    def take_off(self, trajectory_id: str, flight: Flight, now_s: float) -> list[str]:
        """A turn was placed; gives the trajectories whose caches it overwrites."""
        index = flight.replica
        self.flying[index][trajectory_id] = flight
        self._contexts[index] += flight.context_tokens
        self._pending[index] += flight.uncached_tokens
        begins_s = max(now_s, self._over.item(QUEUE, index))
        self._over[QUEUE, index] = begins_s + flight.uncached_tokens * self.token_s.item(index)
        gone = self.mirrors[index].start(trajectory_id, flight.context_tokens)
        self._refresh(index)
        return gone

    def land(self, index: int, trajectory_id: str, context_tokens: int) -> list[str]:
        """The turn is over, with so much context; gives the trajectories whose caches are overwritten."""
        flight = self.flying[index].pop(trajectory_id)
        self._contexts[index] -= flight.context_tokens
        self._pending[index] -= flight.uncached_tokens
        gone = self.mirrors[index].end(trajectory_id, flight.context_tokens, context_tokens)
        self._refresh(index)
        return gone

    def finish(self, index: int, trajectory_id: str) -> None:
        """Nobody needs this cache any more."""
        self.mirrors[index].finish(trajectory_id)
        self._refresh(index)

    def clear(self, index: int) -> list[str]:
        """All caches are gone; gives whose they were."""
        gone = self.mirrors[index].clear()
        self._refresh(index)
        return gone

    def scale(self, prefill_factor: float, decode_factor: float) -> None:
        """How much slower than the constants replicas were seen to be."""
        self._prefill_factor, self._decode_factor = prefill_factor, decode_factor

    def expected_step_s(self, index: int) -> float:
        """A decode step by the constants alone."""
        cost = self._cost
        return cost.step_s + cost.sequence_s * len(self.flying[index]) + cost.context_s * self._contexts[index]

    def expected_token_s(self, index: int) -> float:
        """A prefilled token by the constants alone."""
        return self._cost.prefill_s + self.expected_step_s(index) / self._cost.chunk_tokens

    def cost_s(self, context_tokens: int, held: int, now_s: float, own_held: Iterable[tuple[int, int]]) -> Floats:
        """What it costs to place a turn on each replica, nothing of its prompt being cached.

        Args:
            held: memory of the context.
            own_held: (place, memory) of the trajectory's own caches, which it does not need twice.
        """
        self._shift[QUEUE, 0] = -now_s
        self._shift[EVICTED:, 0] = held
        over = np.add(self._over, self._shift, out=self._found)
        for index, own in own_held:
            over[EVICTED, index] -= own
        np.maximum(over, self._nothing, out=over)
        np.minimum(over, self._most, out=over)
        over *= self._weight
        cost_s: Floats = self.token_s * context_tokens
        cost_s += self.decode_s
        for row in self._found_rows:
            cost_s += row
        return cost_s

    def _lengthen(self) -> None:
        for array in ("token_s", "decode_s", "crowd_s"):
            setattr(self, array, np.append(getattr(self, array), 0.0))
        for array in ("_over", "_most", "_weight", "_nothing"):
            setattr(self, array, np.append(getattr(self, array), np.zeros((3, 1)), axis=1))
        self._weight[QUEUE, -1] = 1.0
        self._most[BEYOND, -1] = np.inf
        self._found = np.zeros_like(self._over)
        self._found_rows = list(self._found)

    def _refresh(self, index: int) -> None:
        mirror, step_s = self.mirrors[index], self.expected_step_s(index)
        token_s = self._prefill_factor * (self._cost.prefill_s + step_s / self._cost.chunk_tokens)
        self.token_s[index] = token_s
        closed = index in self._closed
        self.decode_s[index] = np.inf if closed else self.generated_tokens * self._decode_factor * step_s
        self._most[QUEUE, index] = self._pending[index] * token_s
        if self.memory is None:
            return
        beyond = mirror.running - self.memory.capacity
        self._over[EVICTED, index] = beyond + mirror.needed
        self._most[EVICTED, index] = mirror.needed
        self._weight[EVICTED, index] = token_s
        self._over[BEYOND, index] = beyond
        self._weight[BEYOND, index] = self.turn_s / self.memory.capacity
