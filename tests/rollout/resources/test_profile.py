"""What a workload asks of memory."""

from __future__ import annotations

import pytest

from makespan.rollout.replay.trace import Trace, TraceHeader, TraceTrajectory, TraceTurn
from makespan.rollout.resources.profile import contexts, from_numbers, from_trace, unspecified
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


def test_a_trace_that_is_longer_than_the_context_is_refused_with_how_many():
    trace = Trace(TraceHeader(), tuple(trajectory(str(n), "g", (300, 32, 600), (0, 32, 0)) for n in range(4)))
    profile = from_trace(trace, "a trace")
    assert profile.within(964) is profile
    with pytest.raises(ResourceError, match=r"4 of 4 trajectories outgrow .* 963 tokens, the longest by 1"):
        profile.within(963)


def test_of_drawn_trajectories_the_long_end_is_cut_where_a_turn_would_outgrow_the_context():
    profile = from_numbers(prompt_tokens=30, turns=9, observation_tokens=100, generated_tokens=10, spread=0.5)
    ends = sorted(contexts(turns)[-1] for turns in profile.trajectories)
    limit = ends[48]
    cut = profile.within(limit)
    assert cut.longest_tokens <= limit
    assert "15 of 64 trajectories end at the model's context" in cut.source
    for before, after in zip(profile.trajectories, cut.trajectories, strict=True):
        assert contexts(after) == contexts(before)[: len(after)]
        assert after[-1].environment_s == 0.0  # nothing is asked of the environment after a trajectory's last turn
        assert len(after) == len(before) or contexts(before)[len(after)] > limit
    with pytest.raises(ResourceError, match="outgrow the model's context"):
        profile.within(ends[20])


def test_the_default_workload_fits_into_any_context():
    for limit in (2, 100, 4_096, 1 << 20):
        profile = unspecified().within(limit)
        assert profile.longest_tokens <= limit
        assert len(profile.trajectories) == 64


@pytest.mark.parametrize("numbers", [{"turns": 0}, {"prompt_tokens": 0}, {"generated_tokens": -1}, {"spread": -1.0}])
def test_numbers_that_cannot_be_are_refused(numbers):
    with pytest.raises(ResourceError, match="must be"):
        from_numbers(**numbers)
