"""`makespan ablate`: one combination of policies after another on the same batches, as a table, JSON and a figure.

With `--simulate` in virtual time, with `--replay` on real engines (`ablate_replay.py`).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from makespan.commands.ablate_replay import Ablation, Replayed, replayed
from makespan.commands.figure import Bar, write_figure
from makespan.commands.output import check_file, check_output, write_json
from makespan.commands.replay import add_engines
from makespan.commands.workload import add_workload, describe, resolve
from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.replay.fidelity import TOLERANCE_PCT
from makespan.rollout.resources import calibration
from makespan.rollout.simulation.batch import Hardware
from makespan.rollout.simulation.ladder import (
    ABLATION,
    LADDER,
    Outcome,
    Paired,
    Rung,
    change_pct,
    climb,
    paired,
    without_past,
)
from makespan.rollout.simulation.workload import Workload, environment_to_inference

ABLATE_VERSION = 2

FIRST_SEED = 100
"""Measured batches are not those over which the knee was averaged."""

REPLAY_CHAINS, REPLAY_GROUP_SIZE, REPLAY_REPLICAS = 32, 4, 2
"""What two cores run in minutes, in enough groups to tell whether a prompt's record predicts."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One rung over all seeds; percentages are of the makespan."""

    rung: str
    says: str
    makespan_s: Paired
    over_lower_bound: Paired
    against_pct: dict[str, Paired]
    """The change of the makespan against other rungs, batch by batch."""
    recomputed_share: float
    preemptions: float
    discarded_tokens: float
    kept_length_ratio: float
    simulated_s: Paired | None = None
    """Of a replay: the makespan of the same batches in simulation."""
    simulated_pct: float | None = None
    """By how much the simulated mean deviates from the replayed one."""
    simulated_sd_pct: float | None = None
    """By how much it would in the root mean square if the replays were draws of the simulation's own ties."""


