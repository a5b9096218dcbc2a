"""What every trajectory was doing at every moment: the rows of a timeline.

A row covers a trajectory from the batch's start to its end without a gap, as segments of one phase each, in seconds
from the batch's start. The engine's log says when an inference or an action began and was over; how that time divides
is what its owner measured: a replica's queue, prefill and decode, a slot's queue and the environment. The owner tells
durations and no times of day, so that the parts are laid one after the other from the beginning, and what is left of
the engine's time (messages, queues between processes) is the last part, `other`. Where the owner told nothing the
whole is one segment of a phase that says so (`inference`, `action`).
"""

from __future__ import annotations

import enum
from collections import defaultdict
from typing import NamedTuple

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog, actions_by_name, failed, jobs


class Phase(enum.IntEnum):
    """What a trajectory does. The numbers stand in report files."""

    ADMISSION = 0
    """Waiting to be admitted or, between two turns, parked until there is memory for it."""
    REPLICA_QUEUE = 1
    PREFILL = 2
    RECOMPUTATION = 3
    """Prefill of tokens that had been computed before."""
    DECODE = 4
    INFERENCE = 5
    """An inference whose replica measured no parts."""
    SLOT_QUEUE = 6
    ENVIRONMENT = 7
    ACTION = 8
    """A reset or an action of which nobody measured the parts."""
    OTHER = 9
    """Messages, the engine's own work, and whatever else nobody measured."""

    @property
    def label(self) -> str:
        """Its name for people."""
        return self.name.lower().replace("_", " ")


WAITING = frozenset({Phase.ADMISSION, Phase.REPLICA_QUEUE, Phase.SLOT_QUEUE})
"""Phases in which a trajectory waits for somebody else's work to end."""


class Segment(NamedTuple):
    """One phase, without interruption."""

    start_s: float
    end_s: float
    phase: Phase
    turn: int
    """The turn that it belongs to; -1 before the first one (admission and reset)."""
    place: str
    """The replica or the slot class; empty where there is none."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory."""

    trajectory_id: str
    group: str
    state: str
    """The state it ended in; `unfinished` when the log ends before it did."""
    end_s: float
    turns: int
    generated_tokens: int | None
    context_tokens: int | None
    """At its end."""
    reward: float | None
    failure: str
    """The kind of failure, or of what cut it; empty for none."""
    recomputed_tokens: int | None
    cached_tokens: int | None
    replicas: int
    """Replicas that served it."""
    segments: tuple[Segment, ...]

    def seconds(self) -> dict[Phase, float]:
        """Seconds by phase, 0 for those it never was in; they add up to `end_s`."""
        spent = dict.fromkeys(Phase, 0.0)
        for segment in self.segments:
            spent[segment.phase] += segment.end_s - segment.start_s
        return spent


def batch_start(log: MergedLog) -> Event:
    """The batch's first event. Raises `FormatError` without one."""
    start = next(log.of("batch_start"), None)
    if start is None:
        raise FormatError("the event log holds no batch: the run ended before its batch began")
    return start


def batch_end_s(log: MergedLog) -> float:
    """When the batch was over or, where the log ends before, when the engine was last heard of (the log's clock)."""
    end = next(log.of("batch_end"), None)
    return end.monotonic_s if end else max(event.monotonic_s for role, event in log.events if role == "engine")


def rows(log: MergedLog) -> list[Row]:
    """All trajectories of the batch, in the order in which they were submitted.

    Raises `FormatError` when the log holds no batch.
    """
    start_s, end_s = batch_start(log).monotonic_s, batch_end_s(log)
    own: dict[str, list[Event]] = defaultdict(list)
    for role, event in log.events:
        if role == "engine" and event.trajectory_id:
            own[event.trajectory_id].append(event)
    measured = _failed_actions(log)
    return [_row(trajectory_id, events, measured, start_s, end_s) for trajectory_id, events in own.items()]


def _failed_actions(log: MergedLog) -> dict[tuple[str, int], Event]:
    """The server's records of failed actions of which there is one under the name, so that it surely is that one."""
    records = {name: found for name, found in actions_by_name(log.of("action"), "action").items() if len(found) == 1}
    if len(jobs(found[0] for found in records.values())) > 1:
        return {}  # jobs that share the server use the same names
    return {name: found[0] for name, found in records.items() if failed(found[0])}


