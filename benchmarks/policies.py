"""Scheduling and admission, `caas` and the baselines, on the regimes of `makespan.rollout.simulation.regimes`.

    python benchmarks/policies.py --quick --json -
    python benchmarks/policies.py --seeds 24 --sessions PATH --json policies.json

Everything runs in virtual time through the shipping engine, gates and policies. Three settings: `ample`, where memory
never binds and everything is admitted, which isolates the order of actions; `gate`, with 840,000 tokens a replica,
parking at the reference concurrency and routing by cost, where the oracle also admits the longest first; and `memory`,
with the same memory and a fixed reference concurrency, where decoupling and admission matter. `ample-half` and
`gate-half` have half of the knee's slots. Makespans are compared batch by batch: each row is the mean change in
percent, with its standard error, against `coupled` in `memory` and against first come, first served in the others.
`caas` knows the last step's lengths, `caas-cold` nothing, `caas-prompts` earlier epochs of the same prompts, too. A
*share* is a policy's gain over the oracle's; it is judged from `MIN_SEEDS` batches on. Batches run on all cores. The
coding regimes need recorded sessions, which are not shipped: without `--sessions` they are left out, and their bars
hold nothing (`null`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from makespan.rollout.errors import MakespanError
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.simulation.batch import Hardware, Policies
from makespan.rollout.simulation.coding import CODING
from makespan.rollout.simulation.ladder import LADDER, Outcome, Paired, Rung, change_pct, climb, paired
from makespan.rollout.simulation.regimes import SYNTHETIC
from makespan.rollout.simulation.workload import Workload, at_reference, knee_slots, workload

FIRST_SEED = 100
"""Seeds below 10 are those that the knee is averaged over."""

AMPLE = ReplicaHardware(kv_tokens=1 << 40)

CAAS, CAAS_PROMPTS = (Policies(scheduling="caas", order="forecast", history=kind) for kind in ("last-step", "prompts"))


def _ample(name: str, policies: Policies) -> Rung:
    return Rung(name, "", lambda trace, hardware: policies)


def _gate(name: str, policies: Policies) -> Rung:
    gated = msgspec.structs.replace(policies, admission="parking", routing="cost")
    return Rung(name, "", lambda trace, hardware: at_reference(gated, trace, hardware))


class Setting(msgspec.Struct, frozen=True):
    """What a regime runs on, under which policies."""

    replica: ReplicaHardware
    rungs: tuple[Rung, ...]
    reference: str
    """The rung that the others are compared with."""
    slots_share: float = 1.0
    """Of the knee's slots."""


AMPLE_RUNGS = (
    *(_ample(name, Policies(scheduling=name)) for name in ("fifo", "progress", "least-progress", "oracle")),
    _ample("caas-cold", Policies(scheduling="caas", order="forecast")),
    _ample("caas", CAAS),
    _ample("caas-prompts", CAAS_PROMPTS),
)
GATE_RUNGS = (
    _gate("fifo", Policies()),
    _gate("oracle", Policies(scheduling="oracle", order="oracle")),
    _gate("caas", CAAS),
    _gate("caas-prompts", CAAS_PROMPTS),
)
SETTINGS = {
    "ample": Setting(AMPLE, AMPLE_RUNGS, "fifo"),
    "ample-half": Setting(AMPLE, AMPLE_RUNGS, "fifo", 0.5),
    "gate": Setting(ReplicaHardware(), GATE_RUNGS, "fifo"),
    "gate-half": Setting(ReplicaHardware(), GATE_RUNGS, "fifo", 0.5),
    "memory": Setting(ReplicaHardware(), LADDER, "coupled"),
}

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

CAAS_SHARES: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "ample": {
        "coding-sessions": (0.38, 0.47),
        "lognormal-1.5": (0.38, 0.46),
        "lognormal-1-cap50": (0.36, None),
        "swe": (0.35, None),
        "lognormal-1": (0.32, 0.49),
        "bfcl": (0.30, None),
        "lognormal-0.5": (0.28, 0.44),
        "lognormal-0.5-cap25": (0.28, None),
        "search": (0.26, None),
        "lognormal-1.5-cap100": (0.25, None),
        "coding-segments": (0.18, None),
        "bimodal": (0.10, None),
    },
    "gate": {
        "lognormal-1.5": (0.38, 0.46),
        "lognormal-1": (0.36, 0.50),
        "swe": (0.22, 0.74),
        "coding-segments": (0.21, None),
        "coding-sessions": (0.17, 0.43),
    },
}
"""By setting: the least share of the oracle's gain that `caas` and `caas-prompts` are to have. Of sessions capped at
60 turns nothing is asked with ample memory: the oracle itself gains next to nothing there."""
MIN_SEEDS = 12
"""A batch's change is noisy by ten points: a share over fewer batches says nothing."""

