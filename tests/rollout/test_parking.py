"""Parking: who is paused, who goes on, and that nobody is forgotten."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makespan.rollout import parking as parking_module
from makespan.rollout.admission import Admission, make_admission
from makespan.rollout.admission_policy import ReturningTurn
from makespan.rollout.errors import ConfigError
from makespan.rollout.memory import BlockMemory, LinearMemory
from makespan.rollout.order import ArrivalOrder
from makespan.rollout.parking import CacheCorrection, Parking


class Evenly(ArrivalOrder):
    """First come, first served, and says whether all should advance evenly."""

    def __init__(self, says: bool = True) -> None:
        super().__init__()
        self.says = says

    def evenly(self) -> bool:
        return self.says


def parking(capacity: int = 1000, replicas: int = 1, concurrency: int | None = None, **more) -> Parking:
    memory = LinearMemory(capacity=capacity)
    return Parking(concurrency, memory=memory, replicas=replicas, **more)


def started(policy: Parking, names: str) -> None:
    for name in names:
        policy.submit(name)
    assert policy.start() == list(names)


def test_nobody_is_paused_while_the_contexts_fit():
    policy = parking()
    started(policy, "abc")
    assert all(policy.reach(name, 316) for name in "abc")  # 948 of 950
    assert policy.start() == []
    assert policy.pauses == 0


def test_the_newest_is_paused_and_parked_at_its_next_inference():
    policy = parking()
    started(policy, "abc")
    assert policy.reach("a", 300)
    assert policy.reach("b", 300)
    assert policy.reach("c", 300)
    assert policy.reach("a", 400)  # 1,000 of 950: c is paused, a goes on
    assert policy.statistics().parked == 0  # c does not know yet
    assert not policy.reach("c", 350)
    assert policy.statistics().parked == 1
    assert policy.start() == []


def test_who_runs_already_counts_with_its_context_and_is_parked_like_any_other():
    policy = parking()
    policy.submit("b")
    for name, context in (("a", 600), ("b", 500)):
        policy.adopt(name)
        policy.adopt(name)
        policy.reach(name, context)
    assert (policy.statistics().admitted, policy.statistics().waiting) == (2, 0)
    assert not policy.reach("b", 500)  # 1,100 of 950, and b is the newer one
    policy.submit("c")
    assert policy.start() == []
    policy.finish("a")
    assert policy.start() == ["b", "c"]


def test_it_goes_on_when_there_is_room_to_spare_and_before_anybody_new():
    policy = parking()
    started(policy, "abc")
    for name, context in (("a", 300), ("b", 300), ("c", 300), ("a", 400)):
        assert policy.reach(name, context)
    assert not policy.reach("c", 250)
    policy.submit("new")
    assert policy.start() == []  # 700 and 250 are 950: not under the 900 that leave something to spare
    policy.finish("b")
    assert policy.start() == ["c", "new"]  # 400 and 250


def test_one_that_was_paused_and_fits_again_before_it_asked_never_waits():
    policy = parking()
    started(policy, "abc")
    for name, context in (("a", 300), ("b", 300), ("c", 300), ("a", 400)):
        assert policy.reach(name, context)
    policy.finish("b")
    assert policy.start() == []
    assert policy.reach("c", 350)


def test_the_last_active_one_is_never_paused_however_large():
    policy = parking()
    started(policy, "ab")
    assert policy.reach("a", 5000)
    assert not policy.reach("b", 10)
    assert policy.start() == []
    policy.finish("a")
    assert policy.start() == ["b"]


def test_nobody_new_starts_while_the_memory_is_full_or_the_reference_is_reached():
    policy = parking(concurrency=2)
    policy.submit("a")
    policy.submit("b")
    policy.submit("c")
    assert policy.start() == ["a", "b"]
    assert policy.reach("a", 910)
    policy.finish("b")
    assert policy.start() == []  # below the reference, and 910 of 900 are booked
    assert policy.reach("a", 890)
    assert policy.start() == ["c"]


def test_a_replica_that_leaves_takes_its_memory_along():
    policy = parking(replicas=2)
    started(policy, "abc")
    assert all(policy.reach(name, 500) for name in "abc")
    policy.resize(1)
    assert not policy.reach("c", 500)
    assert not policy.reach("b", 500)
    assert policy.reach("a", 500)
    policy.resize(2)
    assert policy.start() == ["b", "c"]


def test_a_restart_with_a_short_context_gives_the_rest_back():
    policy = parking()
    started(policy, "ab")
    assert policy.reach("a", 600)
    assert not policy.reach("b", 500)
    assert policy.reach("a", 100)
    assert policy.start() == ["b"]


def test_the_memory_is_meant_for_so_many_and_no_more_start():
    policy = parking(reference=2)
    for name in "abc":
        policy.submit(name)
    assert policy.start() == ["a", "b"]
    assert policy.statistics().concurrency == 2
    policy.finish("a")
    assert policy.start() == ["c"]


@pytest.mark.parametrize(("reference", "most"), [(1, 1), (4, 4), (9, 9), (10, 9), (11, 10), (20, 18), (42, 38)])
def test_of_the_reference_nine_tenths_start_as_of_the_memory(reference, most):
    """Rounded up: 0.9, 3.6, 8.1, 9, 9.9, 18 and 37.8."""
    policy = parking(reference=reference)
    for number in range(50):
        policy.submit(f"t{number}")
    assert len(policy.start()) == most
    assert policy.statistics().concurrency == most


def test_the_smaller_of_the_concurrency_and_the_reference_counts():
    for concurrency, most in ((8, 8), (9, 9), (10, 9)):
        assert parking(reference=10, concurrency=concurrency).statistics().concurrency == most


def twenty_rounds(policy: Parking, cached_tokens: int) -> list[str]:
    """Turns of 300 tokens are served, none of the first ones of a trajectory. Returns who starts or goes on."""
    going = []
    for _ in range(20 * 20):
        policy.served(ReturningTurn(prompt_tokens=250, computed_tokens=300, cached_tokens=cached_tokens, preemptions=0))
        going += policy.start()
    return going


def eighteen_of_thirty() -> Parking:
    """The reference is 20, of which 0.9 start."""
    policy = parking(reference=20, correction=CacheCorrection())
    for number in range(30):
        policy.submit(f"t{number}")
    assert policy.start() == [f"t{number}" for number in range(18)]
    return policy


def test_where_caches_are_lost_less_of_the_reference_starts():
    """The limit falls to 0.7 of the memory: 0.65 of 20 are 13. Nobody who runs is sent away for it."""
    policy = eighteen_of_thirty()
    assert twenty_rounds(policy, cached_tokens=0) == []
    assert policy.statistics().concurrency == 13
    assert policy.pauses == 0
    for number in range(5):
        policy.finish(f"t{number}")
        assert policy.start() == []
    policy.finish("t5")
    assert policy.start() == ["t18"]


def test_whom_the_reference_keeps_out_is_no_reason_to_book_more():
    policy = eighteen_of_thirty()
    assert twenty_rounds(policy, cached_tokens=300) == []
    assert policy.statistics().concurrency == 18


def test_whom_the_memory_keeps_out_is_one_where_nothing_is_lost():
    """984 of 950 tokens are booked, so the newest is paused. It goes on with 0.05 to spare, when the limit has grown to
    0.95 · 1.02⁵ = 1.049 of the memory. 0.999 of 20 may start then."""
    policy = eighteen_of_thirty()
    assert all(policy.reach(f"t{number}", 52) for number in range(18))
    assert policy.reach("t0", 100)
    assert not policy.reach("t17", 52)
    assert twenty_rounds(policy, cached_tokens=300) == ["t17", "t18", "t19"]
    assert policy.statistics().concurrency == 20


def after_nine_turns_each(order: ArrivalOrder) -> Parking:
    """Three of four run, each with 300 of 950 tokens; d is parked, which came as far as the first turn."""
    policy = parking(order=order)
    started(policy, "abcd")
    for _ in range(9):
        assert all(policy.reach(name, 300) for name in "abc")
    assert not policy.reach("d", 300)
    assert policy.start() == []
    return policy


def test_where_lengths_are_alike_who_has_come_far_gives_way_to_who_has_not():
    policy = after_nine_turns_each(Evenly())
    assert not policy.reach("a", 300)  # the tenth turn
    assert policy.start() == ["d"]
    assert policy.reach("b", 300)  # a waits, which has come as far
    assert not policy.reach("c", 360)  # now all do not fit, and c is the newest of those who have come far
    for _ in range(9):
        assert policy.reach("d", 300)
    policy.finish("b")
    assert policy.start() == ["a"]  # before c, which started later
    policy.finish("d")
    assert policy.start() == ["c"]


def test_elsewhere_the_oldest_keep_their_place():
    policy = after_nine_turns_each(Evenly(says=False))
    for _ in range(40):
        assert all(policy.reach(name, 300) for name in "abc")
    assert policy.start() == []


def test_where_lengths_are_alike_all_start_but_never_more_than_the_concurrency():
    for concurrency, all_started in ((None, "abcd"), (3, "abc")):
        policy = parking(concurrency=concurrency, reference=2, order=Evenly())
        for name in "abcd":
            policy.submit(name)
        assert policy.start() == list(all_started)


def test_somebody_new_starts_before_those_who_have_come_far_go_on():
    order = Evenly()
    policy = parking(order=order)
    started(policy, "ab")
    for _ in range(10):
        assert policy.reach("a", 450)
        assert policy.reach("b", 450)
    assert not policy.reach("b", 550)
    policy.submit("new")
    assert policy.start() == ["new"]  # 450 of 900 are booked, and b would not fit
    assert policy.reach("new", 400)
    order.says = False
    assert policy.start() == []
    policy.finish("a")
    policy.submit("newer")
    assert policy.start() == []  # b goes first again, and 400 and 550 are too much


def test_nothing_is_kept_of_those_who_have_ended():
    """Two long trajectories, and 5,000 short ones one after the other, each of which is paused and goes on."""
    policy = parking()
    started(policy, "ab")
    assert policy.reach("a", 400)
    for number in range(5_000):
        name = f"t{number}"
        assert policy.reach("b", 10)
        policy.submit(name)
        assert policy.start() == [name]
        assert policy.reach(name, 400)
        assert policy.reach("a", 600)  # 1,010 of 950
        assert not policy.reach(name, 400)
        policy.reach("a", 400)
        assert policy.start() == [name]
        policy.finish(name)
    assert policy.pauses == 5_000
    assert len(policy._last) + len(policy._paused) < 100


@pytest.mark.parametrize("few", [0, parking_module.FEW_ENTRIES])
@given(st.integers(0, 100_000), st.integers(10, 400), st.sampled_from([0.0, 0.02, 1.0]))
def test_against_a_list(few, seed, steps, flips):
    """The oracle keeps lists and looks through all of them each time. `flips`: how often lengths begin or cease to be
    alike; 1: they are from the start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parking_module, "FEW_ENTRIES", few)
        _against_a_list(seed, steps, flips)


