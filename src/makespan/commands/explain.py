"""`makespan explain RUN TRAJECTORY`: why its actions got their slots when they did."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from makespan.commands.output import check_output, write_json
from makespan.rollout.errors import ConfigError
from makespan.rollout.telemetry.explain import ActionExplained, explain
from makespan.rollout.telemetry.merge import merge, merge_directory

HEADINGS = ("turn", "waited s", "ran s", "in line", "passed", "expects s", "slack s", "granted by")
LEGEND = """\
in line: other actions that waited when it was granted. passed: those of them that had come before it / actions that
came after it and went first. expects: seconds until the trajectory's end, by the forecast behind its key. slack: what
is left then until the slots can be through with all that is expected; negative: it would end the batch."""


def add_explain(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("run", type=Path, help="a run's directory, or an event log (`makespan simulate --events`)")
    command.add_argument("trajectory", help="its id, for example multi_turn_base_7#0")


def run_explain(options: argparse.Namespace, console: Console) -> int:
    """Run the command; returns the exit code. Raises `MakespanError`."""
    check_output("--json", options.json)
    path: Path = options.run
    if path.is_dir():
        events = path / "events"
        log = merge_directory(events if events.is_dir() else path)
    elif path.is_file():
        log = merge([path])
    else:
        raise ConfigError(f"{str(path)!r} is neither a run's directory nor an event log")
    actions = explain(log, options.trajectory)
    write_json(options.json, {"version": 1, "trajectory": options.trajectory, "actions": msgspec.to_builtins(actions)})
    table = Table(title=options.trajectory, title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for action in actions:
        table.add_row(*_cells(action))
    console.print(table)
    console.print(LEGEND, soft_wrap=True)
    return 0


def _cells(action: ActionExplained) -> list[str]:
    why, grant = action.why, action.grant
    if action.queue_s < 0.001 and not action.waiting:
        by = "a free slot"
    elif grant is None:
        by = "not known"
    else:
        by = "its age" if grant.by_age else f"key {grant.key:,.1f}"
    return [
        str(action.turn),
        f"{action.queue_s:,.2f}",
        f"{action.service_s:,.2f}",
        str(action.waiting),
        f"{action.overtook}/{action.overtaken_by}",
        "-" if why is None else f"{why.remaining_s:,.1f}",
        "-" if why is None else f"{why.slack_s:,.1f}",
        by,
    ]
