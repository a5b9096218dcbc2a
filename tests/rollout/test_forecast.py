import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makespan.rollout.forecast import (
    GroupModel,
    Tails,
    group_model,
    kaplan_meier,
    prior_mass,
    rank_correlation,
    reweighted,
    sibling_correlation,
)


def test_kaplan_meier_on_a_hand_worked_example():
    # Five chains: one ended after 1 step, two after 2, one after 4; one has made 2 steps and goes on.
    ended = np.array([1.0, 2.0, 0.0, 1.0])
    censored = np.array([0.0, 0.0, 1.0, 0.0, 0.0])
    # Hazards 1/5, 2/4, 0/1, 1/1, so survival 0.8, 0.4, 0.4, 0.
    assert kaplan_meier(ended, censored, prior_weight=0.0) == pytest.approx([0.2, 0.4, 0.0, 0.4])


def test_without_the_chain_that_goes_on_the_same_example_is_the_plain_distribution():
    ended = np.array([1.0, 2.0, 0.0, 1.0])
    assert kaplan_meier(ended, np.zeros(5), prior_weight=0.0) == pytest.approx([0.25, 0.5, 0.0, 0.25])


def test_a_cap_takes_all_the_mass_of_chains_that_only_go_on():
    assert kaplan_meier(np.zeros(3), np.array([0.0, 0.0, 4.0, 0.0]), prior_weight=0.0) == pytest.approx([0.0, 0.0, 1.0])


def test_the_cold_start_is_a_distribution_with_its_median_at_ten_turns():
    mass = prior_mass(200)
    assert mass.sum() == pytest.approx(1.0)
    assert mass[:9].sum() < 0.5 < mass[:10].sum()
    assert prior_mass(1) == pytest.approx([1.0])
    assert prior_mass(5)[-1] == pytest.approx(1.0 - prior_mass(200)[:4].sum())


def test_what_was_seen_outweighs_the_cold_start():
    ended = np.zeros(100)
    ended[29] = 256.0
    assert kaplan_meier(ended, np.zeros(101))[29] > 0.98


masses = st.lists(st.integers(0, 5), min_size=1, max_size=12).filter(any)


@given(masses, st.integers(0, 11), st.floats(0, 14), st.floats(0, 14))
def test_tails_agree_with_sums_over_all_lengths(counts, k, due, cut):
    mass = np.array(counts) / sum(counts)
    tails = Tails(np.stack([np.full(len(counts), 1 / len(counts)), mass]))
    row, ks = np.array([1]), np.array([k])
    alive = sum(p for x, p in enumerate(mass, start=1) if x > k)
    if alive > 1e-6:
        left = sum(p * (x - k) for x, p in enumerate(mass, start=1) if x > k) / alive
        # E[(min(X, cut) - due)+] over all lengths, with `due` from k on as it is in use.
        due = max(due, float(k))
        late = sum(p * max(0.0, min(x, cut) - due) for x, p in enumerate(mass, start=1) if x > k) / alive
    else:  # nobody was ever seen to get here: one more step
        left, late = 1.0, max(0.0, min(k + 1.0, cut) - due)
    assert tails.remaining(row, ks)[0] == pytest.approx(left)
    assert tails.tardiness(row, ks, np.array([due]), np.array([cut]))[0] == pytest.approx(late, abs=1e-9)
    assert tails.remaining_of_one(1, k) == pytest.approx(left)
    assert tails.tardiness_of_one(1, k, due, cut) == pytest.approx(late, abs=1e-9)