def _against_a_list(seed: int, steps: int, flips: float) -> None:
    rng = random.Random(seed)
    order = Evenly(flips == 1.0)
    policy = parking(1000, concurrency=6, reference=5, order=order)  # 0.9 of it are 4.5: 5
    evenly = False  # as the policy was last told
    waiting: list[str] = []
    admitted: list[str] = []  # in the order of admission
    context: dict[str, int] = {}
    turns: dict[str, int] = {}
    paused: set[str] = set()
    asked: set[str] = set()

    def booked() -> int:
        return sum(context[name] for name in admitted if name not in paused)

    def level(name: str) -> int:
        return sum(turns[name] >= bound for bound in (10, 20, 40, 80, 160, 320)) if evenly else 0

    def by_rank(names) -> list[str]:
        return sorted(names, key=lambda name: (level(name), admitted.index(name)))

    def may_start() -> bool:
        return bool(waiting) and len(admitted) < (6 if evenly else 5)

    def settle() -> list[str]:
        nonlocal evenly
        if waiting or paused:
            evenly = order.says
        going = []
        while True:
            first = by_rank(paused)[:1]
            if first and not (level(first[0]) > 0 and may_start()):
                if len(paused) < len(admitted) and booked() + context[first[0]] > 900:
                    return going
                paused.remove(first[0])
                if first[0] in asked:
                    asked.remove(first[0])
                    going.append(first[0])
            elif may_start() and (booked() <= 900 or len(paused) == len(admitted)):
                name = waiting.pop(0)
                admitted.append(name)
                context[name] = turns[name] = 0
                going.append(name)
            else:
                return going

    def keeps_out(name: str) -> bool:
        if level(name) == 0 or len(admitted) - len(paused) == 1:
            return False
        if may_start():
            return booked() > 900
        first = by_rank(paused)[:1]
        return bool(first) and level(first[0]) < level(name) and booked() + context[first[0]] > 900

    for step in range(steps):
        kind = rng.random()
        free = [name for name in admitted if name not in asked]
        if flips < 1.0 and rng.random() < flips:
            order.says = not order.says
        if kind < 0.1:
            waiting.append(f"t{step}")
            policy.submit(f"t{step}")
        elif kind < 0.95 and free:
            name, tokens = rng.choice(free), rng.randrange(1, 500)
            context[name] = tokens
            turns[name] += 1
            while booked() > 950 and len(admitted) - len(paused) > 1:
                paused.add(by_rank(set(admitted) - paused)[-1])
            if name not in paused and keeps_out(name):
                paused.add(name)
            expected = name not in paused
            if not expected:
                asked.add(name)
            assert policy.reach(name, tokens) is expected
        elif admitted or waiting:
            name = rng.choice(admitted + waiting)
            for kept in (admitted, waiting):
                if name in kept:
                    kept.remove(name)
            paused.discard(name)
            asked.discard(name)
            policy.finish(name)
        assert policy.start() == settle()
    while admitted or waiting:  # whatever happened, everybody gets to its end
        free = [name for name in admitted if name not in asked]
        assert free
        admitted.remove(free[0])
        paused.discard(free[0])
        policy.finish(free[0])
        assert policy.start() == settle()


