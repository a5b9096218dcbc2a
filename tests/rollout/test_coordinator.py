import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makespan.rollout.coordinator import Coordinator
from makespan.rollout.history import ChainRecord, History
from makespan.rollout.trajectory import Progress


def knows(lengths, turn_s=2.0, action_s=1.0, turn_tokens=100):
    """A history of one step whose chains had these lengths, each in a group of its own."""
    history = History()
    history.learn(
        ChainRecord(f"old-{n}", length, (turn_s - action_s) * length, action_s * length, turn_tokens * length)
        for n, length in enumerate(lengths)
    )
    return history


class Batch:
    """Chains driven by hand: each turn takes what it is told to."""

    def __init__(self, coordinator, groups, **caps):
        self.coordinator = coordinator
        self.turns = dict.fromkeys(groups, 0)
        coordinator.begin(**caps)
        for chain, group in groups.items():
            coordinator.join(chain, group, "env")
        for chain in groups:
            coordinator.started(chain)

    def submit(self, chain, inference_s=1.0, tokens=1000):
        self.coordinator.inferred(chain, inference_s, tokens)
        return self.coordinator.key(chain, Progress(turns=self.turns[chain]))

    def step(self, chain, inference_s=1.0, action_s=1.0, tokens=1000):
        self.submit(chain, inference_s, tokens)
        self.coordinator.acted(chain, action_s)
        self.turns[chain] += 1

    def steps(self, chain, count, **costs):
        for _ in range(count):
            self.step(chain, **costs)


def served_first(keys):
    return min(keys, key=keys.__getitem__)


def test_the_siblings_of_a_long_chain_go_first():
    coordinator = Coordinator(knows([5] * 20 + [40] * 20), slots={"env": 1})
    batch = Batch(coordinator, {"long#0": "long", "long#1": "long", "short#0": "short", "short#1": "short"})
    batch.steps("long#0", 40)
    coordinator.end("long#0", counts=True)
    batch.steps("short#0", 5)
    coordinator.end("short#0", counts=True)
    batch.submit("short#1")
    batch.submit("long#1")
    assert served_first(coordinator.rekeys(100.0)) == "long#1"


def test_without_the_siblings_the_same_two_chains_have_the_same_key():
    coordinator = Coordinator(knows([5] * 20 + [40] * 20), slots={"env": 1}, siblings=False)
    batch = Batch(coordinator, {"long#0": "long", "long#1": "long", "short#0": "short", "short#1": "short"})
    batch.steps("long#0", 40)
    coordinator.end("long#0", counts=True)
    batch.steps("short#0", 5)
    coordinator.end("short#0", counts=True)
    batch.submit("short#1")
    batch.submit("long#1")
    keys = coordinator.rekeys(100.0)
    assert keys["long#1"] == pytest.approx(keys["short#1"], rel=0.15)


def test_a_chain_with_slow_steps_goes_first():
    coordinator = Coordinator(knows([20] * 40), slots={"env": 2})
    batch = Batch(coordinator, {f"{n}": f"{n}" for n in range(10)})
    batch.steps("3", 5, inference_s=1.0, action_s=20.0)
    batch.steps("7", 5, inference_s=1.0, action_s=1.0)
    batch.submit("3")
    batch.submit("7")
    assert served_first(coordinator.rekeys(1.0)) == "3"


def test_under_a_turn_cap_the_chain_with_the_most_turns_behind_it_goes_last():
    # All chains run into the cap of 20: who has made 18 turns has 2 left, and progress-first would be wrong.
    coordinator = Coordinator(knows([20] * 40), slots={"env": 1})
    batch = Batch(coordinator, {"old": "old", "young": "young"}, max_turns=20)
    batch.steps("old", 18)
    batch.steps("young", 2)
    batch.submit("old")
    batch.submit("young")
    assert served_first(coordinator.rekeys(1.0)) == "young"


def test_when_a_long_run_promises_a_longer_one_the_chain_with_the_most_turns_goes_first():
    coordinator = Coordinator(knows([2] * 90 + [100] * 10), slots={"env": 1})
    batch = Batch(coordinator, {"old": "old", "young": "young"})
    batch.steps("old", 10)
    batch.steps("young", 1)
    batch.submit("old")
    batch.submit("young")
    assert served_first(coordinator.rekeys(1.0)) == "old"


def test_a_chain_whose_token_budget_is_nearly_spent_goes_last():
    coordinator = Coordinator(knows([50] * 40, turn_tokens=1000), slots={"env": 8})
    batch = Batch(coordinator, {"full": "full", "empty": "empty"}, max_tokens=60_000)
    for chain, first, each in (("full", 1000, 11_000), ("empty", 1000, 500)):
        for turn in range(5):
            batch.step(chain, tokens=first + turn * each)
    batch.submit("full", tokens=56_000)
    batch.submit("empty", tokens=3500)
    assert served_first(coordinator.rekeys(1.0)) == "empty"
    assert coordinator.outlook("full").remaining_turns < 3 < 10 < coordinator.outlook("empty").remaining_turns