class _Cursor:
    """Lays segments one after the other."""

    def __init__(self, start_s: float) -> None:
        self._zero_s = self._at_s = start_s
        self.segments: list[Segment] = []

    def lay(self, until_s: float, phase: Phase, turn: int, place: str = "") -> None:
        """A segment up to a time on the log's clock; nothing where that is past already."""
        if until_s <= self._at_s:
            return
        last = self.segments[-1] if self.segments else None
        if last is not None and last[2:] == (phase, turn, place):
            self.segments[-1] = last._replace(end_s=until_s - self._zero_s)
        else:
            self.segments.append(Segment(self._at_s - self._zero_s, until_s - self._zero_s, phase, turn, place))
        self._at_s = until_s

    def spend(self, seconds: float, limit_s: float, phase: Phase, turn: int, place: str) -> None:
        """A segment of so many seconds, cut at `limit_s`."""
        self.lay(min(self._at_s + seconds, limit_s), phase, turn, place)


def _row(
    trajectory_id: str,
    events: list[Event],
    measured: dict[tuple[str, int], Event],
    start_s: float,
    end_s: float,
) -> Row:
    cursor = _Cursor(start_s)
    turn = -1
    admitted = False
    ended: Event | None = None
    group = ""
    generations = []
    for event in events:
        if event.kind == "submitted":
            group = event.data["group"]
        elif event.kind == "admitted":
            cursor.lay(event.monotonic_s, Phase.ADMISSION, -1)
            admitted = True
        elif event.kind == "parked":
            cursor.lay(event.data["start_s"], Phase.OTHER, turn)
            cursor.lay(event.monotonic_s, Phase.ADMISSION, event.data["turn"])
        elif event.kind == "generate":
            turn = event.data["turn"]
            generations.append(event)
            _inference(cursor, event)
        elif event.kind in ("reset", "act"):
            turn = -1 if event.kind == "reset" else event.data["turn"]
            _action(cursor, event, turn, measured)
        elif event.kind == "ended":
            ended = event
    last_s = end_s if ended is None else ended.monotonic_s
    cursor.lay(last_s, Phase.OTHER if admitted else Phase.ADMISSION, turn)
    data = {} if ended is None else ended.data
    return Row(
        trajectory_id=trajectory_id,
        group=group,
        state=data.get("state", "unfinished"),
        end_s=last_s - start_s,
        turns=data.get("turns", len(generations)),
        generated_tokens=data.get("generated_tokens"),
        context_tokens=data.get("context_tokens"),
        reward=data.get("reward"),
        failure=(data.get("failure") or {}).get("kind", ""),
        recomputed_tokens=_sum(generations, "recomputed_tokens"),
        cached_tokens=_sum(generations, "cached_tokens"),
        replicas=len({event.data["replica"] for event in generations}),
        segments=tuple(cursor.segments),
    )


def _sum(events: list[Event], field: str) -> int | None:
    values = [event.data[field] for event in events]
    return None if None in values else sum(values)


def _inference(cursor: _Cursor, event: Event) -> None:
    data, until_s = event.data, event.monotonic_s
    turn, replica = data["turn"], data["replica"]
    cursor.lay(data["start_s"], Phase.OTHER, turn)
    queue_s, prefill_s, decode_s = data["queue_s"], data["prefill_s"], data["decode_s"]
    if queue_s is None or prefill_s is None or decode_s is None:
        cursor.lay(until_s, Phase.INFERENCE, turn, replica)
        return
    cached, again = data["cached_tokens"], data["recomputed_tokens"]
    computed = 0 if cached is None else data["prompt_tokens"] - cached
    again_s = prefill_s * again / computed if again and computed else 0.0
    cursor.spend(queue_s, until_s, Phase.REPLICA_QUEUE, turn, replica)
    cursor.spend(again_s, until_s, Phase.RECOMPUTATION, turn, replica)  # the prefix comes first
    cursor.spend(prefill_s - again_s, until_s, Phase.PREFILL, turn, replica)
    cursor.spend(decode_s, until_s, Phase.DECODE, turn, replica)
    cursor.lay(until_s, Phase.OTHER, turn)


def _action(cursor: _Cursor, event: Event, turn: int, measured: dict[tuple[str, int], Event]) -> None:
    data, until_s = event.data, event.monotonic_s
    slot_class, queue_s, service_s = data["slot_class"], data["queue_s"], data["service_s"]
    cursor.lay(data["start_s"], Phase.OTHER, turn)
    record = measured.get((event.trajectory_id, turn + 1)) if failed(event) else None
    if record is not None:
        released_s, granted_s = record.data["released_s"], record.data["granted_s"]
        queue_s = (released_s if granted_s is None else granted_s) - record.data["submitted_s"]
        service_s = 0.0 if granted_s is None else released_s - granted_s
    if queue_s is None or service_s is None:
        cursor.lay(until_s, Phase.ACTION, turn, slot_class)
        return
    cursor.spend(queue_s, until_s, Phase.SLOT_QUEUE, turn, slot_class)
    cursor.spend(service_s, until_s, Phase.ENVIRONMENT, turn, slot_class)
    cursor.lay(until_s, Phase.OTHER, turn)
