"""What a workload asks of memory."""

from __future__ import annotations

import pytest

from makespan.rollout.replay.trace import Trace, TraceHeader, TraceTrajectory, TraceTurn
from makespan.rollout.resources.profile import contexts, from_numbers, from_trace
from makespan.rollout.resources.shape import ResourceError


def trajectory(name: str, group: str, *turns: tuple[int, int, int]) -> TraceTrajectory:
    """Turns of new, generated and observation tokens."""
    held, kept = turns[0][0], []
    for number, (_, generated, observation) in enumerate(turns):
        last = number + 1 == len(turns)
        kept.append(
            TraceTurn(
                prompt_tokens=held,
                generated_tokens=generated,
                observation_tokens=0 if last else observation,
                environment_s=None if last else 1.5,
            )
        )
        held += generated + observation
    return TraceTrajectory(trajectory_id=name, task_id=group, group=group, turns=tuple(kept))


def test_a_trace_gives_what_each_turn_adds():
    trace = Trace(
        TraceHeader(),
        (
            trajectory("a", "1", (100, 10, 40), (0, 20, 60), (0, 5, 0)),
            trajectory("b", "1", (300, 7, 0)),
        ),
    )
    profile = from_trace(trace, "two")
    first, second = profile.trajectories
    assert [(turn.new_tokens, turn.generated_tokens, turn.environment_s) for turn in first] == [
        (100, 10, 1.5),
        (40, 20, 1.5),
        (60, 5, 0.0),
    ]
    assert contexts(first) == [110, 170, 235]
    assert contexts(second) == [307]
    assert profile.contexts_tokens == [110, 170, 235, 307]
    assert profile.longest_tokens == 307
    assert profile.group_size == 2.0
    assert profile.summary()["context_tokens_mean"] == pytest.approx((110 + 170 + 235 + 307) / 4)


def test_a_large_trace_is_sampled():
    trace = Trace(TraceHeader(), tuple(trajectory(str(n), str(n), (n + 1, 1, 0)) for n in range(1_000)))
    profile = from_trace(trace, "many", sample=50)
    assert len({turns[0].new_tokens for turns in profile.trajectories}) == 50


def test_numbers_are_the_means_of_what_is_drawn():
    profile = from_numbers(prompt_tokens=3_000, turns=12, generated_tokens=100, spread=0.3, sample=2_000)
    first = [turns[0].new_tokens for turns in profile.trajectories]
    assert sum(first) / len(first) == pytest.approx(3_000, rel=0.05)
    assert profile.summary()["turns_mean"] == pytest.approx(12, rel=0.05)
    assert profile.summary()["generated_tokens_mean"] == pytest.approx(100, rel=0.05)


def test_without_spread_all_are_alike():
    profile = from_numbers(prompt_tokens=300, turns=3, generated_tokens=32, observation_tokens=600, spread=0.0)
    assert {tuple(contexts(turns)) for turns in profile.trajectories} == {(332, 964, 1_596)}


def test_a_workload_that_is_longer_than_the_context_is_refused_with_how_many():
    profile = from_numbers(
        prompt_tokens=300, turns=3, observation_tokens=600, generated_tokens=32, spread=0.0, sample=4
    )
    profile.check_context(1_596)
    with pytest.raises(ResourceError, match=r"4 of 4 trajectories outgrow .* 1,595 tokens, the longest by 1"):
        profile.check_context(1_595)


@pytest.mark.parametrize("numbers", [{"turns": 0}, {"prompt_tokens": 0}, {"generated_tokens": -1}, {"spread": -1.0}])
def test_numbers_that_cannot_be_are_refused(numbers):
    with pytest.raises(ResourceError, match="must be"):
        from_numbers(**numbers)
