"""Routing by cost: where will this turn be done soonest, and what does placing it there cost the others.

The cost of a replica, in seconds, for a turn with a prompt of `context` tokens:

    queue       prompt tokens of turns in flight there that are not computed yet, at the prefill rate
    prefill     the prompt's tokens that are not cached there, at the prefill rate
    decode      tokens that it will generate (a running mean), at the step time beside those in flight
    memory      contexts in flight beyond its memory: how long until so much of it is given back
    eviction    caches that are still needed and would be overwritten, computed again

A prefill token costs its own time and its share of the steps in which chunks of the prompt are computed, which decode
the others' tokens, too. A trajectory stays at its home, the replica of its last turn, unless the move saves more than
`SAVED_S` seconds *and* `SAVED_FACTOR` in all: estimates are rough, and a move that only follows their noise makes the
prompt be computed again each time. In the tail of a batch, when replicas fall idle, the same rule lets a long
conversation leave a crowded replica as soon as that pays for its prompt. Who has lost its cache has nothing to stay
for: as if it were new, it sees how crowded each replica is, and moves for `SAVED_S` alone. So contexts leave a replica
that is overfull for one that is not, when it costs nothing.

What is cached where is followed by a `CacheMirror` for each replica. A prompt that siblings of the group have computed
counts as cached to the extent that first turns were seen to find it. Constants are a calibrated `InferenceCost`; two
factors, one for prefill and one for decode, follow what completions took, so that a guess is good enough to start with.

A decision works on a few arrays of one number a replica (`fleet.py`), whatever the length of the prompt and the number
of trajectories.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from makespan.rollout.errors import ReplicaFailure
from makespan.rollout.fleet import Fleet, Flight, Floats
from makespan.rollout.memory import ReplicaMemory
from makespan.rollout.route import RouteRequest, Served
from makespan.rollout.simulation.cost import InferenceCost

SAVED_S = 2.0
SAVED_FACTOR = 1.5
MEAN_GAIN = 0.02
"""Of the running means: they follow the last fifty turns."""
CROWD_S = 10.0
"""A trajectory without a cache sees a replica whose memory is booked by others' contexts as so much slower: it will be
there for long, and what is in flight at this moment says little of the company that it will keep."""
SLOWER = (0.01, 100.0)
"""Bounds of the learnt factors, so that one odd completion cannot make a replica look free."""
MOST_TRAJECTORIES = 100_000
"""Trajectories that are remembered without having been finished (not every caller says when one is)."""


class _Known(msgspec.Struct):
    """A trajectory."""

    group: str
    home: int | None = None
    crowd_s: float = 0.0
    """By how much its context makes its home less attractive to others without a cache."""
    flies_at: int | None = None
    places: set[int] = msgspec.field(default_factory=set)
    """Replicas that still hold a cache of it."""


class _Found(NamedTuple):
    """What a replica holds of a prompt."""

    tokens: float
    """Prompt tokens that need not be computed."""
    held: int
    """Memory of the trajectory's own cache there."""
    shared: int
    """Tokens that a sibling has left, if that is all."""


