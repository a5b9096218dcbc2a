"""verl's router plug-in: makespan's routing policy inside a Ray actor that all agent-loop workers ask.

verl calls `acquire_server` before each turn and `release_server` after it. The actor answers at once with what the
policy decides; it never waits, so that no call can hold back another. What the policy needs to know of a turn travels
in `sampling_params["extra_args"]["makespan"]` (a few strings and integers): the prompt does not. What became of a turn
is told by makespan's agent loop with `turn_over`, just after verl's release, which then counts for nothing.

**New weights.** verl tells its router nothing of weight syncs. That a replica lost its caches shows in three ways: a
turn comes back with a newer version of the weights than its replica had; verl's client asks again for a turn that is
not over, which means that the replica aborted it, and with that verl clears the caches; the trainer calls
`clear_sticky_cache`. A turn during which the weights changed was perhaps parked at its replica for the whole sync, so
its time is not counted.

Ray runs 1,000 calls of an asynchronous actor at a time and queues the others, in order. A router whose `acquire` waits
would then be deadlocked by its 1,001st caller, because the releases that would wake it queue behind. So acquires have a
limit far above any batch, and releases have a concurrency group (their own thread) that acquires cannot fill.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import ray

from makespan.integrations.verl.settings import RouterSettings, parse
from makespan.integrations.verl.tickets import Ticket, TicketLedger
from makespan.rollout.routing import RouteRequest, Served, make_router

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
    reported: bool = False
    """Whether `turn_over` will be called when the turn is over."""


class TurnEnd(msgspec.Struct, frozen=True):
    """What the router answers when it is told that a turn is over."""

    caches_kept: bool
    """Whether the replica of its trajectory's last turn is still there with the same weights: then what it did not find
    was overwritten by others, or left behind when it moved."""
    replicas: int
    """How many there are now."""


class _Left(NamedTuple):
    """Where a trajectory's last turn left a cache."""

    replica_id: str
    losses: int
    """How often that replica had lost all its caches."""
    weights_version: int | None


class TrajectoryRouter:
    """verl's `RequestLoadBalancer` protocol over a makespan routing policy.

    Args:
        servers: verl's replicas, `{server_id: actor handle}`; may be empty, replicas can be added later.
        config: the content of the router's YAML file.
    """

    def __init__(self, servers: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        settings = parse(RouterSettings, {k: v for k, v in config.items() if k != "router_class"}, "the router's YAML")
        self._servers = dict(servers)
        memory = None if settings.memory is None else settings.memory.memory()
        self._policy = make_router(settings.policy, list(servers), random.Random(settings.seed), memory=memory)
        self._tickets = TicketLedger(ttl_s=settings.ticket_ttl_s, close=self._release)
        self._versions: dict[str, int] = {}  # of each replica's weights, as far as turns have shown them
        self._losses: Counter[str] = Counter()  # of all caches, by replica
        self._left: dict[str, _Left] = {}  # by trajectory
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
        now_s = time.monotonic()
        request = RouteRequest(
            trajectory_id=facts.trajectory or request_id,
            turn=facts.turn,
            context_tokens=facts.context_tokens,
            group=facts.group,
            now_s=now_s,
        )
        with self._lock:
            aborted = self._tickets.find(request_id) if facts.reported else None
            if facts.trajectory:
                self._tickets.supersede(facts.trajectory)
            if aborted is not None:
                self._lost_caches([aborted.replica_id])
            server_id = self._policy.route(request)
            ticket = Ticket(
                request_id=request_id,
                trajectory_id=facts.trajectory,
                replica_id=server_id,
                worker=facts.worker,
                granted_s=now_s,
                reported=facts.reported,
                weights_version=self._versions.get(server_id),
            )
            if not self._tickets.grant(ticket):
                self._policy.finish(facts.trajectory)
            return server_id, self._servers[server_id]

    @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
    async def release_server(self, server_id: str, request_id: str | None = None) -> None:
        with self._lock:
            ticket = self._tickets.find(request_id or "")
            if ticket is None or not ticket.reported:
                self._tickets.release(request_id or "")

    @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
    async def turn_over(
        self, request_id: str, context_tokens: int, cached_tokens: int | None, weights_version: int | None
    ) -> TurnEnd:
        """A turn that was announced as `reported` is over.

        Args:
            context_tokens: its prompt and what was generated.
            cached_tokens: of its prompt; None where the replica does not say.
            weights_version: of the weights that generated its last token.
        """
        with self._lock:
            ticket = self._tickets.find(request_id)
            if ticket is None:
                return TurnEnd(caches_kept=False, replicas=len(self._servers))
            self._has_version(ticket.replica_id, weights_version)
            same_weights = ticket.weights_version in (None, weights_version)
            served = Served(
                context_tokens=context_tokens,
                cached_tokens=cached_tokens,
                seconds=time.monotonic() - ticket.granted_s if same_weights else None,
            )
            self._tickets.release(request_id, served)
            here = _Left(ticket.replica_id, self._losses[ticket.replica_id], weights_version)
            last = self._left.get(ticket.trajectory_id)
            self._left[ticket.trajectory_id] = here
            return TurnEnd(caches_kept=last is not None and self._kept(last, here), replicas=len(self._servers))

    @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
    async def pause_trajectory(self, trajectory_id: str) -> None:
        """The trajectory is parked: until its next turn it is no load."""
        with self._lock:
            self._policy.pause(trajectory_id)

    @ray.method(concurrency_group="release")  # type: ignore[untyped-decorator]
    async def finish_trajectory(self, trajectory_id: str) -> None:
        """The trajectory is over, however it ended. makespan's agent loops call this; verl's do not need to."""
        with self._lock:
            self._tickets.end(trajectory_id)
            self._left.pop(trajectory_id, None)
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
                self._versions.pop(server_id, None)

    async def get_all_servers(self) -> list[str]:
        return list(self._servers)

    async def clear_sticky_cache(self) -> dict[str, Any]:
        """Place every trajectory anew at its next turn, as verl asks for before it changes replicas and weights."""
        with self._lock:
            self._lost_caches(list(self._servers))
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
                "cache_losses": self._losses.total(),
                "tickets": msgspec.structs.asdict(self._tickets.counters()),
            }

    def _kept(self, last: _Left, now: _Left) -> bool:
        """Whether what a turn left is there still, as far as its replica has not lost everything since."""
        return (
            last.replica_id in self._servers
            and last.losses == self._losses[last.replica_id]
            and last.weights_version == now.weights_version
        )

    def _release(self, ticket: Ticket, served: Served | None) -> None:
        self._policy.release(ticket.replica_id, ticket.trajectory_id or ticket.request_id, served)

    def _has_version(self, server_id: str, weights_version: int | None) -> None:
        """A turn was generated there with these weights: if they are newer, its caches went with the old ones."""
        if weights_version is None:
            return
        known = self._versions.get(server_id)
        if known is not None and weights_version > known:
            self._lost_caches([server_id])
        self._versions[server_id] = weights_version if known is None else max(known, weights_version)

    def _lost_caches(self, server_ids: Collection[str]) -> None:
        self._losses.update(server_ids)
        self._policy.lose_caches(server_ids)

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
