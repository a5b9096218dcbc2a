"""The trace: what a batch of trajectories did, in lengths and times, free of any model and machine.

A trace file is JSON lines, plain or gzipped. The first line is a `TraceHeader`, every other one a `TraceTrajectory`.
A trajectory's context only grows: a turn's prompt is the previous prompt, what was generated, and the environment's
response. The reader refuses what cannot have happened, naming file, line and field.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.errors import FormatError, MakespanError

TRACE_FORMAT = "makespan-trace"
TRACE_VERSION = 1


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a trace file."""

    format: str = TRACE_FORMAT
    version: int = TRACE_VERSION
    source: str = ""
    """Where the trajectories come from."""
    assumptions: tuple[str, ...] = ()
    """What was assumed where the source does not say (caps, filters, lengths)."""
    dropped: dict[str, int] = {}
    """Trajectories of the source that are not here, counted by reason."""


class TraceTurn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One inference and the action that followed it."""

    prompt_tokens: int
    generated_tokens: int
    observation_tokens: int = 0
    """Tokens that the next prompt gains beyond the generated ones; 0 after the last turn."""
    environment_s: float | None = None
    """Seconds that the action ran, waiting excluded; None: the turn led to no action (the agent's last word)."""
    cached_tokens: int | None = None
    """Of the prompt, where it was recorded; a replay does not use it."""
    start_s: float | None = None
    """When the turn began, from the trajectory's start; a replay does not use it."""
    generated_ids: list[int] | None = None
    observation_ids: list[int] | None = None


class TraceTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory. Those of the same `group` attempt the same task from the same prompt."""

    trajectory_id: str
    task_id: str
    group: str
    turns: tuple[TraceTurn, ...]
    reset_s: float = 0.0
    """What starting its environment took."""
    max_turns: int | None = None
    max_tokens: int | None = None
    reward: float | None = None
    prompt_ids: list[int] | None = None
    """The first prompt, where it was kept."""


class Trace(msgspec.Struct, frozen=True):
    """A trace in memory."""

    header: TraceHeader
    trajectories: tuple[TraceTrajectory, ...]


class TraceError(MakespanError):
    """A trajectory that cannot have happened: the field, the value seen, and what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


_FIGURES = ("prompt_tokens", "generated_tokens", "observation_tokens", "cached_tokens", "environment_s", "start_s")


def check(trajectory: TraceTrajectory) -> None:
    """Raise `TraceError` for a trajectory that is not consistent."""
    _not_negative("reset_s", trajectory.reset_s)
    if not trajectory.turns:
        raise TraceError("turns", "a trajectory needs at least one turn")
    for name in ("max_turns", "max_tokens"):
        cap = getattr(trajectory, name)
        if cap is not None and cap < 1:
            raise TraceError(name, f"a cap must be at least 1, not {cap}")
    if trajectory.max_turns is not None and len(trajectory.turns) > trajectory.max_turns:
        raise TraceError("turns", f"{len(trajectory.turns)} turns, and max_turns is {trajectory.max_turns}")
    if trajectory.prompt_ids is not None and len(trajectory.prompt_ids) != trajectory.turns[0].prompt_tokens:
        seen = f"{len(trajectory.prompt_ids)} ids for {trajectory.turns[0].prompt_tokens} tokens"
        raise TraceError("prompt_ids", seen)
    before: TraceTurn | None = None
    for number, turn in enumerate(trajectory.turns):
        _check_turn(f"turns[{number}]", turn, before)
        before = turn


def _check_turn(where: str, turn: TraceTurn, before: TraceTurn | None) -> None:
    for name in _FIGURES:
        _not_negative(f"{where}.{name}", getattr(turn, name))
    for name in ("prompt_tokens", "generated_tokens"):
        if getattr(turn, name) == 0:
            raise TraceError(f"{where}.{name}", "an inference has at least one token, not 0")
    if turn.cached_tokens is not None and turn.cached_tokens > turn.prompt_tokens:
        message = f"a cached prefix of {turn.cached_tokens} tokens is longer than the prompt of {turn.prompt_tokens}"
        raise TraceError(f"{where}.cached_tokens", message)
    for name in ("generated", "observation"):
        ids, tokens = getattr(turn, f"{name}_ids"), getattr(turn, f"{name}_tokens")
        if ids is not None and len(ids) != tokens:
            raise TraceError(f"{where}.{name}_ids", f"{len(ids)} ids for {tokens} tokens")
    if before is None:
        return
    expected = before.prompt_tokens + before.generated_tokens + before.observation_tokens
    if turn.prompt_tokens != expected:
        message = (
            f"{turn.prompt_tokens}, but the turn before leaves {before.prompt_tokens} + {before.generated_tokens} + "
            f"{before.observation_tokens} = {expected} (prompt, generated, observation)"
        )
        raise TraceError(f"{where}.prompt_tokens", message)
    if turn.start_s is not None and before.start_s is not None:
        earliest_s = before.start_s + (before.environment_s or 0.0)
        if turn.start_s < earliest_s:
            message = f"{turn.start_s} s is before {earliest_s} s, where the turn before cannot have been over"
            raise TraceError(f"{where}.start_s", f"time goes backwards: {message}")


def _not_negative(where: str, value: float | None) -> None:
    if value is not None and not (value >= 0 and math.isfinite(value)):
        raise TraceError(where, f"must be 0 or more, not {value}")


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a plain or gzipped file, empty ones left out. Raises `FormatError`."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if zipped else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError) as error:
        raise FormatError(f"cannot read the trace {str(path)!r}: {error}") from error


def read_trace(path: Path, *, skip_bad: bool = False) -> Trace:
    """Read a trace file. With `skip_bad` a bad trajectory is left out and counted in `header.dropped["bad"]`.

    Raises `FormatError` naming file, line and field.
    """
    lines = read_lines(path)
    header = read_header(path, lines)
    trajectories, bad = collect(path, lines, lambda line: (msgspec.json.decode(line, type=TraceTrajectory),), skip_bad)
    seen: set[str] = set()
    for trajectory in trajectories:
        if trajectory.trajectory_id in seen:
            raise FormatError(f"{path}: trajectory_id {trajectory.trajectory_id!r} stands more than once")
        seen.add(trajectory.trajectory_id)
    if bad:
        header = msgspec.structs.replace(header, dropped={**header.dropped, "bad": bad})
    return Trace(header, tuple(trajectories))


def read_header(path: Path, lines: Iterator[tuple[int, bytes]]) -> TraceHeader:
    """The header of a trace file. Raises `FormatError` for another format or version."""
    number, line = next(lines, (1, b""))
    try:
        document: Any = msgspec.json.decode(line)
    except msgspec.MsgspecError as error:
        raise FormatError(f"{path}, line {number}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != TRACE_FORMAT:
        raise FormatError(f"{path}, line {number}: format: a trace begins with a header of format {TRACE_FORMAT!r}")
    if document.get("version") != TRACE_VERSION:
        seen = document.get("version")
        raise FormatError(
            f"{path}, line {number}: version: trace of version {seen!r}; this makespan reads {TRACE_VERSION}"
        )
    try:
        return msgspec.convert(document, TraceHeader)
    except msgspec.ValidationError as error:
        raise FormatError(f"{path}, line {number}: {error}") from error


def collect(
    path: Path,
    lines: Iterable[tuple[int, bytes]],
    parse: Callable[[bytes], Iterable[TraceTrajectory]],
    skip_bad: bool,
) -> tuple[list[TraceTrajectory], int]:
    """The consistent trajectories of numbered lines, and how many bad lines were skipped.

    Raises `FormatError` for a bad line, unless they are to be skipped.
    """
    trajectories: list[TraceTrajectory] = []
    bad = 0
    for number, line in lines:
        try:
            parsed = list(parse(line))
            for trajectory in parsed:
                check(trajectory)
        except (msgspec.MsgspecError, TraceError) as error:
            if not skip_bad:
                raise FormatError(f"{path}, line {number}: {error}") from error
            bad += 1
        else:
            trajectories += parsed
    return trajectories, bad


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace file, gzipped when the name ends in `.gz`. Raises `TraceError` rather than write a bad one."""
    for trajectory in trace.trajectories:
        check(trajectory)
    encoder = msgspec.json.Encoder()
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        file.write(encoder.encode(trace.header) + b"\n")
        for trajectory in trace.trajectories:
            file.write(encoder.encode(trajectory) + b"\n")
