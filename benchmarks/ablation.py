"""Today's practice against each part of makespan on real engines: what the README's table and figure are made of.

    python benchmarks/ablation.py --json ablation.json --figure ablation.svg
    python benchmarks/ablation.py --quick
    python benchmarks/ablation.py --from docs/ablation-epyc-[3-9].json --figure docs/ablation.svg

Each workload is `makespan ablate … --replay`: the same batches under every combination of policies, on two vLLM
replicas and a real environment server, with lengths and times that are given, made small enough for two cores (its
arguments say how). Slots are at the knee as it was when they were chosen: of so few it is three or four by whatever
rounding the day's costs bring, and one slot more is another workload. The costs of inference are measured first, with
prompts that no batch has, and every batch is also simulated with them. The long form takes about an hour for each of
its `--seeds` and wants the machine for itself; the quick one minutes. `--from` measures nothing and makes table and
figure of what was; of a workload that is in several files the last one counts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from makespan.commands.figure import Bar, write_figure
from makespan.rollout.simulation.coding import CODING

RUNGS = ("coupled", "+parking", "+routing", "+caas", "+history", "-parking", "-routing", "oracle")
"""Those of the table and the figure; the others are in the JSON."""

ENDS = ("coupled", "+parking", "+history")

SHARES = ("coupled", "+parking", "+caas", "+history", "oracle")
"""Of workloads that keep what a full-size batch is like: environment seconds for each of inference, and slots for each
trajectory. (256 trajectories on four replicas, slots at the knee: 0.8 and a tenth for search, 2.5 and a sixth for
lognormal-0.5, 2.5 and 0.07 for lognormal-1, 1.9 and a twelfth for sessions.)"""

MEMORY = ("coupled", "+history", "-parking", "-routing")
"""What memory decides: everything, admitting everybody, sticky least-in-flight."""


class Workload(msgspec.Struct, frozen=True):
    """One run of `makespan ablate`."""

    name: str
    says: str
    arguments: tuple[str, ...]
    rungs: tuple[str, ...] | None = None
    """None: all of the ablation."""

    @property
    def from_sessions(self) -> bool:
        """Whether it is made of recorded sessions, which are not shipped."""
        return self.arguments[0] in CODING


def _scaled(regime: str, tokens: str, times: str, *more: str) -> tuple[str, ...]:
    return (regime, "--token-scale", tokens, "--time-scale", times, *more)


WORKLOADS = (
    Workload("bfcl", "short function calls, few slots", _scaled("bfcl", "0.2", "0.2", "--slots", "2")),
    Workload("search", "few turns with long results", _scaled("search", "0.05", "0.075", "--slots", "3"), SHARES),
    Workload(
        "slots for all",
        "bfcl with a slot for every trajectory: nothing to win",
        _scaled("bfcl", "0.2", "0.2", "--slots", "32"),
        ENDS,
    ),
    Workload(
        "long swe",
        "swe with contexts of up to 2,400 tokens and 36 cache blocks a replica",
        _scaled("swe", "0.04", "0.01", "--chains", "12", "--slots", "3", "--num-blocks", "36"),
        MEMORY,
    ),
    Workload(
        "long lognormal-1.5-cap100",
        "lognormal-1.5-cap100 with contexts of up to 3,100 tokens and 36 cache blocks a replica",
        _scaled("lognormal-1.5-cap100", "0.05", "0.03", "--chains", "24", "--slots", "3", "--num-blocks", "36"),
        MEMORY,
    ),
    Workload(
        "long capped sessions",
        "sessions of at most 60 turns, contexts of up to 3,300 tokens and 36 cache blocks a replica",
        _scaled("coding-sessions-cap60", "0.03", "0.02", "--chains", "16", "--slots", "3", "--num-blocks", "36"),
        MEMORY,
    ),
    Workload(
        "long sessions",
        "sessions with contexts of up to 6,000 tokens and 28 cache blocks a replica",
        _scaled("coding-sessions", "0.01", "0.012", "--chains", "16", "--slots", "2", "--num-blocks", "28"),
        MEMORY,
    ),
    Workload(
        "sessions",
        "sessions with contexts of up to 6,000 tokens, 28 cache blocks a replica and a slot for twelve",
        _scaled("coding-sessions", "0.01", "0.014", "--chains", "24", "--slots", "2", "--num-blocks", "28"),
        SHARES,
    ),
    Workload(
        "scarce search",
        "search with 40 cache blocks a replica",
        _scaled("search", "0.1", "0.2", "--slots", "5", "--num-blocks", "40"),
        MEMORY,
    ),
    Workload(
        "scarce lognormal-0.5",
        "lognormal-0.5 with 40 cache blocks a replica",
        _scaled("lognormal-0.5", "0.05", "0.03", "--slots", "6", "--num-blocks", "40"),
        MEMORY,
    ),
    Workload(
        "lognormal-0.5",
        "turns that differ moderately",
        _scaled("lognormal-0.5", "0.02", "0.027", "--slots", "5"),
        SHARES,
    ),
    Workload("lognormal-1", "turns that differ much", _scaled("lognormal-1", "0.01", "0.013", "--slots", "2"), SHARES),
)


def ablate(workload: Workload, calibration: Path, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The figures of one workload. Raises `CalledProcessError`."""
    out = directory / f"{workload.name.replace(' ', '-')}.json"
    command = [sys.executable, "-m", "makespan", "ablate", *workload.arguments, "--replay", "--json", str(out)]
    command += ["--seeds", str(options.seeds), "--calibration", str(calibration)]
    command += ["--runs-directory", str(directory), "--name", workload.name]
    if workload.from_sessions:
        command += ["--sessions", str(options.sessions)]
    rungs = options.rungs or (workload.rungs and ",".join(workload.rungs))
    if rungs:
        command += ["--rungs", rungs]
    subprocess.run(command, check=True, stdout=sys.stderr)
    found: dict[str, Any] = msgspec.json.decode(out.read_bytes())
    return found


