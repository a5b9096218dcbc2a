"""The router: verl's decisions, and no turn that stays counted when its caller is gone."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer, get_router_handle

from makespan.integrations.verl import router as router_module
from makespan.integrations.verl import router_config
from makespan.integrations.verl.router import SWEEP_INTERVAL_S, TrajectoryRouter, TrajectoryRouterActor
from makespan.rollout.errors import ConfigError
from makespan.rollout.route import RouteRequest, Served
from tests.integrations.verl.local_ray import local_ray

CALLS = 2_000


def _facts(trajectory: str, turn: int, worker: str = "", **more: Any) -> dict[str, Any]:
    facts = {"trajectory": trajectory, "turn": turn, "context_tokens": 10, "group": "g", "worker": worker, **more}
    return {"extra_args": {"makespan": facts}, "temperature": 1.0}


# --- decisions, without Ray -----------------------------------------------------------------------------------------


def test_decisions_are_those_of_verls_own_balancer_under_the_same_random_numbers() -> None:
    servers = {f"s{n}": f"handle{n}" for n in range(5)}
    ours = TrajectoryRouter(servers, {"policy": "sticky-least-inflight", "seed": 11})
    theirs = GlobalRequestLoadBalancer(servers)
    random.seed(11)
    choices = random.Random(5)
    in_flight: list[tuple[str, str]] = []

    async def play() -> None:
        for number in range(600):
            if in_flight and choices.random() < 0.45:
                server, request = in_flight.pop(choices.randrange(len(in_flight)))
                await ours.release_server(server, request)
                theirs.release_server(server)
            else:
                trajectory = f"t{choices.randrange(200)}"
                if any(request.startswith(f"{trajectory}|") for _, request in in_flight):
                    continue  # a trajectory has one turn in flight
                request = f"{trajectory}|{number}"
                answer = await ours.acquire_server(request, _facts(trajectory, number))
                assert answer == theirs.acquire_server(trajectory)
                in_flight.append((answer[0], request))
            assert (await ours.get_status())["servers"] == theirs.get_status()["servers"]

    asyncio.run(play())


def test_a_loop_that_says_nothing_of_its_turns_is_routed_by_its_request_id() -> None:
    router = TrajectoryRouter({"a": 1, "b": 2}, {})

    async def play() -> None:
        first, _ = await router.acquire_server("one", {"temperature": 1.0})
        other, _ = await router.acquire_server("two")
        assert {first, other} == {"a", "b"}
        await router.release_server(first, "one")
        await router.release_server(other, "two")
        assert (await router.acquire_server("one", None))[0] == first

    asyncio.run(play())


def test_replicas_come_and_go() -> None:
    router = TrajectoryRouter({"a": 1}, {})

    async def play() -> None:
        await router.acquire_server("t|0", _facts("t", 0))
        await router.add_servers({"b": 2})
        assert (await router.acquire_server("t|1", _facts("t", 1)))[0] == "a"
        assert (await router.clear_sticky_cache())["cleared_entries"] == 1
        assert (await router.acquire_server("t|2", _facts("t", 2)))[0] in ("a", "b")
        await router.remove_servers(["a"])
        assert await router.get_all_servers() == ["b"]
        assert (await router.acquire_server("t|3", _facts("t", 3)))[0] == "b"
        assert await router.get_total_inflight() == 1

    asyncio.run(play())


def test_a_wrong_key_in_the_routers_yaml_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown key 'polcy'"):
        TrajectoryRouter({}, {"router_class": "x", "polcy": "sticky-least-inflight"})


# --- what the policy is told, without Ray -----------------------------------------------------------------------------


class Notebook:
    """A policy that puts every turn on `a` and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def route(self, request: RouteRequest) -> str:
        self.told.append(("route", request.trajectory_id))
        return "a"

    def release(self, replica_id: str, trajectory_id: str = "", served: Served | None = None) -> None:
        self.told.append(("release", replica_id, trajectory_id, served))

    def lose_caches(self, replica_ids: Iterable[str]) -> None:
        self.told.append(("lose_caches", *replica_ids))

    def remove(self, replica_ids: Iterable[str]) -> None:
        self.told.append(("remove", *replica_ids))

    def forget(self) -> int:
        return 0

    def in_flight(self) -> dict[str, int]:
        return {}

    def pause(self, trajectory_id: str) -> None:
        self.told.append(("pause", trajectory_id))

    def finish(self, trajectory_id: str) -> None:
        self.told.append(("finish", trajectory_id))


def _noted(monkeypatch: pytest.MonkeyPatch) -> tuple[TrajectoryRouter, list[tuple[Any, ...]], list[float]]:
    """A router over `a` and `b`, what its policy is told, and its clock."""
    clock = [100.0]
    monkeypatch.setattr(router_module.time, "monotonic", lambda: clock[0])
    router, notebook = TrajectoryRouter({"a": 1, "b": 2}, {}), Notebook()
    router._policy = notebook  # type: ignore[assignment]
    return router, notebook.told, clock


