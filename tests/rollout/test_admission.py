"""Admission: a limit that is kept, an order that is fair, and tickets that always come back."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makespan.rollout.admission import Admission, FixedConcurrency, make_admission
from makespan.rollout.errors import ConfigError


def test_trajectories_start_in_the_order_of_arrival_up_to_the_limit():
    policy = FixedConcurrency(2)
    for name in "abcd":
        policy.submit(name)
    assert policy.start() == ["a", "b"]
    assert policy.start() == []
    policy.finish("b")
    assert policy.start() == ["c"]
    policy.finish("a")
    policy.finish("c")
    assert policy.start() == ["d"]


def test_one_that_leaves_the_queue_gives_no_place_away():
    policy = FixedConcurrency(1)
    for name in "abc":
        policy.submit(name)
    assert policy.start() == ["a"]
    policy.finish("b")
    assert policy.start() == []
    policy.finish("a")
    assert policy.start() == ["c"]


def test_who_runs_already_counts_even_beyond_the_limit():
    policy = FixedConcurrency(2)
    for name in "abc":
        policy.submit(name)
    for name in "bxy":  # `b` was waiting here
        policy.adopt(name)
        policy.adopt(name)
    assert (policy.statistics().admitted, policy.statistics().waiting) == (3, 2)
    policy.finish("x")
    assert policy.start() == []
    policy.finish("b")
    assert policy.start() == ["a"]


@given(st.integers(1, 5), st.lists(st.sampled_from(["submit", "finish"]), max_size=60), st.randoms())
def test_never_above_the_limit_and_never_idle_below_it(limit, steps, rng):
    policy = FixedConcurrency(limit)
    running: set[str] = set()
    waiting: list[str] = []
    for number, step in enumerate(steps):
        if step == "submit":
            policy.submit(str(number))
            waiting.append(str(number))
        elif running or waiting:
            leaver = rng.choice(sorted(running) + waiting)
            policy.finish(leaver)
            running.discard(leaver)
            waiting = [name for name in waiting if name != leaver]
        started = policy.start()
        assert started == waiting[: len(started)]
        waiting = waiting[len(started) :]
        running |= set(started)
        assert len(running) <= limit
        assert not waiting or len(running) == limit


def test_a_cancelled_wait_leaves_and_a_ticket_granted_at_the_same_moment_moves_on():
    async def go():
        admission = Admission(FixedConcurrency(1))
        started: list[str] = []

        async def hold(name: str, release: asyncio.Event) -> None:
            async with admission.admit(name):
                started.append(name)
                await release.wait()

        first, never = asyncio.Event(), asyncio.Event()
        a = asyncio.create_task(hold("a", first))
        b = asyncio.create_task(hold("b", never))
        c = asyncio.create_task(hold("c", never))
        await asyncio.sleep(0)
        first.set()
        await a  # a's ticket was granted to b, which is cancelled before it runs
        b.cancel()
        await asyncio.gather(b, return_exceptions=True)
        await asyncio.sleep(0)
        assert "c" in started
        c.cancel()
        await asyncio.gather(c, return_exceptions=True)
        return admission.statistics()

    statistics = asyncio.run(go())
    assert (statistics.admitted, statistics.waiting) == (0, 0)


@pytest.mark.parametrize("concurrency", [0, -3])
def test_no_room_at_all_is_refused(concurrency):
    with pytest.raises(ConfigError, match=f"at least 1.*{concurrency}"):
        FixedConcurrency(concurrency)


def test_an_unknown_policy_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'fixed'"):
        make_admission("fixd", 4)
