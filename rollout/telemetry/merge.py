"""One view of a run out of the logs of its processes.

Logs whose header carries the same boot id were stamped by one monotonic clock and are ordered by it. A log of another
host has a clock of its own, and only the messages between the two say how the clocks stand to each other: an action
reached the broker after the engine had sent it and was over before the engine had its answer, so that each action
bounds the offset between the clocks from both sides (`align`). Any offset within all bounds keeps every cause before
its effect; the middle of what they leave is taken, and half its width is the error, which the view states. A log that
nothing ties to the engine's, or whose bounds contradict each other, is kept apart (`elsewhere`) instead of being
placed by guess.

The offset moves an event's place in the order (`monotonic_s`) and nothing else: the times in its data stay readings of
its own clock, and durations are differences of readings of one clock only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.events import LOG_VERSION, Event, LogHeader

T = TypeVar("T")


class HeaderMissing(FormatError):
    """A log whose process ended before its header line was written."""


class Log(msgspec.Struct, frozen=True):
    """One process's log as read back."""

    header: LogHeader
    events: tuple[Event, ...]
    torn: bool
    """The last line was cut off: the process was killed while it wrote."""


class Alignment(msgspec.Struct, frozen=True, kw_only=True):
    """How another host's clock was placed on the engine's."""

    writer: str
    offset_s: float
    """Its reading minus the engine's at the same moment."""
    error_s: float
    """The true offset is at most this far away."""
    pairs: int
    """Actions that bound it."""


class MergedLog(msgspec.Struct, frozen=True):
    """The merged view: events as (role of the writer, event), in the order in which they happened."""

    headers: tuple[LogHeader, ...]
    events: tuple[tuple[str, Event], ...]
    elsewhere: tuple[tuple[str, Event], ...]
    """Events of hosts whose clock cannot be compared with the engine's."""
    torn: tuple[str, ...]
    """Writers whose log ends in a line that was cut off."""
    alignments: tuple[Alignment, ...] = ()
    missing: tuple[str, ...] = ()
    """Logs that are not here, although others speak of them or their file is, one sentence each."""

    def of(self, kind: str) -> Iterator[Event]:
        """All events of a kind, those of other hosts last."""
        return (event for _, event in (*self.events, *self.elsewhere) if event.kind == kind)


def read_log(path: Path) -> Log:
    """Read one log.

    A last line that was cut off is left out and noted; blank lines at the end are nothing. Raises `HeaderMissing`
    without a complete first line, and `FormatError` for an unknown version and for a line that does not parse, naming
    the file and the line.
    """
    lines = path.read_bytes().split(b"\n")
    complete, rest = lines[:-1], lines[-1].strip()
    while complete and not complete[-1].strip():
        complete.pop()
    if not complete:
        raise HeaderMissing(f"{path}: an event log begins with a header line, and this file has no complete one")
    version = _decode(complete[0], dict, path, 1).get("version")
    if version != LOG_VERSION:
        raise FormatError(f"{path}: event log of version {version!r}; this makespan reads version {LOG_VERSION}")
    header = _decode(complete[0], LogHeader, path, 1)
    events = {}
    for number, line in enumerate(complete[1:], start=2):
        event = _decode(line, Event, path, number)
        events[event.seq] = event  # a line written twice counts once
    return Log(header, tuple(events.values()), torn=bool(rest))


def _decode(line: bytes, type_: type[T], path: Path, number: int) -> T:
    try:
        return msgspec.json.decode(line, type=type_)
    except msgspec.MsgspecError as error:
        raise FormatError(f"{path}, line {number}: {error}") from error


def merge(paths: list[Path]) -> MergedLog:
    """Merge logs; the engine's own log sets the clock, and only that one is indispensable.

    Raises `FormatError` when there is no engine log, and when there are those of two engines: they are two runs.
    """
    read, headless = [], []
    for path in paths:
        try:
            read.append(read_log(path))
        except HeaderMissing:
            headless.append(f"the log {path.name} ends before its header does: what its process saw is not here")
    logs = _by_writer(read)
    engine = _engine(logs, paths, headless)
    here: list[tuple[str, Event]] = []
    elsewhere: list[tuple[str, Event]] = []
    alignments = []
    for log in logs:
        entries = [(log.header.role, event) for event in log.events]
        if log.header.host_boot_id == engine.header.host_boot_id:
            here += entries
        elif (alignment := align(engine, log)) is not None:
            alignments.append(alignment)
            here += [(role, _moved(event, alignment.offset_s)) for role, event in entries]
        else:
            elsewhere += entries
    here.sort(key=lambda entry: entry[1].monotonic_s)  # stable: one writer's events keep their order
    return MergedLog(
        headers=tuple(log.header for log in logs),
        events=tuple(here),
        elsewhere=tuple(elsewhere),
        torn=tuple(log.header.writer for log in logs if log.torn),
        alignments=tuple(alignments),
        missing=(*headless, *_missing(logs, engine)),
    )


