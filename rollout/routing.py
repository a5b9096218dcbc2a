"""Which replica serves a trajectory's next turn: the policies by name.

A router is a pure object: it is told of replicas that come and go, of turns that start and end, and answers with a
replica's id. It reads no clock and its random source is handed to it, so that the same sequence of calls gives the
same decisions live, in verl, in replay and in simulation. `route.py` has its contract, `cost_routing.py` the default
and `sticky_routing.py` the baseline.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from makespan.rollout.cost_routing import CostRouter
from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.memory import ReplicaMemory
from makespan.rollout.route import Router, RouteRequest, Served
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.sticky_routing import StickyLeastInflight

__all__ = ["ROUTERS", "STICKY", "CostRouter", "RouteRequest", "Router", "Served", "StickyLeastInflight", "make_router"]

Make = Callable[[list[str], random.Random, ReplicaMemory | None, InferenceCost | None], Router]

STICKY = "sticky-least-inflight"

ROUTERS: dict[str, Make] = {
    STICKY: lambda replica_ids, rng, memory, cost: StickyLeastInflight(replica_ids, rng=rng),
    "cost": lambda replica_ids, rng, memory, cost: CostRouter(replica_ids, rng=rng, memory=memory, cost=cost),
}
"""Routing policies by the name that a configuration uses."""


def make_router(
    name: str,
    replica_ids: list[str],
    rng: random.Random,
    *,
    memory: ReplicaMemory | None = None,
    cost: InferenceCost | None = None,
) -> Router:
    """The policy of this name over these replicas. Raises `ConfigError` for an unknown name.

    Args:
        memory: of each replica, where it is known; it matters to `cost` alone, and so does `cost`.
        cost: of inference; None: a guess, which completions correct.
    """
    if name not in ROUTERS:
        raise ConfigError(f"routing.policy: unknown policy {name!r}{nearest(name, ROUTERS)}")
    return ROUTERS[name](replica_ids, rng, memory, cost)
