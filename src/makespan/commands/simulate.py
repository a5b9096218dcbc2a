"""`makespan simulate`: one batch in virtual time, through the engine, the gates and the policies that run live."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from makespan.commands.output import check_file, check_output, write_json
from makespan.commands.policies import add_policies, policies_of
from makespan.commands.workload import add_workload, describe, resolve
from makespan.rollout.replay.recorder import Recorder
from makespan.rollout.replay.trace import Trace
from makespan.rollout.simulation.batch import Policies, simulate
from makespan.rollout.simulation.ladder import oversampling
from makespan.rollout.simulation.workload import HISTORIES, at_reference, known_before
from makespan.rollout.telemetry.analysis import BatchAnalysis, analyse
from makespan.rollout.telemetry.merge import merge
from makespan.rollout.telemetry.report import reported, write_report

SIMULATE_VERSION = 1


def add_simulate(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_workload(command)
    command.add_argument("--seed", type=int, default=0, help="of the batch and of every tie (default: 0)")
    add_policies(command)
    command.add_argument(
        "--history", default="none", help=f"what the forecast knows beforehand: {', '.join(HISTORIES)} (default: none)"
    )
    command.add_argument("--needed", type=int, help="oversample-cut: stop when so many trajectories have finished")
    command.add_argument("--events", type=Path, metavar="PATH", help="keep the event log")
    command.add_argument("--report", type=Path, metavar="PATH", help="write the HTML report")
    command.add_argument("--record", type=Path, metavar="PATH", help="write the batch as a trace (.gz: zipped)")


def run_simulate(options: argparse.Namespace, console: Console) -> int:
    """Run the command; returns the exit code: 0, or 1 when no trajectory ended well. Raises `MakespanError`."""
    check_output("--json", options.json)
    check_file("--events", options.events)
    check_file("--record", options.record)
    check_file("--report", options.report)
    work, hardware = resolve(options)
    batch = work.batch(options.seed)
    policies = msgspec.structs.replace(policies_of(options), history=options.history, needed=options.needed)
    policies = at_reference(policies, batch, hardware)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="makespan-") as directory:
        path = options.events or Path(directory) / "engine.jsonl"
        known = known_before(work, options.seed, policies.history, hardware.replica.cost)
        simulate(batch, hardware, policies, seed=options.seed, log_path=path, history=known)
        log = merge([path])
    if options.record is not None:
        Recorder(log, source=f"simulation of {batch.header.source or work.name}").write(options.record)
    if options.report is not None:
        notes = [f"simulated; assumed: {assumption}" for assumption in batch.header.assumptions]
        write_report(options.report, [reported(log, name=work.name, notes=["simulated", *notes])])
    analysis = analyse(log)
    discarded, kept_length = oversampling(log, batch)
    figures = {
        "version": SIMULATE_VERSION,
        "workload": work.name,
        "seed": options.seed,
        "trace": msgspec.to_builtins(batch.header),
        "hardware": msgspec.to_builtins(hardware),
        "policies": msgspec.to_builtins(policies),
        **msgspec.to_builtins(analysis),
        "discarded_tokens": discarded,
        "kept_length_ratio": kept_length,
        "simulated_in_s": time.monotonic() - began_s,
    }
    write_json(options.json, figures)
    console.print(f"{work.name}: {len(batch.trajectories)} trajectories on {describe(hardware)}", soft_wrap=True)
    _show(console, batch, analysis, policies, discarded, kept_length)
    if options.report is not None:
        console.print(f"report: {options.report}", soft_wrap=True)
    return 0 if analysis.states.keys() & {"finished", "truncated"} else 1


def _show(
    console: Console, batch: Trace, analysis: BatchAnalysis, policies: Policies, discarded: int, kept_length: float
) -> None:
    table = Table(show_header=False)
    for name, value in _rows(analysis):
        table.add_row(name, value)
    if policies.needed is not None:
        table.add_row("discarded tokens", f"{discarded:,}")
        table.add_row("length of what was kept", f"{kept_length:.2f} of the mean")
    console.print(table)
    for assumption in batch.header.assumptions:
        console.print(f"assumed: {assumption}", soft_wrap=True)
    for reason, count in batch.header.dropped.items():
        console.print(f"left out: {count} trajectories ({reason})", soft_wrap=True)


def _rows(analysis: BatchAnalysis) -> list[tuple[str, str]]:
    bounds, phases, tokens, tail = analysis.bounds_s, analysis.phases_s, analysis.tokens, analysis.tail_s
    bound_s = analysis.lower_bound_s
    over = f" ({analysis.makespan_s / bound_s:.2f} times the lower bound)" if bound_s else ""
    states = ", ".join(f"{name} {count}" for name, count in sorted(analysis.states.items()))
    rows = [
        ("makespan", f"{analysis.makespan_s:,.1f} s{over}"),
        ("trajectories", states),
        *((f"failed: {kind}", f"{count}") for kind, count in sorted(analysis.failures.items())),
        *((f"lower bound, slots {name}", f"{value:,.1f} s") for name, value in bounds.slots.items()),
        ("lower bound, inference", _seconds(bounds.inference)),
        ("lower bound, longest chain", _seconds(bounds.chain)),
        ("tail after 90% / 99%", f"{_seconds(tail.after_90)} / {_seconds(tail.after_99)}"),
        ("prompt tokens", f"{tokens.prompt:,}, {tokens.cached or 0:,} cached, {tokens.recomputed or 0:,} recomputed"),
        ("generated tokens", f"{tokens.generated:,}"),
        ("preemptions", "not measured" if analysis.preemptions is None else f"{analysis.preemptions:,}"),
    ]
    for name, figures in analysis.slot_classes.items():
        used = "" if figures.utilisation is None else f", used {figures.utilisation:.0%}"
        rows.append((f"slots {name}", f"{figures.actions:,} actions{used}"))
    for name, value in msgspec.structs.asdict(phases).items():
        rows.append((f"all: {name.replace('_', ' ')}", _seconds(value)))
    if (chain := analysis.last_chain) is not None:
        rows.append(("last chain", f"{chain.trajectory_id}, {chain.turns} turns"))
        rows += [
            (f"  {name.replace('_', ' ')}", _seconds(value))
            for name, value in msgspec.structs.asdict(chain).items()
            if name not in ("trajectory_id", "turns")
        ]
    return rows


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{round(value, 1) + 0.0:,.1f} s"  # and never -0.0