def test_lost_caches_lower_the_limit_of_the_policy():
    policy = parking(correction=CacheCorrection())
    started(policy, "abc")
    assert all(policy.reach(name, 310) for name in "abc")
    for _ in range(16):
        policy.served(ReturningTurn(prompt_tokens=250, computed_tokens=300, cached_tokens=0, preemptions=0))
    assert not policy.reach("c", 310)
    assert policy.reach("a", 310)


@pytest.mark.parametrize(
    ("states", "prefix_caching", "cached_tokens", "goes_on"),
    [
        (6, True, 384, True),  # a recurrent state is kept where the last whole block of the prompt of 500 ends
        (6, True, 230, False),
        (0, True, 768, True),  # attention alone keeps what was generated, too: two whole blocks of 1,000
        (0, True, 384, False),
        (3, False, 0, True),
    ],
)
def test_what_no_replica_can_keep_is_not_lost(states, prefix_caching, cached_tokens, goes_on):
    """80 of 100 blocks are booked. The limit stays at 95 where turns find all that vLLM keeps; it falls to 70 in five
    rounds in which 40% of that was lost."""
    memory = BlockMemory(capacity=100, block_tokens=384, states=states, prefix_caching=prefix_caching)
    policy = Parking(None, memory=memory, replicas=1, correction=CacheCorrection())
    started(policy, "ab")
    for _ in range(5 * 16):
        policy.served(ReturningTurn(500, 1_000, cached_tokens, 0))
    assert policy.reach("a", 384 * (40 - states))
    assert policy.reach("b", 384 * (40 - states)) == goes_on


