"""Parking and routing by cost on real vLLM with scarce memory, against admitting everything with sticky routing.

    python benchmarks/routing_vllm.py --quick --json -
    python benchmarks/routing_vllm.py --tasks 32 --repeats 3 --json routing_vllm.json

Each run is `makespan run examples/bfcl.yaml`: real inference, scripted actions, so that every arm generates the same
tokens. Two workloads have fewer cache blocks than their trajectories want; in the third memory is ample, and nothing is
to be won. The order of arms alternates between repeats. A run takes about a minute and two CPU cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from makespan.rollout.simulation.ladder import paired

EXAMPLE = Path(__file__).parent.parent / "examples" / "bfcl.yaml"

ARMS: dict[str, tuple[str, ...]] = {
    "parking, cost": ("admission.policy=parking", "routing.policy=cost"),
    "parking, sticky": ("admission.policy=parking", "routing.policy=sticky-least-inflight"),
    "everything, sticky": ("admission.policy=everything", "routing.policy=sticky-least-inflight"),
}
BASE = "everything, sticky"

WORKLOADS: dict[str, tuple[str, ...]] = {
    "base, scarce": ("environment.category=multi_turn_base", "replicas.num_blocks=120"),
    "long context, scarce": ("environment.category=multi_turn_long_context", "replicas.num_blocks=180"),
    "base, ample": ("environment.category=multi_turn_base",),
}


class Run(msgspec.Struct, frozen=True):
    """One batch on real replicas."""

    workload: str
    arm: str
    repeat: int
    makespan_s: float
    recomputed_share: float
    """Of the prefilled tokens."""
    preemptions: int | None


def run(workload: str, arm: str, repeat: int, tasks: int, directory: Path) -> Run:
    """One run in a process of its own. Raises `CalledProcessError`."""
    out = directory / "summary.json"
    settings = [f"tasks={tasks}", "samples_per_task=2", "admission.concurrency=null", f"runs_directory={directory}"]
    settings += [*WORKLOADS[workload], *ARMS[arm]]
    command = [sys.executable, "-m", "makespan", "run", str(EXAMPLE), "--json", str(out)]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = msgspec.json.decode(out.read_bytes())
    tokens = summary["tokens"]
    prefilled = tokens["prompt"] - (tokens["cached"] or 0)
    share = (tokens["recomputed"] or 0) / prefilled if prefilled else 0.0
    return Run(workload, arm, repeat, summary["makespan_s"], share, summary["preemptions"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one scarce workload, two arms, 8 tasks, once")
    parser.add_argument("--tasks", type=int, default=32, help="tasks of a batch, two trajectories each (default: 32)")
    parser.add_argument("--repeats", type=int, default=3, help="default: 3")
    parser.add_argument("--workloads", help=f"only these, separated by semicolons: {'; '.join(WORKLOADS)}")
    parser.add_argument("--json", metavar="PATH", help="write the runs; - is standard output")
    options = parser.parse_args()
    workloads = list(WORKLOADS)[:1] if options.quick else (options.workloads or ";".join(WORKLOADS)).split(";")
    arms = ["parking, cost", BASE] if options.quick else list(ARMS)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="makespan-") as directory:
        for repeat in range(1 if options.quick else options.repeats):
            for workload in workloads:
                for arm in arms if repeat % 2 == 0 else reversed(arms):
                    tasks = 8 if options.quick else options.tasks
                    runs.append(run(workload, arm, repeat, tasks, Path(directory)))
                    print(runs[-1], file=sys.stderr, flush=True)
    for workload in workloads:
        base = {r.repeat: r for r in runs if (r.workload, r.arm) == (workload, BASE)}
        for arm in arms:
            own = [r for r in runs if (r.workload, r.arm) == (workload, arm)]
            change = paired([100 * (r.makespan_s / base[r.repeat].makespan_s - 1) for r in own])
            error = "" if change.se is None else f" ±{change.se:.1f}"
            share = sum(r.recomputed_share for r in own) / len(own)
            print(f"{workload:22s} {arm:20s} {change.mean:+6.1f}{error} %, {share:.2f} recomputed", file=sys.stderr)
    if options.json == "-":
        sys.stdout.write(msgspec.json.encode(runs).decode() + "\n")
    elif options.json:
        Path(options.json).write_bytes(msgspec.json.encode(runs) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