def test_a_reported_turn_ends_with_its_report_and_not_with_verls_release(monkeypatch: pytest.MonkeyPatch) -> None:
    router, told, clock = _noted(monkeypatch)

    async def play() -> None:
        await router.acquire_server("t|0", _facts("t", 0, reported=True))
        clock[0] = 103.5
        await router.release_server("a", "t|0")
        assert (await router.get_status())["tickets"]["open"] == 1
        await router.turn_over("t|0", 150, 90, 4)
        assert (await router.get_status())["tickets"]["open"] == 0
        await router.turn_over("t|0", 150, 90, 4)  # told twice: nothing happens

    asyncio.run(play())
    served = Served(context_tokens=150, cached_tokens=90, seconds=3.5)
    assert told == [("route", "t"), ("release", "a", "t", served)]


def test_a_turn_that_nobody_reports_is_released_by_verl_under_its_trajectorys_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, told, _ = _noted(monkeypatch)

    async def play() -> None:
        await router.acquire_server("t|0", _facts("t", 0))
        await router.release_server("a", "t|0")
        await router.acquire_server("somebody", None)
        await router.release_server("a", "somebody")

    asyncio.run(play())
    assert told[1] == ("release", "a", "t", None)
    assert told[3] == ("release", "a", "somebody", None)


def test_a_reported_turn_whose_report_never_comes_ends_with_its_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    router, told, _ = _noted(monkeypatch)

    async def play() -> None:
        await router.acquire_server("t|0", _facts("t", 0, reported=True))
        await router.release_server("a", "t|0")
        await router.finish_trajectory("t")

    asyncio.run(play())
    assert told[1:] == [("release", "a", "t", None), ("finish", "t")]


def test_newer_weights_in_a_turn_say_that_its_replica_lost_its_caches_and_its_time_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, told, clock = _noted(monkeypatch)

    async def play() -> None:
        for turn, version in ((0, 4), (1, 4), (2, 5), (3, 5)):
            await router.acquire_server(f"t|{turn}", _facts("t", turn, reported=True))
            clock[0] += 60.0 if version == 5 and turn == 2 else 1.0
            await router.turn_over(f"t|{turn}", 100, 50, version)

    asyncio.run(play())
    seconds = [entry[3].seconds for entry in told if entry[0] == "release"]
    assert seconds == [1.0, 1.0, None, 1.0]  # the third was perhaps parked for the whole sync
    losses = [number for number, entry in enumerate(told) if entry[0] == "lose_caches"]
    assert [told[number] for number in losses] == [("lose_caches", "a")]
    assert told[losses[0] + 1][0] == "release"  # before that turn leaves a cache of the new weights


def test_a_turn_that_verls_client_repeats_was_aborted_and_its_replica_lost_its_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router, told, _ = _noted(monkeypatch)

    async def play() -> None:
        await router.acquire_server("t|3", _facts("t", 3, reported=True))
        await router.release_server("a", "t|3")
        await router.acquire_server("t|3", _facts("t", 3, reported=True))
        assert (await router.get_status())["tickets"]["open"] == 1

    asyncio.run(play())
    assert told == [("route", "t"), ("release", "a", "t", None), ("lose_caches", "a"), ("route", "t")]


def test_caches_are_kept_until_new_weights_or_their_replica_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    router, _, _ = _noted(monkeypatch)
    kept = []

    async def take(turn: int, version: int) -> None:
        await router.acquire_server(f"t|{turn}", _facts("t", turn, reported=True))
        kept.append((await router.turn_over(f"t|{turn}", 100, 50, version)).caches_kept)

    async def play() -> None:
        await take(0, 4)
        await take(1, 4)
        await take(2, 5)  # new weights
        await take(3, 5)
        router._policy.route = lambda request: "b"  # type: ignore[method-assign]
        await take(4, 5)  # moved
        await take(5, 5)
        await router.clear_sticky_cache()
        await take(6, 5)
        router._policy.route = lambda request: "a"  # type: ignore[method-assign]
        await take(7, 6)  # moved, and new weights, of which nothing on b has told yet
        await take(8, 6)
        await router.remove_servers(["a"])
        router._policy.route = lambda request: "b"  # type: ignore[method-assign]
        await take(9, 6)

    asyncio.run(play())
    assert kept == [False, True, False, True, True, True, False, False, True, False]


