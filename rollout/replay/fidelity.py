"""How much a replay was like its trace: token counts turn by turn, and the seconds that the environment really took.

An action's seconds are those that the broker measured while it held its slot. They are compared with the trace's,
already scaled, one by one and in total. Sleeping late and the way between broker and worker cost about a millisecond
or two an action, whatever it takes: much of a short action, little of a long one. So both are said, how many actions
are within the tolerance and whether their total is.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from makespan.rollout.replay.plan import Plays
from makespan.rollout.telemetry.analysis import percentile
from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog, failed

TOLERANCE_PCT = 2.0
"""Durations that are closer to the recorded ones count as the recorded ones."""


class Durations(msgspec.Struct, frozen=True, kw_only=True):
    """Measured against recorded seconds of environment actions and resets; percentages are of the recorded seconds.

    Where the trace says 0 seconds there is no percentage: such an action counts in the totals alone.
    """

    actions: int
    recorded_s: float
    """After scaling."""
    measured_s: float
    total_pct: float | None
    """By how much the total deviates; None when the trace has no environment time."""
    action_pct_p50: float | None
    action_pct_p99: float | None
    action_pct_largest: float | None
    """Of the one that deviates most, to either side."""
    excess_s_p50: float | None
    """Measured minus recorded seconds of an action."""
    excess_s_p99: float | None
    within_share: float | None
    """Share of the actions that deviate by at most `tolerance_pct`."""
    within: bool | None
    """Whether the total deviates by at most `tolerance_pct`."""
    tolerance_pct: float = TOLERANCE_PCT


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """What came of the recorded turns and durations."""

    turns: int
    """Inferences that the trace has."""
    replayed_turns: int
    other_prompts: int
    """Replayed turns whose prompt had another number of tokens than the recorded one."""
    other_generations: int
    """Replayed turns that generated another number of tokens."""
    durations: Durations


def fidelity(log: MergedLog, plays: Plays) -> Fidelity:
    """Compare a replay's merged log with what it played (its times scaled as they were played)."""
    generations = [event for event in log.of("generate") if event.trajectory_id in plays]
    recorded = [plays[event.trajectory_id].turns[event.data["turn"]] for event in generations]
    pairs = list(zip(generations, recorded, strict=True))
    return Fidelity(
        turns=sum(len(trajectory.turns) for trajectory in plays.values()),
        replayed_turns=len(generations),
        other_prompts=sum(event.data["prompt_tokens"] != turn.prompt_tokens for event, turn in pairs),
        other_generations=sum(event.data["generated_tokens"] != turn.generated_tokens for event, turn in pairs),
        durations=_durations([*_resets(log.of("reset"), plays), *_actions(log.of("act"), plays)]),
    )


def _resets(events: Iterable[Event], plays: Plays) -> list[tuple[float, float]]:
    """Recorded and measured seconds of the resets that were not instant."""
    pairs = [(plays[event.trajectory_id].reset_s, event) for event in events if not failed(event)]
    return [(recorded_s, event.data["service_s"]) for recorded_s, event in pairs if recorded_s]


def _actions(events: Iterable[Event], plays: Plays) -> list[tuple[float, float]]:
    """Recorded and measured seconds of the turns that led to an action."""
    pairs = [(plays[e.trajectory_id].turns[e.data["turn"]].environment_s, e) for e in events if not failed(e)]
    return [(recorded_s, event.data["service_s"]) for recorded_s, event in pairs if recorded_s is not None]


def _durations(pairs: list[tuple[float, float]]) -> Durations:
    recorded_s, measured_s = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    total_pct = 100 * (measured_s - recorded_s) / recorded_s if recorded_s else None
    each_pct = [100 * (measured - recorded) / recorded for recorded, measured in pairs if recorded]
    excess_s = [measured - recorded for recorded, measured in pairs]
    return Durations(
        actions=len(pairs),
        recorded_s=recorded_s,
        measured_s=measured_s,
        total_pct=total_pct,
        action_pct_p50=percentile(each_pct, 0.5),
        action_pct_p99=percentile(each_pct, 0.99),
        action_pct_largest=max(each_pct, key=abs, default=None),
        excess_s_p50=percentile(excess_s, 0.5),
        excess_s_p99=percentile(excess_s, 0.99),
        within_share=sum(abs(pct) <= TOLERANCE_PCT for pct in each_pct) / len(each_pct) if each_pct else None,
        within=None if total_pct is None else abs(total_pct) <= TOLERANCE_PCT,
    )