def commit() -> str:
    """The commit that was measured; `+` marks changes beside it."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty=+"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def percent(value: dict[str, float | None]) -> str:
    error = value["se"]
    return f"{value['mean']:+.0f}" + ("" if error is None else f" ±{error:.0f}")


def table(results: dict[str, dict[str, Any]]) -> str:
    """The makespans as a table in Markdown."""
    lines = [
        f"| workload | environment / inference | coupled, s | {' | '.join(f'{rung}, %' for rung in RUNGS[1:])} | "
        "simulation off by, % |",
        "| --- |" + " ---: |" * (len(RUNGS) + 2),
    ]
    for name, result in results.items():
        rows = {row["rung"]: row for row in result["rows"]}
        cells = [percent(rows[rung]["against_pct"]["coupled"]) if rung in rows else "" for rung in RUNGS[1:]]
        off = [row["simulated_pct"] for row in rows.values() if row["simulated_pct"] is not None]
        error = rows["coupled"]["makespan_s"]["se"]
        base = f"{rows['coupled']['makespan_s']['mean']:.1f}" + ("" if error is None else f" ±{error:.1f}")
        spread = f"{min(off):+.0f} … {max(off):+.0f}" if off else ""
        ratio = f"{result['environment_to_inference']:.1f}"
        lines.append(f"| {name} | {ratio} | {base} | {' | '.join(cells)} | {spread} |")
    return "\n".join(lines)


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """The makespans as an SVG image."""
    bars = []
    for name, result in results.items():
        for row in result["rows"]:
            if row["rung"] in RUNGS:
                change = row["against_pct"]["coupled"]
                bars.append(Bar(f"{name}, {row['rung']}", 100 + change["mean"], change["se"] or 0.0))
    write_figure(path, "Makespan on real engines", "percent of `coupled`, paired by batch", bars)


def measured(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The workloads of these files, in the order of `WORKLOADS`. Raises `SystemExit` for a file that has none."""
    found: dict[str, dict[str, Any]] = {}
    for path in files:
        try:
            found |= msgspec.json.decode(path.read_bytes())["workloads"]
        except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: not what --json writes ({error})") from error
    known = {workload.name: found[workload.name] for workload in WORKLOADS if workload.name in found}
    if not known:
        raise SystemExit(f"{', '.join(map(str, files))}: none of this benchmark's workloads is in there")
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one workload, three rungs, one batch")
    parser.add_argument("--seeds", type=int, default=3, help="batches of a workload (default: 3)")
    parser.add_argument("--workloads", help=f"only these, separated by commas: {', '.join(w.name for w in WORKLOADS)}")
    parser.add_argument("--sessions", type=Path, help="recorded sessions; without them three workloads are left out")
    parser.add_argument("--rungs", help="only these, separated by commas; the first must be `coupled`")
    parser.add_argument("--calibration", type=Path, help="costs from `makespan calibrate embedded --replicas 2`")
    parser.add_argument("--json", type=Path, help="write everything, with machine and commit")
    parser.add_argument("--figure", type=Path, help="write the makespans as an SVG image")
    parser.add_argument("--from", dest="files", type=Path, nargs="+", help="what --json wrote, instead of measuring")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    if options.files:
        results = measured(options.files)
        sys.stdout.write(table(results) + "\n")
        if options.figure is not None:
            draw(results, options.figure)
        return 0
    names = [w.name for w in WORKLOADS] if options.workloads is None else options.workloads.split(",")
    if unknown := set(names) - {w.name for w in WORKLOADS}:
        parser.error(f"--workloads: unknown {', '.join(sorted(unknown))}")
    workloads = [w for w in WORKLOADS if w.name in names]
    if options.sessions is None:
        if options.workloads is not None and any(w.from_sessions for w in workloads):
            parser.error("--workloads: those of recorded sessions need --sessions")
        workloads = [w for w in workloads if not w.from_sessions]
    if options.quick:
        workloads, options.seeds, options.rungs = workloads[:1], 1, "coupled,+parking,+history"
    document: dict[str, Any] = {"commit": commit(), "workloads": results}
    with tempfile.TemporaryDirectory(prefix="makespan-") as name:
        directory = Path(name)
        calibration = options.calibration
        if calibration is None:
            calibration = directory / "calibration.json"
            command = [sys.executable, "-m", "makespan", "calibrate", "embedded", "--replicas", "2"]
            subprocess.run([*command, "--out", str(calibration)], check=True, stdout=sys.stderr)
        document["calibration"] = msgspec.json.decode(calibration.read_bytes())
        for workload in workloads:
            results[workload.name] = ablate(workload, calibration, options, directory)
            results[workload.name] |= {"says": workload.says, "arguments": workload.arguments}
            if options.json is not None:  # what there is, should the rest be interrupted
                options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    sys.stdout.write(table(results) + "\n")
    if options.figure is not None:
        draw(results, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