HARM_PCT, HARM_BOUND_PCT = 1.0, 2.5
"""In no regime may `caas` cost more in the mean, or in the upper end of its 95% interval."""

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
    first_seed: int = FIRST_SEED

    def rungs(self) -> tuple[Rung, ...]:
        rungs = SETTINGS[self.setting].rungs
        return rungs if self.policies is None else tuple(rung for rung in rungs if rung.name in self.policies)

    def work(self) -> Workload:
        return workload(self.regime, sessions=None if self.sessions is None else Path(self.sessions))


class Done(msgspec.Struct, frozen=True):
    """What a job measured."""

    rows: list[Row]
    over_bound: list[OverBound]
    slots: int
    wall_s: float


def run_job(job: Job) -> Done:
    """All policies of a setting on the batches of a regime."""
    began_s = time.monotonic()
    setting, rungs = SETTINGS[job.setting], job.rungs()
    slots = max(1, round(setting.slots_share * knee_slots(job.work(), setting.replica.cost)))
    outcomes: dict[str, list[Outcome]] = {rung.name: [] for rung in rungs}
    parts = [(job, slots, seed) for seed in range(job.first_seed, job.first_seed + job.seeds)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for batch in pool.map(run_batch, parts):
            for name, outcome in batch.items():
                outcomes[name].append(outcome)
    rows, over = [], []
    for rung in rungs:
        change = change_pct(outcomes[rung.name], outcomes[setting.reference])
        rows.append(Row(job.regime, job.setting, rung.name, change.mean, change.se, job.seeds))
        ratio = _over_bound(outcomes[rung.name])
        over.append(OverBound(job.regime, job.setting, rung.name, ratio.mean, ratio.se, job.seeds))
    return Done(rows, over, slots, time.monotonic() - began_s)


def run_batch(part: tuple[Job, int, int]) -> dict[str, Outcome]:
    """All policies on one batch; the part of a job that a process takes."""
    job, slots, seed = part
    work = job.work()
    hardware = Hardware(replica=SETTINGS[job.setting].replica, slots=slots, max_context_tokens=work.max_context_tokens)
    return {name: found[0] for name, found in climb(work, hardware, [seed], job.rungs()).items()}


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
    seeds = {row.regime: row.seeds for row in rows}
    errors = {(row.regime, row.setting, row.policy): row.se_pct for row in rows}
    for setting in ("ample", "ample-half", "gate", "gate-half"):
        for policy, column in (("caas", 0), ("caas-prompts", 1)):
            for regime in STUDY:
                change, error = changes.get((regime, setting, policy)), errors.get((regime, setting, policy))
                case = f"{regime}, {setting}: {policy}"
                yield bar(f"{case} at most {HARM_PCT:+.1f}%", change, -many, HARM_PCT)
                upper = None if change is None or error is None else change + 1.96 * error
                yield bar(f"{case} surely at most {HARM_BOUND_PCT:+.1f}%", upper, -many, HARM_BOUND_PCT)
                least = CAAS_SHARES.get(setting, {}).get(regime, (None, None))[column]
                gain = changes.get((regime, setting, "oracle"))
                if least is not None:
                    share = None if change is None or not gain or seeds[regime] < MIN_SEEDS else change / gain
                    yield bar(f"{case} has at least {least:.0%} of the oracle's gain", share, least, many)
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
        quick = [Job(regime, "ample", 2, None, ("fifo", "progress", "oracle", "caas")) for regime in QUICK_REGIMES]
        ladder = ("coupled", "decoupled", "concurrency")
        return [*quick, Job("bfcl", "memory", 2, None, ladder), Job("swe", "memory", 1, None, ladder)]
    if options.regimes:
        regimes = options.regimes.split(",")
    first, policies = options.first_seed, options.policies and tuple(options.policies.split(","))
    return [
        Job(regime, setting, seeds, options.sessions, policies, first) for setting in settings for regime in regimes
    ]


def main() -> int:
    """Run the benchmark; 0 when every bar that was measured holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four regimes and few batches: under 50 s")
    parser.add_argument("--seeds", type=int, default=24, help="batches a regime (default: 24)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help=f"of the batches (default: {FIRST_SEED})")
    parser.add_argument(
        "--settings", default="ample,gate,memory", help=f"of {', '.join(SETTINGS)} (default: ample,gate,memory)"
    )
    parser.add_argument("--regimes", help="only these, separated by commas")
    parser.add_argument("--policies", help="only these, separated by commas; the reference must be among them")
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
