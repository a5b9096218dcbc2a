"""One run as a report takes it: its merged log, what was computed from that, and what surrounds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.analysis import BatchAnalysis, analyse
from makespan.rollout.telemetry.merge import MergedLog, merge
from makespan.rollout.telemetry.timeline import Row, batch_start, rows
from makespan.rollout.telemetry.tracking import tracked
from makespan.rollout.yaml_document import NOT_YAML, parse_yaml


class ReportedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run to report on."""

    name: str
    log: MergedLog
    analysis: BatchAnalysis
    timeline: list[Row]
    figures: dict[str, float | None]
    """`tracked`'s: None is "not measured"."""
    configuration: dict[str, str]
    """Settings by dotted name; where no configuration file is, what the log itself says of the run."""
    notes: list[str]


def reported(
    log: MergedLog, *, name: str, configuration: Mapping[str, Any] | None = None, notes: list[str] | None = None
) -> ReportedRun:
    """A run out of its merged log. Raises `FormatError` when that does not hold exactly one batch."""
    analysis = analyse(log)
    timeline = rows(log)
    settings = _from_log(log) if configuration is None else configuration
    return ReportedRun(
        name=name,
        log=log,
        analysis=analysis,
        timeline=timeline,
        figures=tracked(log, analysis, timeline),
        configuration=dict(_flat(settings)),
        notes=list(dict.fromkeys([*(notes or []), *_log_notes(log)])),
    )


def read_run(path: Path) -> ReportedRun:
    """Read a run: a run's directory, a directory of event logs, or one event log.

    Raises `FormatError` for what is none of these, or cannot be read.
    """
    if path.is_dir():
        events = path / "events" if (path / "events").is_dir() else path
        files = sorted(events.glob("*.jsonl"))
    else:
        files = [path]
    try:
        log = merge(files)
        configuration = _document(path / "config.yaml") if path.is_dir() else None
        summary = _document(path / "summary.json") if path.is_dir() else None
    except OSError as error:
        raise FormatError(f"cannot read the run {str(path)!r}: {error.strerror}") from error
    name = path.name if path.is_dir() else path.stem
    return reported(
        log, name=name or str(path.resolve().name), configuration=configuration, notes=(summary or {}).get("notes")
    )


def _document(path: Path) -> dict[str, Any] | None:
    """A YAML or JSON file's mapping (JSON is YAML), None where there is no such file."""
    if not path.exists():
        return None
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(path.read_bytes(), type=dict)
        return msgspec.convert(parse_yaml(path.read_text()), dict)
    except (msgspec.MsgspecError, *NOT_YAML) as error:
        raise FormatError(f"{path}: {error}") from error


def _from_log(log: MergedLog) -> dict[str, Any]:
    settings: dict[str, Any] = {"batch": batch_start(log).data}
    for event in log.of("environment_server"):
        settings["environment_server"] = event.data
    for event in log.of("replica"):
        settings[str(event.data.get("replica", "replica"))] = {k: v for k, v in event.data.items() if k != "replica"}
    return settings


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "null" if value is None else str(value)


def _log_notes(log: MergedLog) -> list[str]:
    notes = list(log.missing)
    notes += [f"the last line of the log {writer} was cut off" for writer in log.torn]
    notes += [
        f"the clock of {alignment.writer} was placed on the engine's to within {alignment.error_s * 1000:.1f} ms"
        for alignment in log.alignments
    ]
    if log.elsewhere:
        notes.append("a log of another host could not be placed on the engine's clock and is left out of the timeline")
    return notes
