"""`makespan report`: the HTML report of a run, or of several side by side, and the trace that Perfetto opens."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from makespan.commands.output import check_output
from makespan.rollout.errors import ConfigError
from makespan.rollout.telemetry.perfetto import write_trace
from makespan.rollout.telemetry.report import read_run, write_report


def add_report(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's directory, or an event log (of `simulate --events`)"
    )
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="the HTML file (default: RUN/report.html)")
    command.add_argument(
        "--perfetto", type=Path, metavar="FILE", help="also write a trace for ui.perfetto.dev or chrome://tracing"
    )


def run_report(options: argparse.Namespace, console: Console) -> int:
    """Run the command; returns the exit code. Raises `MakespanError` for runs that cannot be read."""
    paths: list[Path] = options.runs
    if options.perfetto is not None and len(paths) > 1:
        raise ConfigError(f"--perfetto: a trace is of one run, and {len(paths)} were given")
    output = options.output
    if output is None:
        if len(paths) > 1 or not paths[0].is_dir():
            raise ConfigError("-o FILE is needed: only the report of a single run's directory has a place of its own")
        output = paths[0] / "report.html"
    check_output("-o", str(output))
    check_output("--perfetto", None if options.perfetto is None else str(options.perfetto))
    runs = [read_run(path) for path in paths]
    write_report(output, runs)
    console.print(f"report: {output} ({output.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
    if options.perfetto is not None:
        write_trace(options.perfetto, runs[0].log)
        console.print(f"trace: {options.perfetto}, for ui.perfetto.dev or chrome://tracing", soft_wrap=True)
    return 0
