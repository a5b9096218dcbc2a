"""The baselines of scheduling and admission, on the regimes of `makespan.rollout.simulation.regimes`.

    python benchmarks/policies.py --quick --json -
    python benchmarks/policies.py --seeds 24 --sessions PATH --json policies.json

Everything runs in virtual time through the shipping engine, gates and policies. Two settings: `ample`, where memory
never binds and everything is admitted, which isolates the order of actions; and `memory`, with 840,000 tokens a replica
and a fixed reference concurrency, where decoupling and admission matter. Makespans are compared batch by batch: each
row is the mean change in percent, with its standard error, against first come, first served in `ample` and against
`coupled` in `memory`. The coding regimes need recorded sessions, which are not shipped: without `--sessions` they are
left out, and their bars hold nothing (`null`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from makespan.rollout.errors import MakespanError
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.simulation.batch import Hardware, Policies
from makespan.rollout.simulation.coding import CODING
from makespan.rollout.simulation.ladder import LADDER, Outcome, Paired, Rung, change_pct, climb, paired
from makespan.rollout.simulation.regimes import SYNTHETIC
from makespan.rollout.simulation.workload import knee_slots, workload

FIRST_SEED = 100
"""Seeds below 10 are those that the knee is averaged over."""

AMPLE = ReplicaHardware(kv_tokens=1 << 40)

AMPLE_RUNGS = tuple(
    Rung(name, "", lambda trace, hardware, name=name: Policies(scheduling=name))  # type: ignore[misc]
    for name in ("fifo", "progress", "least-progress", "oracle")
)
SETTINGS: dict[str, tuple[ReplicaHardware, tuple[Rung, ...], str]] = {
    "ample": (AMPLE, AMPLE_RUNGS, "fifo"),
    "memory": (ReplicaHardware(), LADDER, "coupled"),
}
"""Replica, rungs, and the rung that the others are compared with."""

STUDY: dict[str, tuple[float, float, float]] = {
    "coding-sessions": (1.45, -1.2, -24.6),
    "coding-segments": (1.36, 0.5, -23.4),
    "coding-sessions-cap60": (1.59, 2.2, -2.7),
    "lognormal-0.5": (1.41, 2.4, -27.2),
    "lognormal-0.5-cap25": (1.30, 14.1, -20.8),
    "lognormal-1-cap50": (1.30, 12.9, -21.1),
    "lognormal-1": (1.45, -3.8, -28.8),
    "lognormal-1.5-cap100": (1.30, 9.4, -21.5),
    "lognormal-1.5": (1.41, -4.1, -26.9),
    "bimodal": (1.35, 7.9, -24.3),
    "bfcl": (1.49, 7.6, -17.1),
    "swe": (1.29, 13.7, -20.0),
    "search": (1.47, 3.5, -23.0),
}
"""What an earlier study of the same regimes measured with ample memory over 96 batches: first come, first served over
the lower bound, and the change in percent with the most-progressed first and with the oracle."""

PROGRESS_BARS = ("lognormal-0.5-cap25", "lognormal-1-cap50", "swe")
BOUND_TOLERANCE = 0.12
ORACLE_TOLERANCE_PCT = 6.0
"""Two samples of 24 and 96 batches differ by about two of these errors where the regimes are the same."""

QUICK_REGIMES = ("bfcl", *PROGRESS_BARS)


class Row(msgspec.Struct, frozen=True):
    """The change of the makespan by one policy, in percent of the setting's reference policy."""

    regime: str
    setting: str
    policy: str
    mean_pct: float
    se_pct: float | None
    seeds: int


class OverBound(msgspec.Struct, frozen=True):
    """Makespan over its lower bound."""

    regime: str
    setting: str
    policy: str
    mean: float
    se: float | None
    seeds: int


class Bar(msgspec.Struct, frozen=True):
    """A claim, whether it holds (null: its runs were not made), and the figure that says so."""

    name: str
    holds: bool | None
    figure: float | None


class Job(msgspec.Struct, frozen=True):
    """One regime in one setting."""

    regime: str
    setting: str
    seeds: int
    sessions: str | None
    policies: tuple[str, ...] | None = None
    """None: all of the setting."""


class Done(msgspec.Struct, frozen=True):
    """What a job measured."""

    rows: list[Row]
    over_bound: list[OverBound]
    slots: int
    wall_s: float


def run_job(job: Job) -> Done:
    """All policies of a setting on the batches of a regime."""
    began_s = time.monotonic()
    replica, rungs, reference = SETTINGS[job.setting]
    work = workload(job.regime, sessions=None if job.sessions is None else Path(job.sessions))
    slots = knee_slots(work, replica.cost)
    hardware = Hardware(replica=replica, slots=slots, max_context_tokens=work.max_context_tokens)
    if job.policies is not None:
        rungs = tuple(rung for rung in rungs if rung.name in job.policies)
    outcomes = climb(work, hardware, range(FIRST_SEED, FIRST_SEED + job.seeds), rungs)
    rows, over = [], []
    for rung in rungs:
        change = change_pct(outcomes[rung.name], outcomes[reference])
        rows.append(Row(job.regime, job.setting, rung.name, change.mean, change.se, job.seeds))
        ratio = _over_bound(outcomes[rung.name])
        over.append(OverBound(job.regime, job.setting, rung.name, ratio.mean, ratio.se, job.seeds))
    return Done(rows, over, slots, time.monotonic() - began_s)