def add_ablate(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_workload(command)
    how = command.add_mutually_exclusive_group(required=True)
    how.add_argument("--simulate", action="store_true", help="in virtual time")
    how.add_argument("--replay", action="store_true", help="on real engines and a real environment server")
    command.add_argument("--seeds", type=int, help="batches each rung runs (default: 8 simulated, 3 replayed)")
    command.add_argument("--rungs", help=f"only these, separated by commas: {', '.join(_known())}")
    command.add_argument("--figure", type=Path, metavar="PATH", help="write the makespans as an SVG image")
    engines = command.add_argument_group("engines of --replay")
    add_engines(engines)
    engines.add_argument("--name", default="ablation", help="of the run directory (default: ablation)")


def run_ablate(options: argparse.Namespace, console: Console) -> int:
    """Run the command; returns the exit code. Raises `MakespanError`."""
    check_output("--json", options.json)
    check_file("--figure", options.figure)
    if options.replay:
        for name in ("ample", "kv_tokens", "max_context"):
            if getattr(options, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is of simulations: a replay's engines have what they have"
                )
        set_replay_sizes(options)
    seed_count = options.seeds if options.seeds is not None else 3 if options.replay else 8
    if seed_count < 1:
        raise ConfigError(f"--seeds: at least 1 batch is needed, not {seed_count}")
    seeds = range(FIRST_SEED, FIRST_SEED + seed_count)
    work, hardware = resolve(options)
    rungs = chosen(options, work)
    figures: dict[str, Any] = {"version": ABLATE_VERSION, "workload": work.name, "seeds": len(seeds)}
    figures |= {"token_scale": options.token_scale, "time_scale": options.time_scale}
    ratio = environment_to_inference([work.batch(seed) for seed in seeds], hardware.replica.cost)
    figures["environment_to_inference"] = ratio
    notes = [f"environments take {ratio:.2f} times the seconds that inference takes alone"]
    if options.replay:
        ablation = _replay(options, console, work, hardware, seeds, rungs)
        hardware = ablation.hardware
        outcomes = {rung.name: [run.outcome for run in _of(ablation.runs, rung.name)] for rung in rungs}
        rows = [with_simulation(_row(rung, outcomes), _of(ablation.runs, rung.name)) for rung in rungs]
        notes += _notes(options, ablation, rungs)
        console.print(f"a run directory a batch, for `makespan report`: {ablation.directory}", soft_wrap=True)
        figures |= {"machine": ablation.machine, "runs": msgspec.to_builtins(ablation.runs)}
    else:
        outcomes = _simulate(console, work, hardware, seeds, rungs)
        rows = [_row(rung, outcomes) for rung in rungs]
    figures |= {"hardware": msgspec.to_builtins(hardware), "rows": msgspec.to_builtins(rows), "notes": notes}
    write_json(options.json, figures)
    title = f"{work.name}{_scales(options)}: {describe(hardware)}, {len(seeds)} batches"
    _show(console, title, rows, notes)
    if options.figure is not None:
        bars = [Bar(row.rung, row.makespan_s.mean, row.makespan_s.se or 0.0) for row in rows]
        write_figure(options.figure, title, "makespan, s (mean and standard error)", bars)
        console.print(f"figure: {options.figure}", soft_wrap=True)
    return 0


def set_replay_sizes(options: argparse.Namespace) -> None:
    """What a command line with `--replay` leaves open."""
    options.chains = REPLAY_CHAINS if options.chains is None else options.chains
    options.group_size = REPLAY_GROUP_SIZE if options.group_size is None else options.group_size
    options.replicas = REPLAY_REPLICAS if options.replicas is None else options.replicas


def chosen(options: argparse.Namespace, work: Workload) -> tuple[Rung, ...]:
    """The rungs to run. Raises `ConfigError` for one that does not exist."""
    if options.rungs is None:
        rungs: tuple[Rung, ...] = ABLATION if options.replay else LADDER
    else:
        known = _known()
        names = list(dict.fromkeys(options.rungs.split(",")))
        for name in names:
            if name not in known:
                raise ConfigError(f"--rungs: unknown rung {name!r}{nearest(name, known)}")
        rungs = tuple(known[name] for name in names)
    return rungs if work.again is not None else without_past(rungs)


def _known() -> dict[str, Rung]:
    return {rung.name: rung for rung in (*LADDER, *ABLATION)}


def _simulate(
    console: Console, work: Workload, hardware: Hardware, seeds: Sequence[int], rungs: Sequence[Rung]
) -> dict[str, list[Outcome]]:
    with console.status(f"{work.name} on {describe(hardware)}") as status:

        def show(rung: Rung, seed: int, result: Outcome) -> None:
            _check_kept(work, rung.name, hardware, result)
            status.update(f"batch {seed - FIRST_SEED + 1} of {len(seeds)}, {rung.name}: {result.makespan_s:,.0f} s")

        return climb(work, hardware, seeds, rungs, on_outcome=show)


def _replay(
    options: argparse.Namespace,
    console: Console,
    work: Workload,
    hardware: Hardware,
    seeds: Sequence[int],
    rungs: Sequence[Rung],
) -> Ablation:
    def show(run: Replayed) -> None:
        console.print(
            f"batch {run.seed - FIRST_SEED + 1}, {run.rung}: {run.outcome.makespan_s:,.1f} s", highlight=False
        )
        _check_kept(work, run.rung, hardware, run.outcome)

    return replayed(
        options,
        work,
        seeds,
        rungs,
        replicas=hardware.replicas,
        slots=hardware.slots,
        calibration=None if options.calibration is None else calibration.read(options.calibration),
        on_run=show,
    )


def _check_kept(work: Workload, rung: str, hardware: Hardware, result: Outcome) -> None:
    if not result.kept_length:
        raise ConfigError(
            f"{work.name}, {rung}: no trajectory got through a turn on {describe(hardware)}: there is "
            "nothing to compare, and `makespan simulate` or `makespan replay` shows what failed"
        )


def _of(runs: Sequence[Replayed], rung: str) -> list[Replayed]:
    return sorted((run for run in runs if run.rung == rung), key=lambda run: run.seed)


def _references(names: Sequence[str]) -> tuple[str, ...]:
    """What the rungs are compared with: the first of them, and the one that the others are variations of."""
    middle = next((name for name in ("+history", "+caas", "decoupled") if name in names), None)
    return (names[0],) if middle in (None, names[0]) else (names[0], str(middle))


def _row(rung: Rung, outcomes: dict[str, list[Outcome]]) -> Row:
    own = outcomes[rung.name]
    return Row(
        rung=rung.name,
        says=rung.says,
        makespan_s=paired([o.makespan_s for o in own]),
        over_lower_bound=paired([o.makespan_s / o.lower_bound_s for o in own]),
        against_pct={name: change_pct(own, outcomes[name]) for name in _references(list(outcomes))},
        recomputed_share=paired([o.recomputed_share for o in own]).mean,
        preemptions=paired([o.preemptions for o in own]).mean,
        discarded_tokens=paired([o.discarded_tokens for o in own]).mean,
        kept_length_ratio=paired([o.kept_length for o in own]).mean,
    )


def with_simulation(row: Row, runs: Sequence[Replayed]) -> Row:
    """The row with what the simulation of its batches says, where they were simulated."""
    simulated = [run.simulated_s for run in runs if run.simulated_s is not None]
    if not simulated:
        return row
    told, replayed_s = paired(simulated), row.makespan_s.mean
    chance_s = math.sqrt(sum((run.simulated_sd_s or 0.0) ** 2 for run in runs)) / len(runs)
    return msgspec.structs.replace(
        row,
        simulated_s=told,
        simulated_pct=100 * (told.mean / replayed_s - 1),
        simulated_sd_pct=100 * chance_s / replayed_s,
    )


def _notes(options: argparse.Namespace, ablation: Ablation, rungs: Sequence[Rung]) -> Iterator[str]:
    """What a reader of a replay must know."""
    yield f"on {ablation.machine['cores']} cores of {ablation.machine['cpu']}"
    deviations = [run.environment_pct for run in ablation.runs if run.environment_pct is not None]
    if deviations:
        largest = max(deviations, key=abs)
        over = sum(abs(pct) > TOLERANCE_PCT for pct in deviations)
        yield (
            f"environments took {sum(deviations) / len(deviations):+.1f}% of their recorded seconds in the mean "
            f"(largest {largest:+.1f}%); {over} of {len(deviations)} batches are not within {TOLERANCE_PCT:g}%"
        )
    readings = [run.core_s for run in ablation.runs if run.core_s is not None]
    if readings:
        slowest = max(readings) / min(readings)
        yield f"the replicas' cores were {slowest:.2f} times as fast in the fastest batch as in the slowest"
    if other := sum(run.other_turns for run in ablation.runs):
        yield f"{other} turns had other numbers of tokens than the recorded ones, or were not replayed"
    if options.calibration is not None:
        same, judged = order_agreement(ablation.runs, [rung.name for rung in rungs])
        yield (
            f"of {judged} pairs of rungs whose replayed difference is beyond twice its standard error, {same} are in "
            "the same order in simulation"
        )
    else:
        yield "not simulated beside it: --calibration tells the simulator what inference costs here"


def order_agreement(runs: Sequence[Replayed], names: Sequence[str]) -> tuple[int, int]:
    """(pairs of rungs with the same order in simulation, pairs whose order the replay tells)."""
    same = judged = 0
    for one, other in combinations(names, 2):
        pairs = list(zip(_of(runs, one), _of(runs, other), strict=True))
        real = paired([a.outcome.makespan_s - b.outcome.makespan_s for a, b in pairs])
        if real.se is None or abs(real.mean) <= 2 * real.se:
            continue
        told = sum((a.simulated_s or 0.0) - (b.simulated_s or 0.0) for a, b in pairs)
        judged += 1
        same += (told > 0) == (real.mean > 0)
    return same, judged


def _scales(options: argparse.Namespace) -> str:
    scales = []
    if options.token_scale != 1.0:
        scales.append(f"lengths times {options.token_scale:g}")
    if options.time_scale != 1.0:
        scales.append(f"environment times times {options.time_scale:g}")
    return f" ({', '.join(scales)})" if scales else ""


def _show(console: Console, title: str, rows: list[Row], notes: Sequence[str]) -> None:
    console.print(title, soft_wrap=True)
    references = list(rows[0].against_pct)
    simulated = any(row.simulated_s is not None for row in rows)
    headings = ["rung", "seconds", "bound", *(f"vs {name}" for name in references), "again"]
    if simulated:
        headings += ["sim.", "off"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # it has to fit into 80 columns
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "rung" else "right", no_wrap=True)
    digits, pct_digits = 1 if rows[0].makespan_s.mean < 1000 else 0, 0 if simulated else 1
    for row in rows:
        cells = [
            row.rung,
            with_error(row.makespan_s, digits),
            f"{row.over_lower_bound.mean:.2f}",
            *(with_error(row.against_pct[name], pct_digits, sign=True) for name in references),
            f"{row.recomputed_share:.0%}",
        ]
        if row.simulated_s is not None:
            chance = f" ±{row.simulated_sd_pct:.0f}"
            cells += [f"{row.simulated_s.mean:,.{digits}f}", f"{row.simulated_pct:+.0f}{chance}"]
        table.add_row(*cells)
    console.print(table)
    legend = "seconds: makespan; bound: over its lower bound; vs: change in %; again: prefilled tokens computed before"
    if simulated:
        legend += "; sim.: simulated seconds; off: from the replayed, in %, and what chance makes of it"
    console.print(legend, soft_wrap=True)
    for row in rows:
        kept = f"what it keeps has {row.kept_length_ratio:.2f} of the mean length"
        cut = f"; it cuts {row.discarded_tokens:,.0f} tokens, and {kept}"
        console.print(f"{row.rung}: {row.says}{cut if row.discarded_tokens else ''}", soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)


def with_error(value: Paired, digits: int, *, sign: bool = False) -> str:
    """`mean ±se`, the error left out where there is none."""
    mean = f"{value.mean:{'+' if sign else ''},.{digits}f}"
    return mean if value.se is None else f"{mean} ±{value.se:.{digits}f}"
