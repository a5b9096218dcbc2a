"""verl's router plug-in: makespan's routing policy inside a Ray actor that all agent-loop workers ask.

verl calls `acquire_server` before each turn and `release_server` after it. The actor answers at once with what the
policy decides; it never waits, so that no call can hold back another. What the policy needs to know of a turn travels
in `sampling_params["extra_args"]["makespan"]` (a few strings and integers): the prompt does not.

Ray runs 1,000 calls of an asynchronous actor at a time and queues the others, in order. A router whose `acquire` waits
would then be deadlocked by its 1,001st caller, because the releases that would wake it queue behind. So acquires have a
limit far above any batch, and releases have a concurrency group (their own thread) that acquires cannot fill.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import ray

from makespan.integrations.verl.settings import RouterSettings, parse
from makespan.integrations.verl.tickets import Ticket, TicketLedger
from makespan.rollout.routing import RouteRequest, make_router

SWEEP_INTERVAL_S = 5.0
"""How often, at most, the router looks for dead workers and lost turns; each look asks Ray once for each worker."""

ACQUIRES_AT_ONCE = 100_000
"""Above the largest batch: a limit that is never reached. Ray allocates nothing for it in advance."""

RELEASES_AT_ONCE = 1_000
"""A release takes microseconds; they are only kept apart from the acquires."""


class TurnFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent loop tells the router of a turn, in `sampling_params["extra_args"]["makespan"]`."""

    trajectory: str
    turn: int
    context_tokens: int
    """Length of the turn's prompt."""
    group: str = ""
    worker: str = ""
    """The name of the Ray actor that runs the trajectory."""


class TrajectoryRouter:
    """verl's `RequestLoadBalancer` protocol over a makespan routing policy.

    Args:
        servers: verl's replicas, `{server_id: actor handle}`; may be empty, replicas can be added later.
        config: the content of the router's YAML file.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        settings = parse(RouterSettings, {k: v for k, v in config.items() if k != "router_class"}, "the router's YAML")
        self._servers = dict(servers)
        self._policy = make_router(settings.policy, list(servers), random.Random(settings.seed))
        self._tickets = TicketLedger(ttl_s=settings.ticket_ttl_s, release_replica=self._policy.release)
        self._lock = threading.Lock()  # each concurrency group of a Ray actor runs in a thread of its own
        self._swept_s = time.monotonic()

    def require_acquire_fields(self) -> list[str]:
        return ["sampling_params"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    async def acquire_server(
        self, request_id: str, sampling_params: Mapping[str, Any] | None = None
    ) -> tuple[str, Any]:
        """The replica that serves this turn, as `(server_id, actor handle)`.

        Raises `ReplicaFailure` when there is no replica.
        """
        await self._sweep()
        facts = _facts(request_id, sampling_params)
        request = RouteRequest(
            trajectory_id=facts.trajectory or request_id,
            turn=facts.turn,
            context_tokens=facts.context_tokens,
            group=facts.group,
        )
        with self._lock:
            server_id = self._policy.route(request)
            self._tickets.grant(
                Ticket(
                    request_id=request_id,
                    trajectory_id=facts.trajectory,
                    replica_id=server_id,
                    worker=facts.worker,
                    granted_s=time.monotonic(),
                )
            )
            return server_id, self._servers[server_id]

    @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        with self._lock:
            self._tickets.release(request_id or "")

    @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
    async def finish_trajectory(self, trajectory_id: str) -> None:
        """The trajectory is over, however it ended. makespan's agent loops call this; verl's do not need to."""
        with self._lock:
            self._tickets.end(trajectory_id)
            self._policy.finish(trajectory_id)

    async def add_servers(self, servers: Mapping[str, Any]) -> None:
        with self._lock:
            self._servers.update(servers)
            self._policy.add(servers)

    async def remove_servers(self, server_ids: list[str]) -> None:
        with self._lock:
            self._tickets.lose_replicas(server_ids)
            self._policy.remove(server_ids)
            for server_id in server_ids:
                self._servers.pop(server_id, None)

    async def get_all_servers(self) -> list[str]:
        return list(self._servers)

    async def clear_sticky_cache(self) -> dict[str, Any]:
        """Place every trajectory anew at its next turn, as verl asks for when the set of replicas changed."""
        with self._lock:
            return {"cleared_entries": self._policy.forget(), "server_loads": self._policy.in_flight()}

    async def get_total_inflight(self) -> int:
        await self._sweep()
        with self._lock:
            return sum(self._policy.in_flight().values())

    async def get_status(self) -> dict[str, Any]:
        await self._sweep()
        with self._lock:
            in_flight = self._policy.in_flight()
            return {
                "servers": in_flight,
                "total_inflight": sum(in_flight.values()),
                "active_servers": len(in_flight),
                "tickets": msgspec.structs.asdict(self._tickets.counters()),
            }

    async def _sweep(self) -> None:
        """Close what nobody will release. Only the call that finds a sweep due pays for it."""
        now = time.monotonic()
        with self._lock:
            if now - self._swept_s < SWEEP_INTERVAL_S:
                return
            self._swept_s = now
            self._tickets.expire(now)
            workers = self._tickets.workers()
        dead = await asyncio.to_thread(_dead_actors, workers) if workers else []
        with self._lock:
            self._tickets.lose_workers(dead)


def _facts(request_id: str, sampling_params: Mapping[str, Any] | None) -> TurnFacts:
    """What the caller says of the turn; agent loops that are not makespan's say nothing."""
    told = ((sampling_params or {}).get("extra_args") or {}).get("makespan")
    if told is None:
        return TurnFacts(trajectory="", turn=0, context_tokens=0)
    return msgspec.convert(told, TurnFacts)


def _dead_actors(names: set[str]) -> list[str]:
    """Which of these named actors Ray knows to be gone. Blocks for a round trip each."""
    dead = []
    for name in names:
        try:
            ray.get_actor(name)
        except ValueError:
            dead.append(name)
    return dead


TrajectoryRouterActor = ray.remote(max_concurrency=ACQUIRES_AT_ONCE, concurrency_groups={"release": RELEASES_AT_ONCE})(
    TrajectoryRouter
)
"""What the router's YAML names: verl takes a Ray actor class as it is, and gives a plain one Ray's defaults."""