def by_integration(mass, model, observations, weight=1.0):
    """The posterior by brute force: the group's mean on a fine grid, each length's likelihood under it."""
    between = model.correlation * model.deviation**2
    within = (1 - model.correlation) * model.deviation**2
    grid = np.linspace(model.mean - 8 * model.deviation, model.mean + 8 * model.deviation, 20_001)
    belief = np.exp(-0.5 * (grid - model.mean) ** 2 / between)
    for value in observations:
        belief *= np.exp(-0.5 * weight * (value - grid) ** 2 / within)
    belief /= belief.sum()
    found = []
    for x, p in enumerate(mass, start=1):
        ahead = belief @ np.exp(-0.5 * (math.log(x) - grid) ** 2 / within) / math.sqrt(within)
        marginal = math.exp(-0.5 * (math.log(x) - model.mean) ** 2 / model.deviation**2) / model.deviation
        found.append(p * ahead / marginal)
    return np.array(found) / sum(found)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.floats(0.1, 0.9),
    st.floats(0.3, 1.5),
    st.floats(0.2, 1.0),
)
def test_the_group_posterior_agrees_with_integration_over_the_groups_mean(lengths, correlation, deviation, weight):
    mass = prior_mass(40)
    model = GroupModel(math.log(8.0), deviation, correlation)
    observations = [math.log(length) for length in lengths]
    count, total = weight * len(lengths), weight * sum(observations)
    rows = reweighted(mass, model, np.array([count]), np.array([total]))
    assert rows[0] == pytest.approx(by_integration(mass, model, observations, weight), abs=1e-5)


def test_long_siblings_make_a_chain_be_expected_longer_and_uncorrelated_ones_say_nothing():
    mass = prior_mass(100)
    base = Tails(mass[None, :]).remaining_of_one(0, 0)
    model = group_model(mass, 0.5)
    three_long = np.array([3.0]), np.array([3 * math.log(40.0)])
    assert Tails(reweighted(mass, model, *three_long)).remaining_of_one(0, 0) > 1.5 * base
    apart = group_model(mass, 0.0)
    assert Tails(reweighted(mass, apart, *three_long)).remaining_of_one(0, 0) == pytest.approx(base)


def test_a_group_far_from_everything_seen_still_has_a_distribution():
    mass = np.zeros(400)
    mass[0] = 1.0
    rows = reweighted(mass, GroupModel(0.0, 0.1, 0.9), np.array([8.0]), np.array([8 * math.log(400.0)]))
    assert rows[0] == pytest.approx(mass)


def test_sibling_correlation_on_a_hand_worked_table():
    # Groups (1, 3) and (5, 7): mean squares 16 between and 2 within, so (16 - 2) / (16 + 2).
    assert sibling_correlation(np.array([0, 0, 1, 1]), np.array([1.0, 3, 5, 7])) == pytest.approx(14 / 18)
    assert sibling_correlation(np.array([0, 0, 1, 1]), np.array([1.0, 7, 3, 5])) == 0.0
    assert sibling_correlation(np.array([4, 4, 9, 9]), np.array([1.0, 1, 2, 2])) == 0.95


@pytest.mark.parametrize(("groups", "logs"), [([0, 1], [1.0, 2.0]), ([0, 0], [1.0, 2.0]), ([0, 0, 1, 1], [1.0] * 4)])
def test_sibling_correlation_is_assumed_where_it_cannot_be_seen(groups, logs):
    assert sibling_correlation(np.array(groups), np.array(logs)) == 0.5


def test_sibling_correlation_finds_what_lengths_were_drawn_with():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(2000), 8)
    logs = math.sqrt(0.3) * rng.normal(size=2000)[groups] + math.sqrt(0.7) * rng.normal(size=16_000)
    assert sibling_correlation(groups, logs) == pytest.approx(0.3, abs=0.03)


def test_rank_correlation_on_hand_worked_ranks():
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([10.0, 100, 1000])) == pytest.approx(1.0)
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1.0)
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: covariance 1.5 over sqrt(1.5 * 2).
    assert rank_correlation(np.array([5.0, 5, 9]), np.array([1.0, 2, 3])) == pytest.approx(1.5 / math.sqrt(3.0))
    assert rank_correlation(np.array([1.0, 1]), np.array([1.0, 2])) == 0.0
    assert rank_correlation(np.array([1.0]), np.array([1.0])) == 0.0
