"""How far a replay is from its recording, by figures worked out by hand."""

import pytest

from makespan.rollout.replay.fidelity import fidelity
from makespan.rollout.replay.plan import plan
from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog

from .recordings import recording

_, PLAYS = plan([recording("a", "g", 100, (10, 30, 0.5), (20, 0, 1.5), (5, 0, None), reset_s=2.0)])


def log(*events):
    numbered = [("engine", Event(seq=n, monotonic_s=n, kind=k, trajectory_id="g#0", data=d)) for n, (k, d) in events]
    return MergedLog(headers=(), events=tuple(numbered), elsewhere=(), torn=())


def act(turn, service_s, outcome="ok"):
    return ("act", {"turn": turn, "service_s": service_s, "outcome": outcome})


def reset(service_s):
    return ("reset", {"turn": 0, "service_s": service_s, "outcome": "ok"})


def generate(turn, prompt, generated):
    return ("generate", {"turn": turn, "prompt_tokens": prompt, "generated_tokens": generated})


def test_durations_are_compared_one_by_one_and_in_total():
    durations = fidelity(log(*enumerate([reset(2.02), act(0, 0.55), act(1, 1.5), act(2, 0.0)])), PLAYS).durations
    assert durations.actions == 3  # the turn without an action has no recorded seconds
    assert (durations.recorded_s, durations.measured_s) == pytest.approx((4.0, 4.07))
    assert durations.total_pct == pytest.approx(1.75)  # 0.07 of 4
    assert durations.within
    assert durations.action_pct_p50 == pytest.approx(1.0)  # of 1%, 10% and 0%
    assert durations.action_pct_largest == pytest.approx(10.0)
    assert durations.excess_s_p50 == pytest.approx(0.02)
    assert durations.within_share == pytest.approx(2 / 3)


def test_a_total_beyond_the_tolerance_is_said_to_be():
    durations = fidelity(log(*enumerate([reset(2.0), act(0, 0.5), act(1, 1.4)])), PLAYS).durations
    assert durations.total_pct == pytest.approx(-2.5)
    assert durations.within is False


def test_failed_actions_were_not_measured_and_do_not_count():
    durations = fidelity(log(*enumerate([act(0, 0.5), act(1, None, "timeout")])), PLAYS).durations
    assert (durations.actions, durations.recorded_s, durations.total_pct) == (1, 0.5, 0.0)


def test_without_environment_time_nothing_is_claimed():
    durations = fidelity(log(), PLAYS).durations
    assert (durations.total_pct, durations.within, durations.within_share) == (None, None, None)


def test_turns_of_other_lengths_are_counted():
    same = fidelity(log(*enumerate([generate(0, 100, 10), generate(1, 140, 20), generate(2, 160, 5)])), PLAYS)
    assert (same.turns, same.replayed_turns, same.other_prompts, same.other_generations) == (3, 3, 0, 0)
    other = fidelity(log(*enumerate([generate(0, 100, 9), generate(1, 139, 20)])), PLAYS)
    assert (other.turns, other.replayed_turns, other.other_prompts, other.other_generations) == (3, 2, 1, 1)
