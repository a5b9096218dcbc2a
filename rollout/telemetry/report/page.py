"""The report as one HTML file: tables that need no script, and the data and script for what moves.

Figures, decomposition and configuration are plain HTML, one column a run. Timelines and curves are drawn by the script
(`assets/`) from the data that stands in the page. Nothing is loaded from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import msgspec

from makespan.rollout.telemetry.report.packing import packed_run
from makespan.rollout.telemetry.report.run import ReportedRun
from makespan.rollout.telemetry.timeline import WAITING, Phase
from makespan.rollout.telemetry.tracking import METRICS, metric_of

NOT_MEASURED = '<span class="unknown">not measured</span>'

LETTERS = {
    Phase.ADMISSION: "A",
    Phase.REPLICA_QUEUE: "Q",
    Phase.PREFILL: "P",
    Phase.RECOMPUTATION: "R",
    Phase.DECODE: "D",
    Phase.INFERENCE: "I",
    Phase.SLOT_QUEUE: "S",
    Phase.ENVIRONMENT: "E",
    Phase.ACTION: "X",
    Phase.OTHER: "O",
}
"""Each phase has a letter beside its colour: what is told by colour alone is not told to everybody."""

CHAIN = {
    "admission": Phase.ADMISSION,
    "replica_queue": Phase.REPLICA_QUEUE,
    "prefill": Phase.PREFILL,
    "recomputation": Phase.RECOMPUTATION,
    "decode": Phase.DECODE,
    "slot_queue": Phase.SLOT_QUEUE,
    "environment": Phase.ENVIRONMENT,
    "overhead": Phase.OTHER,
}

HEADLINES = (
    ("makespan_s", "makespan"),
    ("over_lower_bound", "over the lower bound"),
    ("tail/after_90_s", "tail after 90%"),
    ("tokens/cached_share", "prompt tokens cached"),
    ("trajectories/failed", "failed"),
)

SCRIPTS = ("uPlot.iife.min.js", "unpack.js", "charts.js", "timeline.js", "details.js", "report.js")


def write_report(path: Path, runs: Sequence[ReportedRun]) -> None:
    """Write the report of one run, or of several side by side. Raises `OSError`."""
    path.write_text(render(runs), encoding="utf-8")


def render(runs: Sequence[ReportedRun]) -> str:
    """The report as an HTML document."""
    named = _with_unique_names(runs)
    data = {
        "phases": [{"label": phase.label, "letter": LETTERS[phase], "waiting": phase in WAITING} for phase in Phase],
        "runs": [packed_run(run) for run in named],
    }
    # In a script element only `<` could end it early.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return Template(_asset("report.html")).substitute(
        title=escape("makespan: " + ", ".join(run.name for run in named)),
        style=_asset("uPlot.min.css") + _asset("report.css"),
        names=", ".join(f"<b>{escape(run.name)}</b>" for run in named),
        headlines="".join(_headlines(named)),
        notes="".join(_notes(named)),
        decomposition="".join(_decomposition(named)),
        legend="".join(_legend()),
        figures="".join(_figures(named)),
        configuration="".join(_configuration(named)),
        data=encoded,
        script="\n".join(_asset(name) for name in SCRIPTS),
    )


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _with_unique_names(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    seen: dict[str, int] = {}
    named = []
    for run in runs:
        seen[run.name] = seen.get(run.name, 0) + 1
        name = run.name if seen[run.name] == 1 else f"{run.name} ({seen[run.name]})"
        named.append(msgspec.structs.replace(run, name=name))
    return named


def value_text(name: str, value: float | None) -> str:
    """A figure for people, with its unit, as HTML."""
    if value is None:
        return '<span class="unknown">no limit</span>' if name == "concurrency/reference" else NOT_MEASURED
    last = name.rpartition("/")[2]
    if name.endswith("_share") or last == "utilisation":
        return f"{value:.1%}"
    if "_s/" in name or name.endswith("_s"):
        return f"{value:,.3f} s" if abs(value) < 1 else f"{value:,.1f} s"
    if name.startswith("completion_s"):
        return f"{value:,.1f} s"
    if name == "over_lower_bound":
        return f"{value:.2f} ×"
    return f"{value:,.0f}" if float(value).is_integer() and name != "reward/mean" else f"{value:,.3f}"


def _headlines(runs: Sequence[ReportedRun]) -> Iterator[str]:
    for run in runs:
        yield '<div class="headline">'
        if len(runs) > 1:
            yield f"<h3>{escape(run.name)}</h3>"
        yield "<dl>"
        for name, label in HEADLINES:
            yield f"<div><dt>{label}</dt><dd>{value_text(name, run.figures[name])}</dd></div>"
        yield "</dl></div>"


def _notes(runs: Sequence[ReportedRun]) -> Iterator[str]:
    for run in runs:
        prefix = f"{escape(run.name)}: " if len(runs) > 1 else ""
        notes = list(run.notes)
        if not run.analysis.complete:
            notes.insert(0, "the log ends before the batch did: all figures are of what there is")
        yield from (f"<li>{prefix}{escape(note)}</li>" for note in notes)


def _swatch(phase: Phase) -> str:
    return f'<span class="swatch phase-{phase:d}" aria-hidden="true">{LETTERS[phase]}</span>'


def _legend() -> Iterator[str]:
    for phase in Phase:
        yield f'<li data-phase="{phase:d}">{_swatch(phase)}{phase.label}</li>'


def _decomposition(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """The last chain of each run as a bar and as a table, on one scale."""
    longest_s = max((run.analysis.makespan_s for run in runs), default=0.0) or 1.0
    for run in runs:
        chain = run.analysis.last_chain
        if chain is None:
            yield f"<p><b>{escape(run.name)}</b>: no trajectory ended, so there is no last one.</p>"
            continue
        yield f'<p class="chain"><b>{escape(run.name)}</b>: {escape(chain.trajectory_id)}, {chain.turns} turns, '
        yield f"{chain.total:,.1f} s</p>"
        parts = [(phase, getattr(chain, name)) for name, phase in CHAIN.items()]
        if any(value is None for phase, value in parts if phase in (Phase.PREFILL, Phase.DECODE)):
            parts.insert(1, (Phase.INFERENCE, chain.inference))
        if chain.environment is None:  # nobody measured its actions: what is left of its time
            parts.append((Phase.ACTION, chain.total - sum(value for _, value in parts if value is not None)))
        shown = [(phase, value) for phase, value in parts if value is not None and value > 0]
        text = ", ".join(f"{phase.label} {value:,.1f} s" for phase, value in shown)
        yield f'<div class="bar" role="img" aria-label="{escape(text)}">'
        for phase, value in shown:
            width = 100 * value / longest_s
            letter = LETTERS[phase] if width > 2 else ""
            title = f"{phase.label}: {value:,.1f} s"
            yield f'<span class="phase-{phase:d}" style="width:{width:.3f}%" title="{title}">{letter}</span>'
        yield "</div>"


def _figures(runs: Sequence[ReportedRun]) -> Iterator[str]:
    """Every figure, a column a run, in the order of `METRICS`."""
    names = sorted({name for run in runs for name in run.figures}, key=lambda name: _place(runs, name))
    yield "<thead><tr><th scope='col'>figure</th>"
    yield from (f"<th scope='col' class='number'>{escape(run.name)}</th>" for run in runs)
    yield "<th scope='col'>good is</th><th scope='col'>meaning</th></tr></thead><tbody>"
    for name in names:
        metric = metric_of(name)
        yield f"<tr data-figure='{escape(name)}'><th scope='row'>{escape(name)}</th>"
        for run in runs:
            yield f"<td class='number'>{value_text(name, run.figures.get(name))}</td>"
        good = "–" if metric.better == "neither" else metric.better
        yield f"<td>{good}</td><td>{escape(metric.meaning)}</td></tr>"
    yield "</tbody>"


def _place(runs: Sequence[ReportedRun], name: str) -> tuple[int, str]:
    return METRICS.index(metric_of(name)), name


def _configuration(runs: Sequence[ReportedRun]) -> Iterator[str]:
    names = list(dict.fromkeys(name for run in runs for name in run.configuration))
    yield "<thead><tr><th scope='col'>setting</th>"
    yield from (f"<th scope='col'>{escape(run.name)}</th>" for run in runs)
    yield "</tr></thead><tbody>"
    for name in names:
        values = [run.configuration.get(name) for run in runs]
        opened, mark = ("<tr class='differs'>", "≠ ") if len(set(values)) > 1 else ("<tr>", "")
        yield f"{opened}<th scope='row'>{mark}{escape(name)}</th>"
        yield from (f"<td>{'–' if value is None else escape(value)}</td>" for value in values)
        yield "</tr>"
    yield "</tbody>"