def _engine(logs: list[Log], paths: list[Path], headless: list[str]) -> Log:
    engines = [log for log in logs if log.header.role == "engine"]
    if not engines:
        seen = "; ".join([", ".join(path.name for path in paths) or "no file at all", *headless])
        raise FormatError(f"no engine log among the event logs ({seen})")
    if len(engines) > 1:
        writers = ", ".join(log.header.writer for log in engines)
        raise FormatError(f"the event logs of {len(engines)} engines ({writers}): merge those of one run at a time")
    return engines[0]


def _by_writer(logs: Iterable[Log]) -> list[Log]:
    """One log a writer: copies of a log, complete or not, are one log, and an event counts once by (writer, seq)."""
    merged: dict[str, Log] = {}
    for log in logs:
        known = merged.get(log.header.writer)
        if known is not None:
            events = {event.seq: event for event in (*known.events, *log.events)}
            log = Log(log.header, tuple(events[seq] for seq in sorted(events)), torn=known.torn and log.torn)
        merged[log.header.writer] = log
    return list(merged.values())


def _moved(event: Event, offset_s: float) -> Event:
    return msgspec.structs.replace(event, monotonic_s=event.monotonic_s - offset_s)


def _missing(logs: list[Log], engine: Log) -> Iterator[str]:
    server = next((e.data.get("server") for e in engine.events if e.kind == "environment_server"), None)
    if server is not None and not any(log.header.role == "broker" for log in logs):
        yield f"the log of the environment server {server} is not here: slot times are what its replies said"


def align(engine: Log, other: Log) -> Alignment | None:
    """Where another host's clock stands against the engine's; None when no action tells, or when they disagree.

    An action that the engine sent at `s` and had its answer of at `r`, on its clock, and that the other side took in at
    `b` and finished at `e`, on its own, bounds the offset by `e - r <= offset <= b - s`.

    Only actions that surely are the same on both sides count. A restarted chain repeats its names, and either side may
    have lost one of the attempts; jobs that share a server may use the same names; and a failed action may go on after
    the engine was told.
    """
    restarted = {event.trajectory_id for event in engine.events if event.kind == "restarted"}
    sent = actions_by_name(engine.events, "reset", "act")
    received = {name: events for name, events in actions_by_name(other.events, "action").items() if name in sent}
    if len(jobs(event for events in received.values() for event in events)) > 1:
        return None
    low_s, high_s, pairs = float("-inf"), float("inf"), 0
    for name, there in received.items():
        here = sent[name]
        if len(here) > 1 or len(there) > 1 or name[0] in restarted or failed(here[0]) or failed(there[0]):
            continue
        low_s = max(low_s, there[0].data["released_s"] - here[0].monotonic_s)
        high_s = min(high_s, there[0].data["submitted_s"] - here[0].data["start_s"])
        pairs += 1
    if not pairs or low_s > high_s:
        return None
    return Alignment(
        writer=other.header.writer, offset_s=(low_s + high_s) / 2, error_s=(high_s - low_s) / 2, pairs=pairs
    )


def actions_by_name(events: Iterable[Event], *kinds: str) -> dict[tuple[str, int], list[Event]]:
    """Events of actions by what both sides call an action: its trajectory, and its number in the session (reset: 0)."""
    found: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in events:
        if event.kind in kinds:
            found[event.trajectory_id, _number(event)].append(event)
    return found


def _number(event: Event) -> int:
    if event.kind == "reset":
        return 0
    return int(event.data["turn"] + 1 if event.kind == "act" else event.data["seq"])


def failed(event: Event) -> bool:
    """Whether an action's event says that it failed; those of older logs had all succeeded and say nothing."""
    return bool(event.data.get("outcome", "ok") != "ok")


def jobs(events: Iterable[Event]) -> set[str]:
    """The jobs that a server's `action` events were of."""
    return {event.data.get("job", "") for event in events}


def merge_directory(directory: Path) -> MergedLog:
    """Merge every `*.jsonl` under a run's `events/` directory."""
    return merge(sorted(directory.glob("*.jsonl")))