def test_whoever_reports_a_turn_hears_how_many_replicas_there_are() -> None:
    router = TrajectoryRouter({"a": 1, "b": 2}, {})
    counts = []

    async def take(turn: int) -> None:
        await router.acquire_server(f"t|{turn}", _facts("t", turn, reported=True))
        counts.append((await router.turn_over(f"t|{turn}", 100, 50, 4)).replicas)

    async def play() -> None:
        await take(0)
        await router.remove_servers(["a"])
        await take(1)
        await router.add_servers({"c": 3, "d": 4})
        await take(2)
        counts.append((await router.turn_over("t|2", 100, 50, 4)).replicas)  # told twice

    asyncio.run(play())
    assert counts == [2, 1, 3, 3]


def test_a_clearing_of_sticky_placements_goes_with_all_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    router, told, _ = _noted(monkeypatch)
    asyncio.run(router.clear_sticky_cache())
    assert told == [("lose_caches", "a", "b")]


def test_a_grant_that_comes_after_its_trajectorys_end_is_forgotten_again(monkeypatch: pytest.MonkeyPatch) -> None:
    router, told, _ = _noted(monkeypatch)

    async def play() -> None:
        await router.finish_trajectory("t")
        await router.acquire_server("t|0", _facts("t", 0))

    asyncio.run(play())
    assert told[1:] == [("route", "t"), ("release", "a", "t", None), ("finish", "t")]


def test_a_next_turn_at_the_same_replica_counts_once_though_the_last_one_was_never_released() -> None:
    router = TrajectoryRouter({"a": 1}, {"policy": "cost"})

    async def play() -> None:
        await router.acquire_server("t|0", _facts("t", 0))
        await router.acquire_server("t|1", _facts("t", 1))
        assert (await router.get_status())["servers"] == {"a": 1}
        await router.release_server("a", "t|0")  # late
        assert (await router.get_status())["servers"] == {"a": 1}
        await router.release_server("a", "t|1")
        assert (await router.get_status())["servers"] == {"a": 0}

    asyncio.run(play())


def _second_goes_to(config: dict[str, Any]) -> str:
    """Where a new trajectory goes when another one's context is at home on `a`, though nothing is in flight there."""
    router = TrajectoryRouter({"a": 1}, config)

    async def play() -> str:
        facts = {"trajectory": "old", "turn": 0, "context_tokens": 900, "group": "x", "worker": ""}
        await router.acquire_server("old|0", {"extra_args": {"makespan": facts}})
        await router.release_server("a", "old|0")
        await router.add_servers({"b": 2})
        return (await router.acquire_server("new|0", _facts("new", 0)))[0]

    return asyncio.run(play())


def test_with_the_replicas_memory_new_trajectories_avoid_those_that_are_full() -> None:
    memory = {"num_blocks": 11, "block_tokens": 100}
    assert {_second_goes_to({"memory": memory, "seed": seed}) for seed in range(8)} == {"b"}
    assert {_second_goes_to({"seed": seed}) for seed in range(8)} == {"a", "b"}  # the control: nobody knows


# --- as a Ray actor, behind verl's own client -----------------------------------------------------------------------


@ray.remote(num_cpus=0, max_concurrency=5_000)
class HeldReplica:
    """Answers at once, or holds its answers until it is told to give them; verl's signature."""

    def __init__(self) -> None:
        self._free = asyncio.Event()

    async def hold(self, held: bool) -> None:
        if held:
            self._free.clear()
        else:
            self._free.set()

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: Any, image_data: Any, video_data: Any
    ) -> TokenOutput:
        await self._free.wait()
        return TokenOutput(token_ids=[1], log_probs=[0.0], stop_reason="completed", extra_fields={"global_steps": 0})


@ray.remote(num_cpus=0)
class Worker:
    """An agent-loop worker in miniature: turns through verl's client."""

    async def turns(self, router: Any, count: int) -> None:
        client = _client(router)
        await asyncio.gather(*(_turn(client, f"t{n}", 0) for n in range(count)))

    async def cancelled_turns(self, router: Any, count: int, tell_router: bool = True) -> None:
        """Each is cancelled while `acquire_server` is under way, and then its trajectory ends."""
        client = _client(router)
        await _turn(client, "first", 0)  # the client asks only once what the router wants to know
        for n in range(count):
            task = asyncio.create_task(_turn(client, f"c{n}", 0))
            await asyncio.sleep(0)  # now it awaits the answer of `acquire_server`
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if tell_router:
                router.finish_trajectory.remote(f"c{n}")


def _client(router: Any) -> LLMServerClient:
    return LLMServerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}}), router)


def _turn(client: LLMServerClient, trajectory: str, turn: int) -> Any:
    worker = ray.get_runtime_context().get_actor_name() or ""
    return client.generate(
        request_id=f"{trajectory}|{turn}", prompt_ids=[1, 2], sampling_params=_facts(trajectory, turn, worker)
    )


