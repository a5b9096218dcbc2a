"""`makespan ablate`: the ladder of policies on the same batches, as a table, JSON and a figure."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from makespan.commands.figure import Bar, write_figure
from makespan.commands.output import check_file, check_output, write_json
from makespan.commands.workload import add_workload, describe, resolve
from makespan.rollout.errors import ConfigError
from makespan.rollout.simulation.ladder import LADDER, Outcome, Paired, Rung, change_pct, climb, paired

ABLATE_VERSION = 1

FIRST_SEED = 100
"""Measured batches are not those over which the knee was averaged."""


HEADINGS = ("rung", "makespan s", "bound", "vs coupled %", "vs decoupled %", "again")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rung over all seeds; percentages are of the makespan, against `coupled` and against `decoupled`."""

    rung: str
    says: str
    makespan_s: Paired
    over_lower_bound: Paired
    against_coupled_pct: Paired
    against_decoupled_pct: Paired
    recomputed_share: float
    preemptions: float
    discarded_tokens: float
    kept_length_ratio: float


def add_ablate(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_workload(command)
    command.add_argument("--simulate", action="store_true", help="in virtual time (required: the only way so far)")
    command.add_argument("--seeds", type=int, default=8, help="batches each rung runs (default: 8)")
    command.add_argument("--figure", type=Path, metavar="PATH", help="write the ladder as an SVG image")


def run_ablate(options: argparse.Namespace, console: Console) -> int:
    """Run the command; returns the exit code. Raises `MakespanError`."""
    if not options.simulate:
        raise ConfigError("ablate runs in simulation only: add --simulate")
    check_output("--json", options.json)
    check_file("--figure", options.figure)
    work, hardware = resolve(options)
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    with console.status(f"{work.name} on {describe(hardware)}") as status:

        def show(rung: Rung, seed: int, result: Outcome) -> None:
            if not result.kept_length:
                raise ConfigError(
                    f"{work.name}, {rung.name}: no trajectory got through a turn on {describe(hardware)}: there is "
                    "nothing to compare, and `makespan simulate` shows what failed"
                )
            status.update(f"batch {seed - FIRST_SEED + 1} of {len(seeds)}, {rung.name}: {result.makespan_s:,.0f} s")

        outcomes = climb(work, hardware, seeds, on_outcome=show)
    rows = [_row(rung, outcomes) for rung in LADDER]
    figures: dict[str, Any] = {
        "version": ABLATE_VERSION,
        "workload": work.name,
        "seeds": len(seeds),
        "hardware": msgspec.to_builtins(hardware),
        "rows": msgspec.to_builtins(rows),
    }
    write_json(options.json, figures)
    title = f"{work.name}: {describe(hardware)}, {len(seeds)} batches"
    _show(console, title, rows)
    if options.figure is not None:
        bars = [Bar(row.rung, row.makespan_s.mean, row.makespan_s.se or 0.0) for row in rows]
        write_figure(options.figure, title, "makespan, s (mean and standard error)", bars)
        console.print(f"figure: {options.figure}", soft_wrap=True)
    return 0


def _row(rung: Rung, outcomes: dict[str, list[Outcome]]) -> Row:
    own = outcomes[rung.name]
    return Row(
        rung=rung.name,
        says=rung.says,
        makespan_s=paired([o.makespan_s for o in own]),
        over_lower_bound=paired([o.makespan_s / o.lower_bound_s for o in own]),
        against_coupled_pct=change_pct(own, outcomes["coupled"]),
        against_decoupled_pct=change_pct(own, outcomes["decoupled"]),
        recomputed_share=paired([o.recomputed_share for o in own]).mean,
        preemptions=paired([o.preemptions for o in own]).mean,
        discarded_tokens=paired([o.discarded_tokens for o in own]).mean,
        kept_length_ratio=paired([o.kept_length for o in own]).mean,
    )


def _show(console: Console, title: str, rows: list[Row]) -> None:
    console.print(title, soft_wrap=True)
    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "rung" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.rung,
            with_error(row.makespan_s, 0),
            f"{row.over_lower_bound.mean:.2f}",
            with_error(row.against_coupled_pct, 1, sign=True),
            with_error(row.against_decoupled_pct, 1, sign=True),
            f"{row.recomputed_share:.0%}",
        )
    console.print(table)
    console.print("bound: makespan over its lower bound; again: prefilled tokens computed before", soft_wrap=True)
    for row in rows:
        kept = f"what it keeps has {row.kept_length_ratio:.2f} of the mean length"
        cut = f"; it cuts {row.discarded_tokens:,.0f} tokens, and {kept}"
        console.print(f"{row.rung}: {row.says}{cut if row.discarded_tokens else ''}", soft_wrap=True)


def with_error(value: Paired, digits: int, *, sign: bool = False) -> str:
    """`mean ±se`, the error left out where there is none."""
    mean = f"{value.mean:{'+' if sign else ''},.{digits}f}"
    return mean if value.se is None else f"{mean} ±{value.se:.{digits}f}"
