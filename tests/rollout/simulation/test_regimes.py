import json
import math
import statistics

import pytest

from makespan.rollout.replay.trace import check
from makespan.rollout.simulation.coding import CODING, coding_chains, generate_coding
from makespan.rollout.simulation.regimes import SYNTHETIC, generate


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_regime_keeps_to_its_caps_and_its_seed(name):
    regime = SYNTHETIC[name]
    trace = generate(regime, 1)
    assert len(trace.trajectories) == 256
    assert len({trajectory.group for trajectory in trace.trajectories}) == 32
    assert trace == generate(regime, 1)
    assert trace.trajectories != generate(regime, 2).trajectories
    for trajectory in trace.trajectories:
        check(trajectory)
        assert len(trajectory.turns) <= regime.max_turns
        for turn in trajectory.turns:
            assert 8 <= turn.generated_tokens <= 4096
            assert turn.environment_s is None or turn.environment_s <= 600
        context = trajectory.turns[-1].prompt_tokens + trajectory.turns[-1].generated_tokens
        if regime.max_tokens is not None and len(trajectory.turns) > 1:
            assert trajectory.turns[-1].prompt_tokens <= regime.max_tokens
            assert context <= regime.max_tokens + 4096


def lengths(name, seeds=range(20), **size):
    return [len(t.turns) for seed in seeds for t in generate(SYNTHETIC[name], seed, **size).trajectories]


def test_lengths_have_the_median_and_the_spread_of_their_distribution():
    logs = [math.log(length) for length in lengths("lognormal-0.5")]
    assert math.exp(statistics.median(logs)) == pytest.approx(15, rel=0.07)
    assert statistics.stdev(logs) == pytest.approx(0.5, rel=0.1)


def test_siblings_are_as_correlated_as_stated():
    """The variance of group means of 8 siblings, over the whole variance, is rho + (1 - rho) / 8."""
    groups = {}
    for seed in range(20):
        for trajectory in generate(SYNTHETIC["lognormal-0.5"], seed).trajectories:
            groups.setdefault((seed, trajectory.group), []).append(math.log(len(trajectory.turns)))
    every = [length for group in groups.values() for length in group]
    share = statistics.variance([statistics.fmean(group) for group in groups.values()]) / statistics.variance(every)
    assert share == pytest.approx(0.5 + 0.5 / 8, rel=0.15)


def test_a_cap_gathers_what_is_longer():
    capped = lengths("lognormal-0.5-cap25")
    share = sum(length == 25 for length in capped) / len(capped)
    # P(15 exp(z / 2) >= 24.5) = P(z >= 0.981) = 0.163
    assert share == pytest.approx(0.163, abs=0.03)


def test_bimodal_lengths_have_a_sixth_in_the_upper_mode():
    share = sum(length > 16 for length in lengths("bimodal")) / (20 * 256)
    assert share == pytest.approx(0.2, abs=0.03)  # P(z >= 0.84)


def test_only_test_running_regimes_act_after_the_last_turn():
    for name in SYNTHETIC:
        last = {t.turns[-1].environment_s is None for t in generate(SYNTHETIC[name], 0).trajectories}
        assert last == {name != "swe"}


def session(name, steps):
    return {
        "id": name,
        "steps": [
            {"prompt_tokens": 20_000 + 500 * n, "completion_tokens": 100, "gap_s": 2.0, "stop": stop}
            for n, stop in enumerate(steps)
        ],
    }


@pytest.fixture
def sessions(tmp_path):
    path = tmp_path / "sessions.jsonl"
    tool, end = "tool_use", "end_turn"
    documents = [
        session("a", [tool, tool, end, tool, ""]),
        session("b", [tool] * 70),
        session("c", [end]),
    ]
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def test_coding_chains_are_sessions_whole_cut_or_capped(sessions):
    assert [len(chain) for chain in coding_chains(CODING["coding-sessions"], sessions)] == [1, 5, 70]
    assert [len(chain) for chain in coding_chains(CODING["coding-segments"], sessions)] == [1, 2, 3, 70]
    assert [len(chain) for chain in coding_chains(CODING["coding-sessions-cap60"], sessions)] == [1, 5, 60]


def test_a_coding_batch_draws_chains_with_clipped_prompts_and_observations(sessions):
    regime = CODING["coding-sessions"]
    chains = coding_chains(regime, sessions)
    trace = generate_coding(regime, chains, 0, chains=64)
    assert trace == generate_coding(regime, chains, 0, chains=64)
    drawn = [len(trajectory.turns) for trajectory in trace.trajectories]
    assert set(drawn) == {1, 5, 70}
    for trajectory in trace.trajectories:
        check(trajectory)
        assert trajectory.turns[0].prompt_tokens == 12_000
        assert all(turn.observation_tokens == 400 for turn in trajectory.turns[:-1])
