"""How well the coordinator knew how many turns were left.

An action's event carries the forecast that its key was made from (`why`). Once the trajectory has ended, the turns that
it really still made are known, the one of that action included. Trajectories that failed, were cancelled or began again
say nothing of the forecast: it was for an attempt that did not end by itself.
"""

from __future__ import annotations

import msgspec

from makespan.rollout.telemetry.merge import MergedLog


class ForecastError(msgspec.Struct, frozen=True, kw_only=True):
    """Expected less actual remaining turns, over all forecasts of a batch."""

    forecasts: int
    absolute_turns: float
    """The mean without its sign."""
    bias_turns: float
    """The mean with its sign; above 0: chains were expected to go on longer than they did."""
    share: float
    """Absolute errors over actual remaining turns, both summed."""


def forecast_error(log: MergedLog) -> ForecastError | None:
    """The error, None where no forecast is in the log (a policy that makes none)."""
    turns = {
        event.trajectory_id: event.data["turns"]
        for event in log.of("ended")
        if event.data["state"] in ("finished", "truncated") and not event.data.get("restarts")
    }
    expected, actual = [], []
    for event in log.of("act"):
        why = event.data.get("why")
        if why is not None and event.trajectory_id in turns:
            expected.append(why["remaining_turns"])
            actual.append(turns[event.trajectory_id] - why["turns"])
    if not actual:
        return None
    errors = [guess - true for guess, true in zip(expected, actual, strict=True)]
    absolute = sum(abs(error) for error in errors)
    return ForecastError(
        forecasts=len(errors),
        absolute_turns=absolute / len(errors),
        bias_turns=sum(errors) / len(errors),
        share=absolute / sum(actual),
    )
