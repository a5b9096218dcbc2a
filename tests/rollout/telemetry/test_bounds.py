import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def test_short_inferences_are_not_charged_at_the_rate_of_a_long_slow_one(tmp_path):
    # 300 tokens in 10 s, then ten turns of 255 tokens in 0.1 s each: the chain took 11 s.
    turns = [logs.generate(2, 10.0, "a#0", 0.0, prompt_tokens=300, prefill_s=10.0, generated_tokens=1)]
    for number in range(10):
        at_s = 10.0 + 0.1 * (number + 1)
        figures = {"prompt_tokens": 255, "prefill_s": 0.1, "generated_tokens": 1, "turn": number + 1}
        turns.append(logs.generate(3 + number, at_s, "a#0", at_s - 0.1, **figures))
    lines = [logs.header(), logs.start(0, 0.0), *turns, logs.event(20, 11.0, "batch_end", stopped=False)]
    analysis = analysed(tmp_path, lines)
    assert analysis.makespan_s == 11.0
    assert analysis.lower_bound_s == pytest.approx(11.0)


seconds = st.floats(0.0, 20.0)
turns = st.lists(
    st.fixed_dictionaries(
        {
            "prompt_tokens": st.integers(1, 2000),
            "generated_tokens": st.integers(1, 40),
            "queue_s": seconds,
            "prefill_s": st.none() | seconds,
            "decode_s": st.none() | seconds,
            "rest_s": seconds,
            "service_s": seconds,
            "fails": st.booleans(),
        }
    ),
    max_size=5,
)


def scheduled(chains, slots):
    """A log of chains that share slots: whoever asks first has the slot that is free first."""
    free_s = [0.0] * slots
    lines = []
    asking = [(0.0, number, 0) for number in range(len(chains))]
    end_s = 0.0
    while asking:
        asking.sort()
        at_s, number, place = asking.pop(0)
        if place == len(chains[number]):
            end_s = max(end_s, at_s)
            continue
        turn, name = chains[number][place], f"t{number}#0"
        inferred = ("prompt_tokens", "generated_tokens", "queue_s", "prefill_s", "decode_s")
        done_s = at_s + sum(turn[part] or 0.0 for part in (*inferred[2:], "rest_s"))
        lines.append(logs.generate(0, done_s, name, at_s, turn=place, **{key: turn[key] for key in inferred}))
        free_s.sort()
        granted_s = max(done_s, free_s[0])
        free_s[0] = over_s = granted_s + turn["service_s"]
        times = {"queue_s": granted_s - done_s, "service_s": turn["service_s"]}
        lines.append(
            logs.act(0, over_s, name, done_s, turn=place, outcome="timeout" if turn["fails"] else "ok", **times)
        )
        asking.append((over_s, number, place + 1))
    return lines, end_s


@given(chains=st.lists(turns, min_size=1, max_size=4), slots=st.integers(1, 3))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bound_exceeds_the_makespan_of_a_schedule_that_is_possible(tmp_path, chains, slots):
    events, end_s = scheduled(chains, slots)
    told = logs.event(0, 0.0, "environment_server", slots={"env.step": slots})
    lines = [told, logs.start(0, 0.0), *events, logs.event(0, end_s, "batch_end", stopped=False)]
    for seq, line in enumerate(lines):
        line["seq"] = seq
    analysis = analysed(tmp_path, [logs.header(), *lines])
    assert (analysis.lower_bound_s or 0.0) <= analysis.makespan_s + 1e-9
