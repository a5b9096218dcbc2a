"""Why an action of a trajectory got its slot when it did, read from the event log.

An action waits with a key. It is submitted with one, passes of the coordinator may give it others, and it is granted
its slot by the one that stands then, or by its age. The log has all three: `act` (with the forecast behind the first
key), `rekey` (the smallest keys of a pass and the forecasts behind them), and the grant, which the owner of the slots
wrote.
"""

from __future__ import annotations

from typing import Any

import msgspec

from makespan.rollout.coordinator import Outlook
from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.gate import Grant
from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog


class ActionExplained(msgspec.Struct, frozen=True, kw_only=True):
    """One action of a trajectory. Times are seconds from the batch's start."""

    turn: int
    slot_class: str
    submitted_s: float
    queue_s: float
    service_s: float
    key: float
    """What it was submitted with."""
    why: Outlook | None
    """The forecast behind its last known key; None where the policy forecasts nothing."""
    rekeyed: int
    """Passes in which it was among the first in line, and so was logged."""
    grant: Grant | None
    """What it was granted by; None where the log of the slots' owner is not here."""
    waiting: int
    """Other actions of the class that waited when it was granted."""
    overtook: int
    """Of these, how many had come before it."""
    overtaken_by: int
    """Actions that came after it and were granted before it."""


def explain(log: MergedLog, trajectory_id: str) -> list[ActionExplained]:
    """All actions of a trajectory that held a slot, in order. Raises `ConfigError` for one that is not in the log."""
    start = next(log.of("batch_start"), None)
    known = {event.trajectory_id for event in log.of("submitted")}
    if trajectory_id not in known:
        raise ConfigError(f"no trajectory {trajectory_id!r} in this run{nearest(trajectory_id, sorted(known))}")
    begin_s = 0.0 if start is None else start.monotonic_s
    actions = [event for event in log.of("act") if event.data["outcome"] == "ok" and event.data["slot_class"]]
    grants = _grants(log)
    passes = list(log.of("rekey"))
    found = []
    for event in actions:
        if event.trajectory_id != trajectory_id:
            continue
        submitted_s, granted_s = _times(event)
        others = [
            _times(other)
            for other in actions
            if other is not event and other.data["slot_class"] == event.data["slot_class"]
        ]
        waiting = [times for times in others if times[0] <= granted_s < times[1]]
        ranked = [p.data["first"][trajectory_id] for p in passes if _covers(p, event, trajectory_id)]
        why = ranked[-1] if ranked else event.data.get("why")
        grant = event.data.get("grant") or grants.get((trajectory_id, event.data["turn"]))
        found.append(
            ActionExplained(
                turn=event.data["turn"],
                slot_class=event.data["slot_class"],
                submitted_s=submitted_s - begin_s,
                queue_s=event.data["queue_s"],
                service_s=event.data["service_s"],
                key=event.data.get("key", 0.0),
                why=None if why is None else msgspec.convert(why, Outlook),
                rekeyed=len(ranked),
                grant=None if grant is None else msgspec.convert(grant, Grant),
                waiting=len(waiting),
                overtook=sum(times[0] < submitted_s for times in waiting),
                overtaken_by=sum(times[0] > submitted_s and times[1] < granted_s for times in others),
            )
        )
    return found


def _times(event: Event) -> tuple[float, float]:
    """When an action began to wait, and when it was granted its slot."""
    start_s: float = event.data["start_s"]
    return start_s, start_s + (event.data["queue_s"] or 0.0)


def _covers(event: Event, action: Event, trajectory_id: str) -> bool:
    """Whether a pass gave this action a key that was logged."""
    submitted_s, granted_s = _times(action)
    return submitted_s <= event.monotonic_s <= granted_s and trajectory_id in event.data["first"]


def _grants(log: MergedLog) -> dict[tuple[str, int], dict[str, Any]]:
    """The broker's grants of steps, by trajectory and turn: the n-th step that was granted is that of turn n."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    turns: dict[str, int] = {}
    for event in log.of("action"):
        if event.data.get("granted_s") is None or not event.data["slot_class"].endswith(".step"):
            continue
        turn = turns.get(event.trajectory_id, 0)
        turns[event.trajectory_id] = turn + 1
        if "key" in event.data:
            found[event.trajectory_id, turn] = {"key": event.data["key"], "by_age": event.data["by_age"]}
    return found