@dataclass
class Cluster:
    """What the tests share, because each of these processes imports verl."""

    replica: Any
    worker: Any
    doomed: Any

    def router(self, *, held: bool, **config: Any) -> Any:
        """A router over four replicas (one process answers for all of them), as verl makes it from a YAML file."""
        ray.get(self.replica.hold.remote(held))
        return get_router_handle(
            servers={f"s{n}": self.replica for n in range(4)}, **{"router_config_path": str(router_config()), **config}
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with local_ray("router", cpus=8):
        made = Cluster(HeldReplica.remote(), Worker.remote(), Worker.options(name="doomed").remote())
        ray.get([actor.__ray_ready__.remote() for actor in (made.replica, made.worker, made.doomed)], timeout=180)
        yield made


def _in_flight_settles_at(router: Any, expected: int, within_s: float = 60.0) -> dict[str, Any]:
    deadline = time.monotonic() + within_s
    while True:
        status: dict[str, Any] = ray.get(router.get_status.remote(), timeout=60)
        if status["total_inflight"] == expected or time.monotonic() > deadline:
            assert status["total_inflight"] == expected, status
            return status
        time.sleep(0.1)


def test_two_thousand_concurrent_turns_leave_nothing_in_flight(cluster: Cluster) -> None:
    router = cluster.router(held=True)
    running = cluster.worker.turns.remote(router, CALLS)
    status = _in_flight_settles_at(router, CALLS)
    assert set(status["servers"].values()) == {CALLS // 4}
    ray.get(cluster.replica.hold.remote(False))
    ray.get(running, timeout=120)
    status = _in_flight_settles_at(router, 0)
    assert status["tickets"]["released"] == CALLS


def test_callers_cancelled_in_mid_call_leave_nothing_in_flight(cluster: Cluster) -> None:
    router = cluster.router(held=False)
    ray.get(cluster.worker.cancelled_turns.remote(router, 200), timeout=120)
    deadline = time.monotonic() + 60.0
    while True:
        status = ray.get(router.get_status.remote(), timeout=60)
        closed = status["tickets"]["superseded"] - status["tickets"]["late_releases"]
        if closed == 200 or time.monotonic() > deadline:
            break
        time.sleep(0.1)  # the calls outlive their callers and are still being answered
    # They were granted after their caller was gone, and verl released none of them. (A release that is overtaken by
    # its trajectory's end counts as superseded, too, and then as late.)
    assert closed == 200
    assert status["total_inflight"] == 0


def test_verls_own_balancer_keeps_counting_callers_that_were_cancelled(cluster: Cluster) -> None:
    """The control of the test above: it would pass for a router without tickets if this leaked nothing."""
    balancer = cluster.router(held=False, router_config_path=None)
    ray.get(cluster.worker.cancelled_turns.remote(balancer, 200, tell_router=False), timeout=120)
    _in_flight_settles_at(balancer, 200)
    time.sleep(2.0)
    _in_flight_settles_at(balancer, 200, within_s=0.0)


def test_the_turns_of_a_killed_worker_are_given_back(cluster: Cluster) -> None:
    router = cluster.router(held=True)
    cluster.doomed.turns.remote(router, 50)
    _in_flight_settles_at(router, 50)
    ray.kill(cluster.doomed)
    status = _in_flight_settles_at(router, 0, within_s=6 * SWEEP_INTERVAL_S)
    assert status["tickets"]["worker_lost"] == 50


class _HoldsBack:
    """A router that waits for admission: grants only after a release came. Not ours, but what ours is made to allow."""

    def __init__(self, servers: Any, config: Any) -> None:
        self._released = threading.Event()  # set in another thread: that of the releases' group

    async def acquire_server(self, request_id: str) -> str:
        while not self._released.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return request_id

    async def release_server(self, server_id: str) -> None:
        self._released.set()


class _HoldsBackInGroups(_HoldsBack):
    @ray.method(concurrency_group="release")
    async def release_server(self, server_id: str) -> None:
        self._released.set()


@pytest.mark.usefixtures("cluster")
def test_a_release_gets_through_while_two_thousand_acquires_wait() -> None:
    router = ray.remote(**TrajectoryRouterActor._default_options)(_HoldsBackInGroups).remote({}, {})
    waiting = [router.acquire_server.remote(str(n)) for n in range(CALLS)]
    ray.get(router.release_server.remote("s0"), timeout=30)
    assert len(ray.get(waiting, timeout=60)) == CALLS


@pytest.mark.usefixtures("cluster")
def test_with_rays_defaults_that_release_would_never_get_through() -> None:
    router = ray.remote(_HoldsBack).remote({}, {})
    waiting = [router.acquire_server.remote(str(n)) for n in range(CALLS)]
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(router.release_server.remote("s0"), timeout=5)
    ray.kill(router)
    del waiting
