"""One view of a run out of the logs of its processes.

Logs whose header carries the same boot id were stamped by one monotonic clock and are ordered by it. A log of another
host has a clock of its own: its durations are good, its times mean nothing here, so its events are kept apart
(`elsewhere`) instead of being placed by guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.events import LOG_VERSION, Event, LogHeader

T = TypeVar("T")


class Log(msgspec.Struct, frozen=True):
    """One process's log as read back."""

    header: LogHeader
    events: tuple[Event, ...]
    torn: bool
    """The last line was cut off: the process was killed while it wrote."""


class MergedLog(msgspec.Struct, frozen=True):
    """The merged view: events as (role of the writer, event), in the order in which they happened."""

    headers: tuple[LogHeader, ...]
    events: tuple[tuple[str, Event], ...]
    elsewhere: tuple[tuple[str, Event], ...]
    """Events of hosts whose clock cannot be compared with the engine's."""
    torn: tuple[str, ...]
    """Writers whose log ends in a line that was cut off."""

    def of(self, kind: str) -> Iterator[Event]:
        """All events of a kind, those of other hosts last."""
        return (event for _, event in (*self.events, *self.elsewhere) if event.kind == kind)


def read_log(path: Path) -> Log:
    """Read one log.

    A last line that was cut off is left out and noted. Raises `FormatError` for an unknown version and for a line that
    does not parse, naming the file and the line.
    """
    lines = path.read_bytes().split(b"\n")
    complete, rest = lines[:-1], lines[-1]
    if not complete:
        raise FormatError(f"{path}: an event log begins with a header line, and this file has none")
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
    """Merge logs; the engine's own log sets the clock. Raises `FormatError` when there is no engine log."""
    logs = [read_log(path) for path in paths]
    engine = next((log for log in logs if log.header.role == "engine"), None)
    if engine is None:
        seen = ", ".join(path.name for path in paths) or "no file at all"
        raise FormatError(f"no engine log among the event logs ({seen})")
    here: list[tuple[str, Event]] = []
    elsewhere: list[tuple[str, Event]] = []
    for log in {log.header.writer: log for log in logs}.values():
        same_clock = log.header.host_boot_id == engine.header.host_boot_id
        (here if same_clock else elsewhere).extend((log.header.role, event) for event in log.events)
    here.sort(key=lambda entry: entry[1].monotonic_s)
    return MergedLog(
        headers=tuple(log.header for log in logs),
        events=tuple(here),
        elsewhere=tuple(elsewhere),
        torn=tuple(log.header.writer for log in logs if log.torn),
    )


def merge_directory(directory: Path) -> MergedLog:
    """Merge every `*.jsonl` under a run's `events/` directory."""
    return merge(sorted(directory.glob("*.jsonl")))