def _over_bound(outcomes: Sequence[Outcome]) -> Paired:
    return paired([outcome.makespan_s / outcome.lower_bound_s for outcome in outcomes])


def bars(rows: Sequence[Row], over: Sequence[OverBound]) -> Iterator[Bar]:
    """The claims about the baselines, each with its figure."""
    changes = {(row.regime, row.setting, row.policy): row.mean_pct for row in rows}
    ratios = {(row.regime, row.setting, row.policy): row.mean for row in over}

    def bar(name: str, figure: float | None, low: float, high: float) -> Bar:
        return Bar(name, None if figure is None else low <= figure <= high, figure)

    many = float("inf")
    for regime in PROGRESS_BARS:
        yield bar(f"{regime}, ample: progress at least +8%", changes.get((regime, "ample", "progress")), 8.0, many)
    for regime, (ratio, _, oracle_pct) in STUDY.items():
        low, high = ratio - BOUND_TOLERANCE, ratio + BOUND_TOLERANCE
        name = f"{regime}, ample: fifo over its lower bound within {low:.2f} … {high:.2f}"
        yield bar(name, ratios.get((regime, "ample", "fifo")), low, high)
        low, high = oracle_pct - ORACLE_TOLERANCE_PCT, oracle_pct + ORACLE_TOLERANCE_PCT
        name = f"{regime}, ample: oracle within {low:+.1f} … {high:+.1f}%"
        yield bar(name, changes.get((regime, "ample", "oracle")), low, high)
    for regime, high in (("bfcl", -50.0), ("search", -30.0)):
        figure = changes.get((regime, "memory", "concurrency"))
        yield bar(f"{regime}: decoupled at most {high:+.0f}% against coupled", figure, -many, high)
    for regime in ("swe", "coding-sessions", "coding-sessions-cap60"):
        figure = changes.get((regime, "memory", "decoupled"))
        yield bar(f"{regime}: decoupled without a concurrency limit is worse than coupled", figure, 0.0, many)
    figure = changes.get(("swe", "memory", "concurrency"))
    yield bar("swe: decoupled with a concurrency limit is better than coupled", figure, -many, 0.0)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """What to run."""
    regimes = [*SYNTHETIC, *(CODING if options.sessions else ())]
    settings, seeds = options.settings.split(","), options.seeds
    if options.quick:
        quick = [Job(regime, "ample", 2, None, ("fifo", "progress", "oracle")) for regime in QUICK_REGIMES]
        ladder = ("coupled", "decoupled", "concurrency")
        return [*quick, Job("bfcl", "memory", 2, None, ladder), Job("swe", "memory", 1, None, ladder)]
    if options.regimes:
        regimes = options.regimes.split(",")
    return [Job(regime, setting, seeds, options.sessions) for setting in settings for regime in regimes]


def main() -> int:
    """Run the benchmark; 0 when every bar that was measured holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four regimes and few batches: under 50 s")
    parser.add_argument("--seeds", type=int, default=24, help="batches a regime (default: 24)")
    parser.add_argument("--settings", default="ample,memory", help="default: ample,memory")
    parser.add_argument("--regimes", help="only these, separated by commas")
    parser.add_argument("--sessions", metavar="PATH", help="recorded sessions for the coding regimes")
    parser.add_argument("--json", metavar="PATH", help="write rows and bars; - is standard output")
    options = parser.parse_args()
    people = sys.stderr if options.json == "-" else sys.stdout
    rows: list[Row] = []
    over: list[OverBound] = []
    for job in jobs_of(options):
        done = run_job(job)
        rows += done.rows
        over += done.over_bound
        took = f"{done.slots} slots, {job.seeds} batches, {done.wall_s:.0f} s"
        print(f"{job.regime}, {job.setting}: {took}", file=people)
        for row, reached in zip(done.rows, done.over_bound, strict=True):
            error = "" if row.se_pct is None else f" ±{row.se_pct:.1f}"
            figures = f"{row.mean_pct:+6.1f}{error} %, {reached.mean:.2f} times the bound"
            print(f"    {row.policy:16s} {figures}", file=people, flush=True)
    checked = list(bars(rows, over))
    for bar in checked:
        if bar.holds is not None:
            print(f"{'holds' if bar.holds else 'FAILS'}: {bar.name} ({bar.figure:.2f})", file=people)
    if options.json:
        document = msgspec.json.format(
            msgspec.json.encode({"rows": rows, "over_bound": over, "bars": checked}), indent=2
        )
        if options.json == "-":
            sys.stdout.write(document.decode() + "\n")
        else:
            Path(options.json).write_bytes(document + b"\n")
    return 0 if all(bar.holds is not False for bar in checked) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MakespanError as error:
        sys.stderr.write(f"policies: {error}\n")
        sys.exit(2)
