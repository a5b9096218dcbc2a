import pytest

from makespan.rollout.telemetry.forecast_error import forecast_error
from tests.rollout.telemetry import batches, logs


def act(seq, trajectory, turns, remaining):
    return logs.act(seq, 5.0, trajectory, 4.0, turn=turns, why={"turns": turns, "remaining_turns": remaining})


def test_the_error_is_expected_less_actual_turns(tmp_path):
    lines = [
        logs.header(),
        logs.start(0, 0.0),
        act(1, "a#0", 0, 6.0),  # 4 remained: 2 too many
        act(2, "a#0", 3, 0.5),  # 1 remained: 0.5 too few
        act(3, "b#0", 0, 2.0),  # 2 remained: right
        act(4, "c#0", 0, 9.0),  # failed: says nothing
        act(5, "d#0", 0, 9.0),  # began again: says nothing
        logs.act(6, 5.0, "b#0", 4.0, turn=1),  # made without a forecast
        logs.ended(7, 6.0, "a#0", turns=4),
        logs.ended(8, 6.0, "b#0", turns=2, state="truncated"),
        logs.ended(9, 6.0, "c#0", turns=2, state="failed"),
        logs.ended(10, 6.0, "d#0", turns=2, restarts=1),
    ]
    error = forecast_error(batches.merged(tmp_path, lines))
    assert error.forecasts == 3
    assert error.absolute_turns == pytest.approx((2.0 + 0.5 + 0.0) / 3)
    assert error.bias_turns == pytest.approx((2.0 - 0.5 + 0.0) / 3)
    assert error.share == pytest.approx(2.5 / 7)


def test_a_policy_without_a_forecast_has_no_error(tmp_path):
    assert forecast_error(batches.merged(tmp_path, logs.two_trajectories())) is None


def test_the_coordinators_own_events_are_understood(tmp_path):
    log = batches.simulated(tmp_path / "engine.jsonl", "bfcl", 16, "--scheduling", "caas")
    assert forecast_error(log).forecasts == sum(1 for _ in log.of("act"))
