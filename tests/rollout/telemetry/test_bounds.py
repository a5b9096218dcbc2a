import pytest

from makespan.rollout.telemetry.analysis import analyse
from makespan.rollout.telemetry.merge import merge
from tests.rollout.telemetry import logs

COST = {"step_s": 0.1, "sequence_s": 0.01, "context_s": 0.001, "prefill_s": 0.002, "chunk_tokens": 600}


def analysed(tmp_path, lines):
    return analyse(merge([logs.write(tmp_path / "engine.jsonl", lines)]))


def test_bounds_without_a_cost_use_the_best_rates_of_the_run(tmp_path):
    bounds = analysed(tmp_path, logs.two_trajectories()).bounds_s
    # Work of 5 s over 2 slots, of 2 s over 1.
    assert bounds.slots == {"env.start": 2.0, "env.step": 2.5}
    # The best prefill rate is 1 s for 1,000 tokens (the other: 1.2 s for 300), the best decode rate 0.05 s a token
    # (both). Of the 300 tokens that b computed, 200 had to be.
    a_s = (1.0 + 2.0) + 1000 * 0.001 + 10 * 0.05
    b_s = (1.0 + 3.0) + 200 * 0.001 + 20 * 0.05
    assert bounds.chain == pytest.approx(max(a_s, b_s))
    assert bounds.inference is None


def test_the_largest_bound_counts(tmp_path):
    analysis = analysed(tmp_path, logs.two_trajectories())
    assert analysis.lower_bound_s == pytest.approx(5.2)
    lines = logs.two_trajectories()
    lines[13] = logs.act(12, 24.0, "b#0", 20.0, slot_class="env.other", service_s=3.0)
    lines[1] = logs.event(0, 0.5, "environment_server", slots={"env.start": 1, "env.other": 1})
    assert analysed(tmp_path, lines).bounds_s.slots == {"env.other": 3.0, "env.start": 2.0}


def test_bounds_with_a_cost_are_exact(tmp_path):
    replicas = [logs.event(20 + number, 0.6, "replica", replica=f"replica-{number}", cost=COST) for number in range(2)]
    lines = [*logs.two_trajectories(), *replicas]
    lines[2] = logs.start(1, 10.0, replicas=["replica-0", "replica-1"])
    bounds = analysed(tmp_path, lines).bounds_s
    # a: 1,000 tokens in 2 chunks: 2 steps of 0.1 + 0.01 s and 2 s of prefill, then 10 decode steps over contexts of
    # 1,001 … 1,010 tokens: 10 * 0.11 + 0.001 * 10,055.
    a_s = 3.0 + 2 * 0.11 + 2.0 + 10 * 0.11 + 10.055
    # b: 200 tokens in one chunk, then 20 steps over contexts of 401 … 420.
    b_s = 4.0 + 0.11 + 0.4 + 20 * 0.11 + 0.001 * sum(range(401, 421))
    assert bounds.chain == pytest.approx(max(a_s, b_s))
    work_s = 2.0 + 10 * 0.01 + 10.055 + 0.4 + 20 * 0.01 + 0.001 * sum(range(401, 421))
    assert bounds.inference == pytest.approx(work_s / 2)


def test_a_run_without_measured_inference_is_bounded_by_its_environment(tmp_path):
    lines = logs.two_trajectories()
    for place in (7, 12):
        lines[place]["data"] |= dict.fromkeys(("prefill_s", "decode_s", "cached_tokens", "recomputed_tokens"))
    bounds = analysed(tmp_path, lines).bounds_s
    assert bounds.chain == 4.0
    assert bounds.slots == {"env.start": 2.0, "env.step": 2.5}