class CostRouter:
    """The default router; see the module's text.

    Args:
        rng: breaks ties, so that routers of equal replicas do not all begin with the first one.
        memory: of each replica; None: it never binds, or is not known.
        cost: of inference on each replica.
    """

    def __init__(
        self,
        replica_ids: Iterable[str] = (),
        *,
        rng: random.Random,
        memory: ReplicaMemory | None = None,
        cost: InferenceCost | None = None,
    ) -> None:
        self._rng = rng
        self._memory = memory
        self._fleet = Fleet(memory, InferenceCost() if cost is None else cost)
        self._trajectories: OrderedDict[str, _Known] = OrderedDict()
        self._prompts: dict[str, int] = {}  # group: tokens that its first prompts share, at most
        self._siblings: dict[str, dict[int, int]] = {}  # group: {replica: its members cached or in flight there}
        self._prefill_factor = self._decode_factor = 1.0
        self._shared = 1.0  # of a sibling's prompt, the share that first turns find
        self.moves = 0
        """Turns that were not placed at their trajectory's home, so far."""
        self.add(replica_ids)

    # The contract

    def route(self, request: RouteRequest) -> str:
        fleet, trajectory_id, context = self._fleet, request.trajectory_id, request.context_tokens
        known = self._recall(request)
        held = context if self._memory is None else self._memory.held(context)
        cached = self._cached(known, trajectory_id, context)
        bound = known.home in known.places
        chosen = self._choose(known, self._cost_s(known, context, held, cached, request.now_s, bound), bound)
        self.moves += known.home is not None and known.home != chosen
        found = cached.get(chosen)
        flight = Flight(chosen, context, context - (found.tokens if found else 0.0), found.shared if found else 0)
        if chosen not in known.places:
            self._count_in(known.group, chosen)
        known.places.discard(chosen)
        known.flies_at = chosen
        self._settle(known, chosen, held)
        self._forget_caches(chosen, fleet.take_off(trajectory_id, flight, request.now_s))
        name = fleet.names[chosen]
        assert name is not None
        return name

    def release(self, replica_id: str, trajectory_id: str = "", served: Served | None = None) -> None:
        index = self._fleet.index.get(replica_id)
        if index is None or not self._fleet.flying[index]:
            return
        if not trajectory_id:  # nobody says which one
            trajectory_id = next(iter(self._fleet.flying[index]))
        if trajectory_id in self._fleet.flying[index]:
            self._land(trajectory_id, self._trajectories[trajectory_id], served)

    def pause(self, trajectory_id: str) -> None:
        known = self._trajectories.get(trajectory_id)
        if known is not None:
            self._settle(known, None, 0)

    def finish(self, trajectory_id: str) -> None:
        known = self._trajectories.pop(trajectory_id, None)
        if known is None:
            return
        if known.flies_at is not None:
            self._land(trajectory_id, known, None)
        self._settle(known, None, 0)
        for index in known.places:
            self._fleet.finish(index, trajectory_id)
            self._count_out(known.group, index)

    def forget(self) -> int:
        at_home = [known for known in self._trajectories.values() if known.home is not None]
        for known in at_home:
            self._settle(known, None, 0)
        return len(at_home)

    def add(self, replica_ids: Iterable[str]) -> None:
        for name in replica_ids:
            if name not in self._fleet.index:
                self._fleet.add(name)
        self.wake(replica_ids)

    def remove(self, replica_ids: Iterable[str]) -> None:
        for name in replica_ids:
            index = self._fleet.index.get(name)
            if index is None:
                continue
            for trajectory_id in list(self._fleet.flying[index]):
                self._land(trajectory_id, self._trajectories[trajectory_id], None)
            self._forget_caches(index, self._fleet.clear(index))
            self._fleet.remove(name)
            for known in self._trajectories.values():
                if known.home == index:
                    self._settle(known, None, 0)

    def sleep(self, replica_ids: Iterable[str]) -> None:
        self.lose_caches(replica_ids)
        for index in self._indices(replica_ids):
            self._fleet.close(index)

    def wake(self, replica_ids: Iterable[str]) -> None:
        for index in self._indices(replica_ids):
            self._fleet.open(index)

    def lose_caches(self, replica_ids: Iterable[str]) -> None:
        for index in self._indices(replica_ids):
            self._forget_caches(index, self._fleet.clear(index))

    def in_flight(self) -> dict[str, int]:
        return {name: len(self._fleet.flying[index]) for name, index in self._fleet.index.items()}

    # The decision

    def _cached(self, known: _Known, trajectory_id: str, context: int) -> dict[int, _Found]:
        """What the replicas hold of the prompt, as far as they hold any of it: its own cache or a sibling's prompt."""
        cached: dict[int, _Found] = {}
        siblings = self._siblings.get(known.group)
        if siblings:
            shared = min(self._prompts.get(known.group, 0), context - 1)
            if shared > 0:
                found = _Found(self._shared * shared, 0, shared)
                cached = dict.fromkeys(siblings, found)
        for index in known.places:
            cache = self._fleet.mirrors[index].get(trajectory_id)
            if cache is not None:
                cached[index] = _Found(float(min(cache.tokens, context - 1)), cache.held, 0)
        return cached

    def _cost_s(
        self, known: _Known, context: int, held: int, cached: dict[int, _Found], now_s: float, bound: bool
    ) -> Floats:
        """The cost of each replica. Whoever is not `bound` by a cache at home looks for room to stay in, too."""
        fleet = self._fleet
        own_held = [(index, found.held) for index, found in cached.items() if found.held]
        cost_s = fleet.cost_s(context, held, now_s, own_held)
        for index, found in cached.items():
            cost_s[index] -= found.tokens * fleet.token_s.item(index)
        if not bound:
            cost_s += fleet.crowd_s
            if known.home is not None:
                cost_s[known.home] -= known.crowd_s
        return cost_s

    def _choose(self, known: _Known, cost_s: Floats, bound: bool) -> int:
        home, best = known.home, int(cost_s.argmin()) if len(cost_s) else -1
        there_s = cost_s.item(best) if best >= 0 else math.inf
        if there_s == math.inf:
            return self._least_asleep()
        if home is None:
            ties = (cost_s <= there_s).nonzero()[0]
            return best if len(ties) == 1 else int(self._rng.choice(ties.tolist()))
        here_s = cost_s.item(home)
        return best if here_s - there_s > SAVED_S and (not bound or here_s > SAVED_FACTOR * there_s) else home

    def _least_asleep(self) -> int:
        """Everybody sleeps: a turn waits at the replica for its waking."""
        if not self._fleet.index:
            raise ReplicaFailure("no replica is left to serve a turn: all of them were removed or died")
        return min(self._fleet.index.values(), key=lambda index: len(self._fleet.flying[index]))

    # Bookkeeping

    def _recall(self, request: RouteRequest) -> _Known:
        known = self._trajectories.get(request.trajectory_id)
        if known is None:
            known = self._trajectories[request.trajectory_id] = _Known(request.group)
            if len(self._trajectories) > MOST_TRAJECTORIES:
                self.finish(next(iter(self._trajectories)))
        elif known.flies_at is not None:  # its caller gave up and never said so
            self._land(request.trajectory_id, known, None)
        if request.group and request.turn == 0:
            shorter = min(self._prompts.get(request.group, request.context_tokens), request.context_tokens)
            self._prompts[request.group] = shorter
        return known

    def _settle(self, known: _Known, home: int | None, held: int) -> None:
        """The trajectory's home is here from now on, and its context is so large."""
        if known.home is not None:
            self._fleet.crowd_s[known.home] -= known.crowd_s
        known.home = home
        if home is not None and self._memory is not None:
            known.crowd_s = CROWD_S * held / self._memory.capacity
            self._fleet.crowd_s[home] += known.crowd_s

    def _land(self, trajectory_id: str, known: _Known, served: Served | None) -> None:
        index = known.flies_at
        assert index is not None
        flight = self._fleet.flying[index][trajectory_id]
        if served is not None:
            self._learn(index, flight, served)
        left = flight.context_tokens if served is None else served.context_tokens
        known.flies_at = None
        known.places.add(index)
        self._forget_caches(index, self._fleet.land(index, trajectory_id, left))

    def _learn(self, index: int, flight: Flight, served: Served) -> None:
        generated = served.context_tokens - flight.context_tokens
        self._fleet.generated_tokens += MEAN_GAIN * (generated - self._fleet.generated_tokens)
        if served.seconds is not None:
            self._fleet.turn_s += MEAN_GAIN * (served.seconds - self._fleet.turn_s)
        if served.cached_tokens is None:
            return
        if flight.shared_tokens:
            found = min(1.0, served.cached_tokens / flight.shared_tokens)
            self._shared += 5 * MEAN_GAIN * (found - self._shared)
        computed = max(1, flight.context_tokens - served.cached_tokens)
        if served.prefill_s is not None:
            expected_s = computed * self._fleet.expected_token_s(index)
            self._prefill_factor = _drawn(self._prefill_factor, served.prefill_s / expected_s)
        if served.decode_s is not None and generated > 1:
            expected_s = (generated - 1) * self._fleet.expected_step_s(index)
            self._decode_factor = _drawn(self._decode_factor, served.decode_s / expected_s)
        self._fleet.scale(self._prefill_factor, self._decode_factor)

    def _forget_caches(self, index: int, trajectory_ids: Iterable[str]) -> None:
        for trajectory_id in trajectory_ids:
            known = self._trajectories.get(trajectory_id)
            if known is not None and index in known.places:
                known.places.remove(index)
                if known.flies_at != index:
                    self._count_out(known.group, index)

    def _count_in(self, group: str, index: int) -> None:
        """One trajectory of the group more has its prompt here."""
        if group:
            counts = self._siblings.setdefault(group, {})
            counts[index] = counts.get(index, 0) + 1

    def _count_out(self, group: str, index: int) -> None:
        """One trajectory of the group less has its prompt here."""
        if not group:
            return
        counts = self._siblings[group]
        counts[index] -= 1
        if not counts[index]:
            del counts[index]
        if not counts:
            del self._siblings[group]
            self._prompts.pop(group, None)

    def _indices(self, replica_ids: Iterable[str]) -> list[int]:
        return [self._fleet.index[name] for name in replica_ids if name in self._fleet.index]


def _drawn(factor: float, seen: float) -> float:
    """A running mean of the logarithm: a ratio is as often a tenth as it is ten."""
    low, high = SLOWER
    step = math.exp(MEAN_GAIN * math.log(min(high, max(low, seen)) / factor))
    return min(high, max(low, factor * step))