def test_records_of_prompts_decide_before_anything_ran_and_only_if_they_are_trusted():
    history = History()
    for _ in range(2):
        history.learn(ChainRecord(f"p{n}", 5 * (n + 1), 5.0 * (n + 1), 5.0 * (n + 1), 100) for n in range(10))
    for trusted in (True, False):
        coordinator = Coordinator(history, slots={"env": 1}, prompt_history=trusted)
        batch = Batch(coordinator, {"p0#0": "p0", "p9#0": "p9"})
        keys = {chain: batch.submit(chain) for chain in ("p0#0", "p9#0")}
        assert coordinator.predicts() is trusted
        assert (keys["p9#0"] < keys["p0#0"]) is trusted
        expected = coordinator.expected_s(["p0", "p9"])
        assert (expected[1] > 2 * expected[0]) is trusted


def test_the_horizon_is_the_expected_actions_over_the_slots():
    # Lengths are all 10 but for the cold start's 2 of 202 chains; 4 chains of which one has made 4 steps.
    coordinator = Coordinator(knows([10] * 200, action_s=1.5), slots={"env": 3})
    batch = Batch(coordinator, {f"{n}": "same" for n in range(4)}, max_turns=10)
    batch.steps("0", 4, action_s=1.5)
    batch.submit("0")
    coordinator.rekeys(0.0)
    assert coordinator.outlook("0").horizon_s == pytest.approx((3 * 10 + 6) * 1.5 / 3, rel=0.02)
    assert coordinator.outlook("0").remaining_turns == pytest.approx(6, rel=0.02)
    assert coordinator.outlook("0").slack_s == pytest.approx(18 - 6 * 2.2, abs=2.5)


def test_an_environment_without_a_bound_makes_no_horizon():
    coordinator = Coordinator(knows([10] * 10), slots={})
    batch = Batch(coordinator, {"0": "a"})
    batch.submit("0")
    assert coordinator.outlook("0").horizon_s == 0.0


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_a_pass_gives_every_waiting_action_the_key_that_it_would_get_alone(seed):
    rng = random.Random(seed)
    history = knows([rng.randint(1, 30) for _ in range(20)]) if rng.random() < 0.7 else None
    coordinator = Coordinator(history, slots={"env": rng.randint(1, 4)})
    groups = {f"{n}": f"g{n % 3}" for n in range(12)}
    caps = {"max_turns": 40, "max_tokens": rng.choice([None, 20_000])}
    batch = Batch(coordinator, groups, **caps)
    tokens = dict.fromkeys(groups, 500)
    for _ in range(60):
        chain = rng.choice(list(groups))
        tokens[chain] += rng.randint(10, 800)
        batch.step(chain, rng.uniform(0.1, 5), rng.uniform(0.1, 5), tokens[chain])
    waiting = rng.sample(list(groups), 5)
    for chain in waiting:
        batch.submit(chain, tokens=tokens[chain])
    keys = coordinator.rekeys(1.0)
    assert sorted(keys) == sorted(waiting)
    for chain in waiting:
        assert keys[chain] == pytest.approx(coordinator.key(chain, Progress(turns=batch.turns[chain])))
        assert keys[chain] == pytest.approx(coordinator.outlook(chain).key)
        assert keys[chain] <= 0.0
        assert math.isfinite(keys[chain])


def test_a_pass_is_due_after_sixteen_actions_or_an_end_and_never_sooner_than_the_interval():
    coordinator = Coordinator(slots={"env": 1})
    batch = Batch(coordinator, {"a": "a", "b": "b"})
    batch.submit("b")
    assert coordinator.rekeys(0.0)  # the batch is news
    for _ in range(15):
        batch.step("a")
    assert not coordinator.rekeys(10.0)
    batch.step("a")
    assert coordinator.rekeys(10.0)
    coordinator.end("a", counts=True)
    assert not coordinator.rekeys(10.04)
    assert coordinator.rekeys(10.06)


def test_the_batch_is_learnt_from_and_what_failed_is_only_watched():
    coordinator = Coordinator(slots={"env": 1})
    batch = Batch(coordinator, {"a": "g", "b": "g", "c": "h"})
    batch.steps("a", 3, inference_s=2.0, action_s=1.0, tokens=1000)
    batch.steps("b", 7)
    batch.steps("c", 2)
    coordinator.end("a", counts=True)
    coordinator.end("b", counts=False)
    coordinator.end("c", counts=True)
    history = coordinator.finish()
    assert history.steps[0].counts == {3: 1.0, 2: 1.0}
    assert history.turn_s == pytest.approx((3 * 3.0 + 2 * 2.0) / 5)
    assert set(history.prompts) == {"g", "h"}


def test_a_restarted_trajectory_counts_from_its_last_reset():
    coordinator = Coordinator(slots={"env": 1})
    batch = Batch(coordinator, {"a": "a"})
    coordinator.was_reset("a")
    batch.steps("a", 5)
    coordinator.was_reset("a")
    batch.turns["a"] = 0
    batch.steps("a", 2, inference_s=3.0, action_s=1.0)
    coordinator.end("a", counts=True)
    assert coordinator.finish().steps[0].counts == {2: 1.0}
    assert coordinator.history.turn_s == pytest.approx(4.0)


def test_chains_may_join_while_others_run():
    coordinator = Coordinator(knows([10] * 20), slots={"env": 2})
    batch = Batch(coordinator, {"a": "a"})
    batch.steps("a", 3)
    for number in range(600):
        coordinator.join(f"late-{number}", f"late-{number % 7}", "env")
    coordinator.started("late-599")
    key = coordinator.key("late-599", Progress(turns=0))
    assert math.isfinite(key)
    assert coordinator.outlook("late-599").horizon_s > 1000  # 600 more chains of 10 actions of 1 s on 2 slots
