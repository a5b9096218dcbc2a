"""Reads a trace from any format that is known here: the project's own, or one that is imported.

`load` takes a file, plain or gzipped, a directory of ATIF documents or the directory of a run (its event logs are
recorded), and guesses the format by its content unless it is told. An imported trace states in its header what was
assumed, and counts what was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.errors import ConfigError, FormatError, nearest
from makespan.rollout.replay import abench, atif, sessions
from makespan.rollout.replay.recorder import Recorder
from makespan.rollout.replay.trace import (
    TRACE_FORMAT,
    Trace,
    TraceHeader,
    TraceTrajectory,
    collect,
    read_lines,
    read_trace,
)
from makespan.rollout.telemetry.merge import merge, merge_directory

FORMATS = ("makespan", "run", "sessions", "abench", "atif")

_PARSERS: dict[str, tuple[Callable[[bytes], list[TraceTrajectory]], tuple[str, ...]]] = {
    "sessions": (sessions.parse_session, sessions.ASSUMPTIONS),
    "abench": (abench.parse_session, abench.ASSUMPTIONS),
    "atif": (atif.parse_document, atif.ASSUMPTIONS),
}


def load(path: Path, format_: str | None = None, *, skip_bad: bool = False) -> Trace:
    """The trace in `path`. With `skip_bad` bad trajectories are left out and counted in `header.dropped["bad"]`.

    Raises `FormatError` naming file, line and field, and `ConfigError` for an unknown format.
    """
    if format_ is None:
        format_ = guess(path)
    if format_ not in FORMATS:
        raise ConfigError(f"--format: unknown format {format_!r}{nearest(format_, FORMATS)}")
    if format_ == "makespan":
        trace = read_trace(path, skip_bad=skip_bad)
    elif format_ == "run":
        log = merge_directory(path / "events") if path.is_dir() else merge([path])
        trace = Recorder(log, source=f"run: {path.name}").trace()
    else:
        parse, assumptions = _PARSERS[format_]
        documents = _documents(path) if format_ == "atif" else read_lines(path)
        trajectories, bad = collect(path, documents, parse, skip_bad)
        header = TraceHeader(
            source=f"{format_}: {path.name}", assumptions=assumptions, dropped={"bad": bad} if bad else {}
        )
        trace = Trace(header, tuple(trajectories))
    if not trace.trajectories:
        raise FormatError(f"{path}: no trajectory in it can be used ({trace.header.dropped or 'it is empty'})")
    return trace


def guess(path: Path) -> str:
    """The format of a file or directory, by its beginning. Raises `FormatError`."""
    if path.is_dir():
        return "run" if (path / "events").is_dir() else "atif"
    try:
        _, line = next(read_lines(path), (0, b""))
        document: Any = msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return "atif"  # a document over many lines; if it is none, its importer says so
    keys = document.keys() if isinstance(document, dict) else ()
    if isinstance(document, dict) and document.get("format") == TRACE_FORMAT:
        return "makespan"
    if "host_boot_id" in keys:
        return "run"
    if "schema_version" in keys:
        return "atif"
    if "session_id" in keys and "turns" in keys:
        return "abench"
    if "id" in keys and "steps" in keys:
        return "sessions"
    raise FormatError(f"{path}, line 1: no known trace format ({', '.join(FORMATS)}); name one with --format")


def _documents(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered ATIF documents: the files of a directory, the lines of a file, or the file itself."""
    files = sorted([*path.glob("*.json"), *path.glob("*.json.gz")]) if path.is_dir() else [path]
    number = 0
    for file in files:
        lines = list(read_lines(file))
        whole = len(lines) > 1 and not _is_json(lines[0][1])
        for _, document in [(1, b"".join(line for _, line in lines))] if whole else lines:
            number += 1
            yield number, document


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return False
    return True