def test_a_parked_trajectory_waits_in_the_shell_and_a_cancelled_one_leaves_its_place():
    async def go() -> list[str]:
        admission = Admission(parking())
        happened: list[str] = []
        grown = asyncio.Event()

        async def run(name: str, contexts: list[int], hold: asyncio.Event | None = None) -> None:
            async with admission.admit(name):
                for context in contexts:
                    if not admission.reach(name, context):
                        happened.append(f"{name} parked")
                        await admission.resume(name)
                        happened.append(f"{name} goes on")
                    await asyncio.sleep(0)
                happened.append(f"{name} holds")
                if hold is not None:
                    await hold.wait()

        a = asyncio.create_task(run("a", [100, 700], grown))
        b = asyncio.create_task(run("b", [100, 300]))
        c = asyncio.create_task(run("c", [100, 300]))
        for _ in range(8):
            await asyncio.sleep(0)
        assert admission.statistics().parked == 2
        b.cancel()
        await asyncio.gather(b, return_exceptions=True)
        assert (admission.statistics().parked, admission.statistics().admitted) == (1, 2)
        grown.set()
        await asyncio.gather(a, c)
        assert (admission.statistics().admitted, admission.statistics().parked) == (0, 0)
        return happened

    happened = asyncio.run(go())
    assert "b goes on" not in happened
    assert happened[-2:] == ["c goes on", "c holds"]


def test_parking_needs_to_know_the_memory():
    with pytest.raises(ConfigError, match="memory"):
        make_admission("parking", 4)
    with pytest.raises(ConfigError, match=r"at least 1.*0"):
        make_admission("parking", 0, memory=LinearMemory(capacity=10))
    with pytest.raises(ConfigError, match="memory of the replicas"):
        make_admission("parking", 4, memory=LinearMemory(capacity=0))


def test_a_reference_is_at_least_one_and_for_parking_alone():
    with pytest.raises(ConfigError, match=r"admission.reference must be at least 1.*0"):
        make_admission("parking", None, memory=LinearMemory(capacity=10), reference=0)
    with pytest.raises(ConfigError, match=r"admission.reference.*null with 'fixed', not 8"):
        make_admission("fixed", 4, reference=8)
