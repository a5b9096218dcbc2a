"""The trajectories that ended last, and why.

The reason is the phase in which a trajectory spent the most seconds beyond the batch's median trajectory: what made
it later than the others, not what it did most. A batch of which every trajectory decodes for a minute is not late
because of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from makespan.rollout.telemetry.timeline import Phase, Row


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory that ended late."""

    row: Row
    seconds: dict[Phase, float]
    reason: str


def slowest(timeline: Sequence[Row], count: int) -> list[Slow]:
    """The last `count` to end, the very last one first. Cancelled ones did not make the batch late and do not count."""
    kept = [row for row in timeline if row.state != "cancelled"]
    spent = [row.seconds() for row in kept]
    usual = {phase: median([seconds[phase] for seconds in spent]) for phase in Phase} if kept else {}
    usual_turns = median([row.turns for row in kept]) if kept else 0
    order = sorted(range(len(kept)), key=lambda index: -kept[index].end_s)[:count]
    return [
        Slow(row=kept[index], seconds=spent[index], reason=_reason(kept[index], spent[index], usual, usual_turns))
        for index in order
    ]


def _reason(row: Row, spent: dict[Phase, float], usual: dict[Phase, float], usual_turns: float) -> str:
    excess = {phase: spent[phase] - usual[phase] for phase in Phase}
    phase = max(Phase, key=lambda phase: excess[phase])
    if excess[phase] > 0:
        text = f"{phase.label} {spent[phase]:.1f} s, {excess[phase]:.1f} s beyond the median"
    else:
        phase = max(Phase, key=lambda phase: spent[phase])
        text = f"{phase.label} {spent[phase]:.1f} s, no phase beyond the median"
    text += f"; {row.turns} turns (median {usual_turns:g})"
    return f"{row.state} ({row.failure}): {text}" if row.failure else text
