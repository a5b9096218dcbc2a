"""Routing by cost: the figures by hand, and the situations in which users of other balancers were let down."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makespan.rollout.cached import Cache, CacheMirror
from makespan.rollout.cost_routing import CostRouter
from makespan.rollout.errors import ReplicaFailure
from makespan.rollout.memory import BlockMemory, LinearMemory
from makespan.rollout.route import RouteRequest, Served
from makespan.rollout.simulation.cost import InferenceCost

COST = InferenceCost(step_s=0.01, sequence_s=0.001, context_s=0.0, prefill_s=0.0005, chunk_tokens=1000)
"""A prefilled token takes 0.5 ms and its share of a 10 ms step in 1,000: 0.51 ms on an idle replica."""


def router(*replicas: str, seed: int = 0, memory: int | None = None) -> CostRouter:
    limit = None if memory is None else LinearMemory(capacity=memory)
    return CostRouter(replicas, rng=random.Random(seed), memory=limit, cost=COST)


def turn(name: str, context: int = 1000, number: int = 0, group: str = "", now_s: float = 0.0) -> RouteRequest:
    return RouteRequest(trajectory_id=name, turn=number, context_tokens=context, group=group, now_s=now_s)


def serve(r: CostRouter, request: RouteRequest, generated: int = 100, cached: int | None = None) -> str:
    """Route a turn and end it at once."""
    replica = r.route(request)
    r.release(replica, request.trajectory_id, Served(context_tokens=request.context_tokens + generated,
                                                     cached_tokens=cached, seconds=1.0))  # fmt: skip
    return replica


def test_ties_at_the_start_spread_and_differ_between_seeds():
    r = router("a", "b", "c", "d")
    placed = Counter(r.route(turn(f"t{number}")) for number in range(16))
    assert placed == {"a": 4, "b": 4, "c": 4, "d": 4}
    assert {router("a", "b", "c", "d", seed=seed).route(turn("t")) for seed in range(50)} == {"a", "b", "c", "d"}


def test_a_trajectory_comes_back_to_its_cache():
    r = router("a", "b", "c")
    home = serve(r, turn("t", 20_000))
    for number in range(1, 5):
        assert serve(r, turn("t", 20_000 + 200 * number, number, now_s=30.0 * number)) == home


def test_it_stays_unless_the_move_saves_two_seconds_and_half():
    """At home 100 of 8,000 tokens are to be computed, elsewhere all: 4.03 s more at 0.51 ms. A queue at home of `queue`
    tokens takes 0.51 ms each (and a little more beside it), so it has to exceed (4.03 + 2) / 0.51 ms = 11,800."""
    for queue, moves in ((8_000, False), (11_000, False), (14_000, True)):
        r = router("a", "b")
        home = serve(r, turn("t", 7_800))
        other = {"a": "b", "b": "a"}[home]
        r.sleep([other])
        assert r.route(turn("long", queue)) == home
        r.wake([other])
        assert (r.route(turn("t", 8_000, 1)) != home) is moves
        assert r.moves == moves


@pytest.mark.parametrize(
    ("elsewhere", "memory", "moves"),
    [(5_500, 10_000, True), (7_000, 10_000, False), (5_500, 20_000, False)],
)
def test_whoever_lost_its_cache_moves_to_where_there_is_room_to_stay(elsewhere, memory, moves):
    """At home t left 3,100 tokens, which others overwrote as only 10,000 fit; they have 8,000 at home there. Its turn
    of 3,200 tokens is computed whole wherever it goes, in 1.6 s. Of 10,000 tokens that others have at home a replica
    counts as 10 s: home as 8 s, and 0.7 s for 1,400 tokens of needed caches that would have to go, the other one as 5.5
    or 7 s. It moves to save 3.2 s, though 10.3 s are not 1.5 times 7.1 s, and does not to save 1.7 s. With memory
    for everything its cache is there still, and it stays."""
    r = router("a", "b", memory=memory)
    r.sleep(["a"])
    assert serve(r, turn("w", elsewhere)) == "b"
    r.wake(["a"])
    r.sleep(["b"])
    for name, context in (("t", 3_000), ("u", 4_000), ("v", 4_000)):
        assert serve(r, turn(name, context)) == "a"
    r.wake(["b"])
    assert (r.route(turn("t", 3_200, 1, now_s=100.0)) == "b") is moves


def test_a_small_gain_is_not_worth_a_move_however_often_it_is_offered():
    """Re-pinning at a small margin of load computes the prompts again each time."""
    r = router("a", "b")
    homes = {f"t{number}": serve(r, turn(f"t{number}", 10_000)) for number in range(8)}
    rng = random.Random(1)
    for number in range(1, 40):
        name = f"t{rng.randrange(8)}"
        assert serve(r, turn(name, 10_000 + 200 * number, number, now_s=float(number))) == homes[name]
    assert r.moves == 0


def test_no_avalanche_on_the_replica_that_fell_idle():
    """Many trajectories ask at the same moment, when one replica has just become free: they share it, and the rest."""
    r = router("a", "b", "c", "d")
    for name in "bcd":
        for number in range(4):
            r.sleep({"a", "b", "c", "d"} - {name})
            r.route(turn(f"{name}{number}", 4000))
            r.wake("abcd")
    placed = Counter(r.route(turn(f"new{number}", 4000)) for number in range(20))
    assert placed["a"] <= 9  # 32 in all on four replicas: 8 on each, and it had none
    assert min(placed.values()) >= 3


def test_long_conversations_are_not_pinned_in_the_tail():
    """The batch is nearly over: three replicas are idle, one serves six long conversations. Some of them leave."""
    r = CostRouter(["a"], rng=random.Random(0), memory=LinearMemory(capacity=840_000))
    for number in range(6):
        serve(r, turn(f"t{number}", 60_000))
    r.add(["b", "c", "d"])
    placed = Counter(r.route(turn(f"t{number}", 90_000, 1)) for number in range(6))
    assert set(placed) > {"a"}
    assert placed["a"] < 6


def test_a_removed_replicas_trajectories_are_placed_anew_and_those_of_others_are_not():
    r = router("a", "b", "c")
    homes = {f"t{number}": serve(r, turn(f"t{number}", 5000)) for number in range(9)}
    r.remove(["a"])
    for name, home in homes.items():
        placed = r.route(turn(name, 5200, 1, now_s=100.0))
        assert placed == home if home != "a" else placed in ("b", "c")
        r.release(placed, name)
    r.add(["a"])
    assert serve(r, turn("t0", 5400, 2, now_s=200.0)) != "a" or homes["t0"] != "a"
    with pytest.raises(ReplicaFailure, match="no replica is left"):
        router().route(turn("t"))


def test_a_replica_that_comes_back_holds_nothing_and_counts_nothing():
    r = router("a", "b")
    r.sleep(["b"])
    for number in range(5):
        r.route(turn(f"t{number}", 5000))
    r.remove(["a"])
    r.add(["a"])
    r.release("a", "t0")
    assert r.in_flight() == {"a": 0, "b": 0}


def test_sleeping_replicas_get_nothing_until_everybody_sleeps():
    r = router("a", "b")
    home = serve(r, turn("t", 5000))
    other = {"a": "b", "b": "a"}[home]
    r.sleep([home])
    assert serve(r, turn("t", 5100, 1)) == other
    r.sleep([other])
    assert serve(r, turn("t", 5200, 2)) in ("a", "b")
    r.wake([home, other])
    assert serve(r, turn("u", 100)) in ("a", "b")


def test_new_weights_make_every_cache_worthless():
    """9,000 queued tokens at home are 4.6 s. With a cache there that is less than computing 8,000 tokens elsewhere
    (4.1 s) saves by two seconds; without it home costs 4.1 s more."""
    for lost in (False, True):
        r = router("a", "b")
        home = serve(r, turn("t", 7_800))
        other = {"a": "b", "b": "a"}[home]
        r.sleep([other])
        r.route(turn("long", 9_000))
        r.wake([other])
        if lost:
            r.lose_caches(["a", "b"])
        assert (r.route(turn("t", 8_000, 1)) == other) is lost


def test_a_siblings_prompt_counts_as_cached_until_first_turns_show_that_it_is_not():
    r = router("a", "b")
    home = serve(r, turn("s0", 6000, group="g"))
    other = {"a": "b", "b": "a"}[home]
    r.route(turn("load", 500))  # somewhere
    assert serve(r, turn("s1", 6000, group="g"), cached=6000) == home
    stranger = router("a", "b")
    stranger._shared = 0.0
    first = serve(stranger, turn("s0", 6000, group="g"))
    stranger.sleep([{"a": "b", "b": "a"}[first]])
    stranger.route(turn("load", 500))
    stranger.wake(["a", "b"])
    assert serve(stranger, turn("s1", 6000, group="g")) != first
    for number in range(60):
        serve(r, turn(f"x{number}", 6000, group="g", now_s=100.0 + number), cached=0)
    assert r._shared < 0.05
    assert other in ("a", "b")


def test_a_turn_goes_where_it_overwrites_nobodys_cache():
    """Two replicas of 10,000 tokens: one is full of caches that will be needed, the other of what a finished trajectory
    left behind."""
    r = router("a", "b", memory=10_000)
    full = serve(r, turn("needed", 9000))
    r.sleep([full])
    done = serve(r, turn("done", 9000))
    r.wake([full])
    r.finish("done")
    assert done != full
    assert r.route(turn("new", 3000)) == done


def test_contexts_beyond_the_memory_wait():
    r = router("a", "b", memory=10_000)
    busy = r.route(turn("t0", 8000))
    assert r.route(turn("t1", 3000)) != busy
    assert r.route(turn("t2", 3000)) != busy


def test_a_turn_that_nobody_ends_is_ended_by_the_next_one_or_by_the_end():
    r = router("a")
    r.route(turn("t", 1000))
    r.route(turn("t", 1200, 1))
    assert r.in_flight() == {"a": 1}
    r.finish("t")
    assert r.in_flight() == {"a": 0}
    r.route(turn("u"))
    r.release("a")  # nobody says whose
    assert r.in_flight() == {"a": 0}
    r.release("a")
    r.release("unknown", "u")
    assert r.in_flight() == {"a": 0}


def test_rates_follow_what_completions_take():
    """A replica four times as slow as the constants say: after many completions its estimates are."""
    r = router("a", "b")
    for number in range(400):
        name = f"t{number}"
        placed = r.route(turn(name, 1000, now_s=100.0 * number))
        served = Served(
            context_tokens=1201, cached_tokens=0, seconds=1.0, prefill_s=4 * 0.511, decode_s=4 * 200 * 0.011
        )
        r.release(placed, name, served)
        r.finish(name)
    assert r._prefill_factor == pytest.approx(4.0, rel=0.03)
    assert r._decode_factor == pytest.approx(4.0, rel=0.03)


def test_a_turn_that_waited_for_something_else_teaches_no_time_and_leaves_its_cache():
    waited, usual = router("a"), router("a")
    for r, seconds in ((waited, None), (usual, 90.0)):
        placed = r.route(turn("t"))
        r.release(placed, "t", Served(context_tokens=1200, cached_tokens=None, seconds=seconds))
    before_s = router("a")._fleet.turn_s
    assert waited._fleet.turn_s == before_s < usual._fleet.turn_s
    assert waited._fleet.mirrors[0].get("t").tokens == 1200


@given(st.integers(0, 10_000), st.integers(20, 150))
def test_counts_are_those_of_the_turns_in_flight_whatever_happens(seed, steps):
    rng = random.Random(seed)
    names = ["a", "b", "c", "d"]
    r = CostRouter(names, rng=random.Random(seed), memory=LinearMemory(capacity=20_000, sequence=50), cost=COST)
    flying: dict[str, str] = {}
    alive = set(names)
    for step in range(steps):
        kind, name = rng.random(), f"t{rng.randrange(12)}"
        if kind < 0.5:
            placed = r.route(turn(name, rng.randrange(10, 9000), rng.randrange(3), f"g{name[-1]}", float(step)))
            assert placed in alive
            flying[name] = placed
        elif kind < 0.8:
            if name in flying:
                r.release(flying.pop(name), name, Served(context_tokens=rng.randrange(10, 9000), cached_tokens=5,
                                                         seconds=1.0))  # fmt: skip
        elif kind < 0.86:
            r.finish(name)
            flying.pop(name, None)
        elif kind < 0.9 and len(alive) > 1:
            gone = rng.choice(sorted(alive))
            alive.remove(gone)
            r.remove([gone])
            flying = {name: replica for name, replica in flying.items() if replica != gone}
        elif kind < 0.94:
            back = rng.choice(names)
            alive.add(back)
            r.add([back])
        else:
            {0: lambda n: r.pause(n), 1: lambda n: r.forget(), 2: lambda n: r.lose_caches(names),
             3: lambda n: r.sleep(["a"]), 4: lambda n: r.wake(["a"])}[rng.randrange(5)](name)  # fmt: skip
        assert r.in_flight() == {name: sum(f == name for f in flying.values()) for name in alive}
    for name in list(r._trajectories):
        r.finish(name)
    assert r._siblings == {}
    assert all(abs(value) < 1e-9 for value in r._fleet.crowd_s)
    assert all(mirror.running == 0 and mirror.needed == 0 for mirror in r._fleet.mirrors)


def test_a_mirror_overwrites_the_least_recently_used_and_keeps_its_sums():
    mirror = CacheMirror(LinearMemory(capacity=1000, sequence=10))
    for name in ("old", "new"):
        mirror.start(name, 100)
        assert mirror.end(name, 100, 300) == []
    assert mirror.needed == 620
    mirror.finish("old")
    assert mirror.needed == 310
    assert mirror.start("big", 500) == ["old"]  # 620 and 510 do not fit into 1,000
    assert (mirror.running, mirror.needed) == (510, 310)
    assert mirror.end("big", 500, 700) == ["new"]
    assert (mirror.running, mirror.needed) == (0, 710)
    assert mirror.clear() == ["big"]
    assert mirror.needed == 0


def test_the_mirror_holds_what_vllm_keeps_between_turns():
    """A hybrid's prompt of 700 tokens takes 2 + 6 blocks while it runs and 1 + 3 while it waits: three that wait and
    one that runs fit into 20, a second one that runs overwrites the oldest two."""
    mirror = CacheMirror(BlockMemory(capacity=20, block_tokens=384, states=6))
    for name in "abc":
        mirror.start(name, 700)
        assert mirror.end(name, 700, 760) == []
    assert mirror.needed == 12
    assert mirror.get("a") == Cache(tokens=384, held=4)
    assert mirror.start("d", 700) == []
    assert mirror.start("e", 700) == ["a", "b"]
