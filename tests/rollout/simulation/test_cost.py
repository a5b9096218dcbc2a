import pytest
from hypothesis import given
from hypothesis import strategies as st

from makespan.rollout.simulation.cost import InferenceCost


def stepped_s(cost, steps, sequences, context):
    """The time of decode steps, one by one, as the docstring states a step."""
    total = 0.0
    for _ in range(steps):
        total += cost.step_s + cost.sequence_s * sequences + cost.context_s * context
        context += sequences
    return total


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 5_000_000))
def test_many_decode_steps_at_once_take_as_long_as_one_by_one(steps, sequences, context):
    cost = InferenceCost()
    assert cost.steps_s(steps, sequences, context) == pytest.approx(stepped_s(cost, steps, sequences, context))


@given(st.floats(0, 100), st.integers(1, 200), st.integers(0, 5_000_000))
def test_the_step_in_progress_ends_at_or_after_now_and_the_one_before_it_earlier(elapsed_s, sequences, context):
    cost = InferenceCost()
    steps = cost.steps_begun(elapsed_s, sequences, context)
    assert steps >= 1
    assert cost.steps_s(steps, sequences, context) >= elapsed_s
    if steps > 1:
        assert cost.steps_s(steps - 1, sequences, context) < elapsed_s


def test_an_inference_alone_takes_its_chunks_and_its_steps():
    cost = InferenceCost(step_s=1.0, sequence_s=0.1, context_s=0.01, prefill_s=0.001, chunk_tokens=100)
    # 250 tokens: 3 chunks of 1.1 s and 0.25 s; then 2 steps over contexts of 301 and 302 tokens.
    assert cost.alone_s(250, 300, 3) == pytest.approx(3 * 1.1 + 0.25 + 2 * 1.1 + 3.01 + 3.02)
    assert cost.alone_s(250, 300, 1) == pytest.approx(3 * 1.1 + 0.25)


def test_the_work_that_cannot_be_shared_leaves_out_what_steps_cost_anyway():
    cost = InferenceCost(step_s=1.0, sequence_s=0.1, context_s=0.01, prefill_s=0.001, chunk_tokens=100)
    assert cost.work_s(250, 300, 3) == pytest.approx(0.25 + 2 * 0.1 + 3.01 + 3.02)
    assert cost.work_s(250, 300, 3) < cost.alone_s(250, 300, 3)


def test_a_step_with_prefill_lasts_longer_by_its_tokens():
    cost = InferenceCost(step_s=1.0, sequence_s=0.1, context_s=0.01, prefill_s=0.001)
    assert cost.steps_s(1, 2, 700, 1, 500) == pytest.approx(1.0 + 0.3 + 7.0 + 0.5)
    # In the second step each of the two decoding sequences has a token more.
    assert cost.steps_s(2, 2, 700, 1, 500) == pytest.approx(2 * (1.0 + 0.3 + 7.0 + 0.5) + 0.02)
    assert cost.steps_begun(8.9, 2, 700, 1, 500) == 2
