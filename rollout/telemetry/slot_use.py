"""What the environment actions took of their slots.

An action that went well carries the times that the owner of the slots measured, in its reply. One that failed may have
brought none (nobody answered), or too little: a slot stays taken until the tool behind it has really ended, however
early the client was told. Of those the server's own log is the authority, where it was merged; where it was not, their
times are "not measured".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog, actions_by_name, failed, jobs

SLOTLESS = frozenset({"busy", "unknown_session"})
"""Failures of requests that the server turned away: where its log knows of no action, there was none."""


class SlotUse(msgspec.Struct, frozen=True, kw_only=True):
    """One action, or the failed attempts at one; seconds None: not measured."""

    trajectory_id: str
    slot_class: str
    """Empty: no slot was needed, or, of a failed action, nobody said which."""
    actions: int
    elapsed_s: float
    """As the engine saw it."""
    queue_s: float | None
    service_s: float | None

    def seconds(self) -> tuple[float, float] | None:
        """(waiting, running) out of the trajectory's own time, which does not wait for a slot to be freed."""
        if self.queue_s is None or self.service_s is None:
            return None
        queue_s = min(self.queue_s, self.elapsed_s)
        return queue_s, min(self.service_s, self.elapsed_s - queue_s)


def slot_uses(log: MergedLog) -> list[SlotUse]:
    """All actions of the engine, measured by whoever knows."""
    events = (event for kind in ("reset", "act") for event in log.of(kind))
    sent = actions_by_name(events, "reset", "act")
    records = {name: found for name, found in actions_by_name(log.of("action"), "action").items() if name in sent}
    known = any(header.role == "broker" for header in log.headers)
    if len(jobs(record for found in records.values() for record in found)) > 1:
        known = False  # jobs that share the server use the same names: which is whose cannot be told
    return [use for name, attempts in sent.items() for use in _uses(attempts, records.get(name, []) if known else None)]


def _uses(attempts: list[Event], records: list[Event] | None) -> Iterator[SlotUse]:
    """The uses under one name, which a chain that was restarted repeats; `records` None: the server's are not here."""
    succeeded = [event for event in attempts if not failed(event)]
    for event in succeeded:
        yield SlotUse(
            trajectory_id=event.trajectory_id,
            slot_class=event.data["slot_class"],
            actions=1,
            elapsed_s=event.monotonic_s - event.data["start_s"],
            queue_s=event.data["queue_s"],
            service_s=event.data["service_s"],
        )
    failures = [event for event in attempts if failed(event)]
    if failures and records is not None:
        went_well = [record for record in records if not failed(record)][: len(succeeded)]
        records = [record for record in records if record not in went_well]
        if len(records) < sum(event.data["outcome"] not in SLOTLESS for event in failures):
            records = None  # one is not over yet, or its record is lost
    if failures:
        yield _failures(failures, records)


def _failures(failures: list[Event], records: list[Event] | None) -> SlotUse:
    queue_s: list[float | None]
    service_s: list[float | None]
    if records is not None:
        queue_s = [_granted_s(record) - record.data["submitted_s"] for record in records]
        service_s = [record.data["released_s"] - _granted_s(record) for record in records]
    else:
        queue_s = [event.data["queue_s"] for event in failures]
        service_s = [event.data["service_s"] for event in failures]
    classes = [event.data["slot_class"] for event in (*(records or ()), *failures)]
    return SlotUse(
        trajectory_id=failures[0].trajectory_id,
        slot_class=next((name for name in classes if name), ""),
        actions=len(queue_s),
        elapsed_s=sum(event.monotonic_s - event.data["start_s"] for event in failures),
        queue_s=total(queue_s),
        service_s=total(service_s),
    )


def _granted_s(record: Event) -> float:
    """When it got its slot; one that was withdrawn before waited to its end and ran for no time."""
    granted_s = record.data["granted_s"]
    return float(record.data["released_s"] if granted_s is None else granted_s)


def total(values: Sequence[float | None]) -> float | None:
    """The sum, None as soon as one was not measured."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
