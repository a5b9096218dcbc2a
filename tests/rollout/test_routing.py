"""The baseline router decides as verl's own load balancer does; the oracle is verl's class itself."""

from __future__ import annotations

import random

import pytest

from makespan.rollout.errors import ConfigError, ReplicaFailure
from makespan.rollout.routing import RouteRequest, StickyLeastInflight, make_router


def turn(trajectory_id: str, number: int = 0) -> RouteRequest:
    return RouteRequest(trajectory_id=trajectory_id, turn=number, context_tokens=100)


def router(*replicas: str, seed: int = 0) -> StickyLeastInflight:
    return StickyLeastInflight(replicas, rng=random.Random(seed))


def test_a_trajectory_stays_where_its_first_turn_went():
    r = router("a", "b")
    home = r.route(turn("t"))
    other = {"a": "b", "b": "a"}[home]
    for index in range(5):  # its home gets crowded, and it stays
        assert r.route(turn("t", index + 1)) == home
    assert r.route(turn("u")) == other


def test_new_trajectories_go_to_the_least_loaded_replica():
    r = router("a", "b", "c")
    homes = [r.route(turn(f"t{i}")) for i in range(6)]
    assert sorted(homes) == ["a", "a", "b", "b", "c", "c"]
    r.release(homes[0])
    assert r.route(turn("next")) == homes[0]


def test_ties_at_the_start_spread_over_all_replicas():
    firsts = {router("a", "b", "c", "d", seed=seed).route(turn("t")) for seed in range(50)}
    assert firsts == {"a", "b", "c", "d"}


def test_homes_that_are_given_are_kept_and_the_others_are_chosen():
    homes = {"t0": "a", "t1": "a", "t2": "a"}
    r = StickyLeastInflight(["a", "b"], rng=random.Random(0), homes=homes)
    assert [r.route(turn(name)) for name in homes] == ["a", "a", "a"]
    assert r.route(turn("t3")) == "b"
    r.remove(["a"])
    assert r.route(turn("t0", 1)) == "b"
    assert homes["t0"] == "a"  # the caller's is not written to


def test_a_removed_replicas_trajectories_are_placed_anew():
    r = router("a", "b")
    home = r.route(turn("t"))
    r.remove([home])
    assert r.route(turn("t", 1)) != home
    with pytest.raises(ReplicaFailure, match="no replica is left"):
        router().route(turn("t"))


def test_a_finished_trajectory_is_forgotten_and_memory_is_bounded():
    r = StickyLeastInflight(["a", "b"], rng=random.Random(0), memory=2)
    first = r.route(turn("t0"))
    r.route(turn("t1"))
    r.route(turn("t2"))  # t0 is pushed out
    for _ in range(5):
        r.route(turn("t1"))
    loads = r.in_flight()
    least = min(loads, key=lambda name: loads[name])
    assert loads["a"] != loads["b"]
    assert r.route(turn("t0", 1)) == least
    assert first in ("a", "b")


def test_release_never_counts_below_zero():
    r = router("a")
    r.release("a")
    r.release("unknown")
    assert r.in_flight() == {"a": 0}


@pytest.mark.parametrize("seed", range(5))
def test_decision_for_decision_as_verls_load_balancer(seed, monkeypatch):
    verl_router = pytest.importorskip("verl.workers.rollout.router")
    oracle_rng = random.Random(seed)
    monkeypatch.setattr(verl_router.random, "choice", oracle_rng.choice)
    names = [f"replica-{i}" for i in range(5)]
    oracle = verl_router.GlobalRequestLoadBalancer(dict.fromkeys(names), max_cache_size=40)
    ours = StickyLeastInflight(names, rng=random.Random(seed), memory=40)
    moves, in_flight = random.Random(100 + seed), []
    for _ in range(3000):
        kind = moves.random()
        if kind < 0.6 or not in_flight:
            trajectory = f"t{moves.randrange(80)}"
            expected, _ = oracle.acquire_server(trajectory)
            assert ours.route(turn(trajectory)) == expected
            in_flight.append(expected)
        elif kind < 0.98:
            replica = in_flight.pop(moves.randrange(len(in_flight)))
            oracle.release_server(replica)
            ours.release(replica)
        elif kind < 0.99 and len(ours.in_flight()) > 2:
            gone = moves.choice(sorted(ours.in_flight()))
            oracle.remove_servers([gone])
            ours.remove([gone])
        else:
            back = moves.choice(names)
            if back not in ours.in_flight():
                oracle.add_servers({back: None})
                ours.add([back])


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'sticky-least-inflight'"):
        make_router("sticky-least-inflght", ["a"], random.Random(0))
