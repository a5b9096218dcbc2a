"""How far simulation is from what was replayed: the last column of the table in docs/replay.md, cell by cell.

    python benchmarks/agreement.py docs/ablation-epyc-[3-9].json --sessions PATH
    python benchmarks/agreement.py ablation.json --write

Reads what `benchmarks/ablation.py` wrote and simulates every batch again, under the same rungs, on the hardware and
with the costs that the file's probes say, on cores as fast as they were. It knows the policies as they are now: a file
from before one of them changed is compared with another policy. Where sticky routing placed trajectories is a matter of
chance; runs that say where are simulated with these placements, and, in a line that counts for nothing, with others.
No engine runs; a cell takes seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import msgspec

from makespan.commands.ablate import Row, add_ablate, order_agreement, set_replay_sizes, with_simulation
from makespan.commands.ablate_replay import Replayed, simulated
from makespan.commands.workload import resolve
from makespan.rollout.resources.calibration import Calibration, fit
from makespan.rollout.simulation.batch import Hardware
from makespan.rollout.simulation.coding import CODING
from makespan.rollout.simulation.ladder import ABLATION

WITHIN_PCT = 10.0
RUNGS = {rung.name: rung for rung in ABLATION}


def simulate_again(
    measured: dict[str, Any], calibration: Calibration, sessions: Path | None, *, elsewhere: bool = False
) -> list[Replayed]:
    """The runs of one workload with what the present simulation says of them; `elsewhere`: those whose placements are
    known, with others."""
    parser = argparse.ArgumentParser()
    add_ablate(parser)
    options = parser.parse_args([*measured["arguments"], "--replay"])
    options.sessions = sessions
    set_replay_sizes(options)
    work, _ = resolve(options)
    hardware = msgspec.convert(measured["hardware"], Hardware)
    cost = fit([*calibration.fitted_on, *calibration.judged_on], hardware.replica.cost.chunk_tokens)
    replica = msgspec.structs.replace(hardware.replica, cost=cost)
    hardware = msgspec.structs.replace(hardware, replica=replica)
    runs = msgspec.convert(measured["runs"], list[Replayed])
    if elsewhere:
        runs = [msgspec.structs.replace(run, homes=None) for run in runs if run.homes is not None]
    return [simulated(run, RUNGS[run.rung], work, work.batch(run.seed), hardware, calibration.core_s) for run in runs]


def rows_of(measured: dict[str, Any], runs: list[Replayed]) -> list[Row]:
    """The rows of one workload beside the simulation of these runs, without those that have none among them."""
    rows = msgspec.convert(measured["rows"], list[Row])
    with_runs = [(row, [run for run in runs if run.rung == row.rung]) for row in rows]
    return [with_simulation(row, own) for row, own in with_runs if own]


def print_cell(workload: str, rung: str, row: Row) -> None:
    assert row.simulated_s is not None
    figures = f"{row.makespan_s.mean:.1f} | {row.simulated_s.mean:.1f} | {row.simulated_pct:+.1f}"
    print(f"| {workload} | {rung} | {figures} | ±{row.simulated_sd_pct:.1f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what benchmarks/ablation.py --json wrote")
    parser.add_argument("--sessions", type=Path, help="recorded sessions; without them their workloads are left out")
    parser.add_argument("--write", action="store_true", help="write the present simulation into the files")
    options = parser.parse_args()
    print("| workload | rung | replayed, s | simulated, s | off by, % | chance, % |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    off: list[float] = []
    same = judged = 0
    for path in options.files:
        document = msgspec.json.decode(path.read_bytes())
        calibration = msgspec.convert(document["calibration"], Calibration)
        for name, measured in document["workloads"].items():
            if measured["arguments"][0] in CODING and options.sessions is None:
                continue
            runs = simulate_again(measured, calibration, options.sessions)
            rows = rows_of(measured, runs)
            off += [row.simulated_pct for row in rows if row.simulated_pct is not None]
            for row in rows:
                print_cell(name, f"`{row.rung}`", row)
            for row in rows_of(measured, simulate_again(measured, calibration, options.sessions, elsewhere=True)):
                print_cell(name, f"`{row.rung}`, placed anew", row)
            told = order_agreement(runs, [row.rung for row in rows])
            same, judged = same + told[0], judged + told[1]
            measured["runs"], measured["rows"] = msgspec.to_builtins(runs), msgspec.to_builtins(rows)
        if options.write:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    if not off:
        sys.exit("nothing to simulate: the workloads of these files are all of recorded sessions, give --sessions")
    print(
        f"\n{sum(abs(pct) <= WITHIN_PCT for pct in off)} of {len(off)} cells within {WITHIN_PCT:g}%, "
        f"median {statistics.median(off):+.1f}%; {same} of {judged} pairs whose replayed difference is beyond its "
        "noise in the same order"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
