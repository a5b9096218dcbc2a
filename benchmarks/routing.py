"""Admission by parking and routing by cost, in simulation, and how long a routing decision takes.

    python benchmarks/routing.py --quick --json -
    python benchmarks/routing.py --seeds 24 --processes 2 --sessions PATH --json routing.json

Everything runs in virtual time through the shipping engine and policies; batches are those of seeds from 2,000 on,
which were not used for tuning. Every comparison is paired: the same batch under both policies. The coding regimes need
recorded sessions, which are not shipped; without `--sessions` they are left out and their bars hold nothing (`null`).

The decision's time is measured beside that of verl's `GlobalRequestLoadBalancer`, where verl is installed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean

import msgspec

from makespan.rollout.errors import MakespanError
from makespan.rollout.memory import LinearMemory
from makespan.rollout.replay.trace import Trace
from makespan.rollout.routing import CostRouter, RouteRequest, Served
from makespan.rollout.simulation.batch import Hardware, Policies, simulate
from makespan.rollout.simulation.coding import CODING
from makespan.rollout.simulation.ladder import paired
from makespan.rollout.simulation.regimes import SYNTHETIC
from makespan.rollout.simulation.workload import at_reference, knee_slots, known_before, reference_concurrency, workload

FIRST_SEED = 2000

SCARCE = ("coding-sessions", "coding-sessions-cap60", "swe")
"""Regimes in which memory binds at the default 840,000 tokens a replica."""
SESSIONS = ("coding-sessions", "coding-sessions-cap60")

GRID: dict[str, tuple[float, ...]] = {
    "coding-sessions": (0.7, 0.85, 1.0, 1.2),
    "coding-sessions-cap60": (0.7, 0.85, 1.0, 1.2),
    "swe": (0.85, 1.0, 1.2, 1.35),
}
"""Fixed concurrencies, as shares of the reference; the best one was inside of each grid on the tuning seeds. 0.85 has
claims of its own on the sessions."""

END_TO_END: dict[str, tuple[float, float | None]] = {
    "coding-sessions-cap60": (5, None),
    "swe": (15, 23),
    "lognormal-1": (19, 23),
    "coding-sessions": (24, 28),
    "lognormal-0.5": (25, None),
    "search": (47, None),
    "bfcl": (70, None),
}
"""How many percent shorter than `coupled` with sticky routing at least: without and with the prompts' history."""


class Arm(msgspec.Struct, frozen=True):
    """One combination of policies; which one exactly may depend on the batch."""

    name: str
    policies: Callable[[Trace, Hardware], Policies]


def fixed(share: float, routing: str) -> Callable[[Trace, Hardware], Policies]:
    def policies(trace: Trace, hardware: Hardware) -> Policies:
        concurrency = max(1, int(share * reference_concurrency(trace, hardware)))
        return Policies(admission="fixed", concurrency=concurrency, routing=routing)

    return policies


def overbooked(routing: str, *, by_turns: bool) -> Callable[[Trace, Hardware], Policies]:
    """0.85 of the reference as the study has it, 1.15 of the memory: over the mean context of all turns, or of all
    trajectories. (Its text can be read as either.)"""

    def policies(trace: Trace, hardware: Hardware) -> Policies:
        limit = hardware.max_context_tokens or 1 << 60
        chains = [[min(limit, t.prompt_tokens + t.generated_tokens) for t in c.turns] for c in trace.trajectories]
        means = [float(tokens) for chain in chains for tokens in chain] if by_turns else [fmean(c) for c in chains]
        memory = hardware.replicas * hardware.replica.kv_tokens
        concurrency = max(1, int(0.85 * 1.15 * memory / fmean(means)))
        return Policies(admission="fixed", concurrency=concurrency, routing=routing)

    return policies


def gate(
    routing: str, *, scheduling: str = "fifo", order: str = "arrival", history: str = "none"
) -> Callable[[Trace, Hardware], Policies]:
    chosen = Policies(admission="parking", routing=routing, scheduling=scheduling, order=order, history=history)
    return lambda trace, hardware: at_reference(chosen, trace, hardware)


def coupled(trace: Trace, hardware: Hardware) -> Policies:
    return at_reference(Policies(admission="coupled"), trace, hardware)


STICKY, COST = "sticky-least-inflight", "cost"


def arms(regime: str) -> list[Arm]:
    """What is run of a regime."""
    found = [
        Arm("fixed 1, sticky", fixed(1.0, STICKY)),
        Arm("fixed 1, cost", fixed(1.0, COST)),
    ]
    if regime in END_TO_END:
        found += [
            Arm("coupled", coupled),
            Arm("end to end", gate(COST, scheduling="caas", order="forecast", history="last-step")),
        ]
        if END_TO_END[regime][1] is not None:
            found.append(Arm("end to end, history", gate(COST, scheduling="caas", order="forecast", history="prompts")))
    if regime in SCARCE:
        found += [Arm(f"fixed {share}, cost", fixed(share, COST)) for share in GRID[regime] if share != 1.0]
        found += [
            Arm("gate, cost", gate(COST)),
            Arm("gate, sticky", gate(STICKY)),
            Arm("everything, cost", lambda trace, hardware: Policies(routing=COST)),
        ]
    if regime in SESSIONS:
        found += [
            Arm("fixed 0.85, sticky", fixed(0.85, STICKY)),
            Arm("overbooked, sticky", overbooked(STICKY, by_turns=False)),
            Arm("overbooked, cost", overbooked(COST, by_turns=False)),
            Arm("overbooked by turns, sticky", overbooked(STICKY, by_turns=True)),
            Arm("overbooked by turns, cost", overbooked(COST, by_turns=True)),
        ]
    return found


class Run(msgspec.Struct, frozen=True):
    """One batch under one arm."""

    regime: str
    seed: int
    arm: str
    makespan_s: float
    recomputed_tokens: int
    prefilled_tokens: int


class Job(msgspec.Struct, frozen=True):
    regime: str
    seed: int
    sessions: str | None
    arms: tuple[str, ...] | None = None


def run_job(job: Job) -> list[Run]:
    """One batch under all arms of its regime."""
    work = workload(job.regime, sessions=None if job.sessions is None else Path(job.sessions))
    hardware = Hardware(slots=_slots(job), max_context_tokens=work.max_context_tokens)
    batch = work.batch(job.seed)
    runs = []
    for arm in arms(job.regime):
        if job.arms is not None and arm.name not in job.arms:
            continue
        policies = arm.policies(batch, hardware)
        known = known_before(work, job.seed, policies.history, hardware.replica.cost)
        with tempfile.TemporaryDirectory(prefix="makespan-") as directory:
            path = Path(directory) / "engine.jsonl"
            simulate(batch, hardware, policies, seed=job.seed, log_path=path, history=known)
            makespan_s, recomputed, prefilled = _figures(path)
        runs.append(Run(job.regime, job.seed, arm.name, makespan_s, recomputed, prefilled))
    return runs


_KNEES: dict[str, int] = {}


def _slots(job: Job) -> int:
    if job.regime not in _KNEES:
        work = workload(job.regime, sessions=None if job.sessions is None else Path(job.sessions))
        _KNEES[job.regime] = knee_slots(work, Hardware(slots=1).replica.cost)
    return _KNEES[job.regime]


def _figures(log: Path) -> tuple[float, int, int]:
    """(makespan, recomputed tokens, prefilled tokens) of a log, without the rest of the analysis."""
    start_s = end_s = 0.0
    recomputed = prefilled = 0
    for line in log.read_bytes().splitlines():
        if b'"generate"' in line:
            data = msgspec.json.decode(line)["data"]
            recomputed += data["recomputed_tokens"]
            prefilled += data["prompt_tokens"] - data["cached_tokens"]
        elif b'"batch_start"' in line:
            start_s = msgspec.json.decode(line)["monotonic_s"]
        elif b'"batch_end"' in line:
            end_s = msgspec.json.decode(line)["monotonic_s"]
    return end_s - start_s, recomputed, prefilled


class Bar(msgspec.Struct, frozen=True):
    """A claim, whether it holds (null: its runs were not made), the figure that says so, and its standard error."""

    name: str
    holds: bool | None
    figure: float | None
    se: float | None
    seeds: int


class Table:
    """The runs, to be compared."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = {(run.regime, run.arm, run.seed): run for run in runs}

    def pairs(self, regime: str, arm: str, against: str) -> list[tuple[Run, Run]]:
        seeds = sorted(seed for name, own, seed in self._runs if (name, own) == (regime, arm))
        return [
            (self._runs[regime, arm, seed], self._runs[regime, against, seed])
            for seed in seeds
            if (regime, against, seed) in self._runs
        ]

    def change(self, regime: str, arm: str, against: str, high: float, name: str) -> Bar:
        """The claim that the makespan changes by at most `high` percent."""
        pairs = self.pairs(regime, arm, against)
        if not pairs:
            return Bar(name, None, None, None, 0)
        figure = paired([100 * (a.makespan_s / b.makespan_s - 1) for a, b in pairs])
        return Bar(name, figure.mean <= high, figure.mean, figure.se, len(pairs))

    def recomputation(self, regime: str, arm: str, against: str, high: float, name: str) -> Bar:
        """The claim that recomputed tokens change by at most `high` percent."""
        pairs = self.pairs(regime, arm, against)
        if not pairs:
            return Bar(name, None, None, None, 0)
        figure = paired([100 * (a.recomputed_tokens / max(1, b.recomputed_tokens) - 1) for a, b in pairs])
        return Bar(name, figure.mean <= high, figure.mean, figure.se, len(pairs))

    def share(self, regime: str, arm: str) -> float | None:
        """Recomputed share of what was prefilled."""
        runs = [run for (name, own, _), run in self._runs.items() if (name, own) == (regime, arm)]
        return sum(run.recomputed_tokens for run in runs) / sum(run.prefilled_tokens for run in runs) if runs else None

    def best_fixed(self, regime: str) -> str:
        """The fixed concurrency with the shortest mean makespan."""
        means = {
            arm: sum(run.makespan_s for (name, own, _), run in self._runs.items() if (name, own) == (regime, arm))
            for arm in {own for name, own, _ in self._runs if name == regime}
            if arm.startswith("fixed") and arm.endswith(", cost")
        }
        return min(means, key=means.__getitem__, default="fixed 1, cost")


def bars(table: Table, regimes: Sequence[str]) -> Iterator[Bar]:
    """The claims, each with its figure."""
    for regime in SCARCE:
        best, most = table.best_fixed(regime), 9.0 if regime == "swe" else 5.0
        name = f"{regime}: gate at most {most:+.0f}% against the best fixed concurrency ({best})"
        yield table.change(regime, "gate, cost", best, most, name)
        name = f"{regime}: gate at least 30% below admitting everything"
        yield table.change(regime, "gate, cost", "everything, cost", -30.0, name)
    for regime in regimes:
        name = f"{regime}: cost routing at most +1% against sticky, fixed reference"
        yield table.change(regime, "fixed 1, cost", "fixed 1, sticky", 1.0, name)
    for regime in SCARCE:
        name = f"{regime}: cost routing at most +1% against sticky, gate"
        yield table.change(regime, "gate, cost", "gate, sticky", 1.0, name)
    for regime in SESSIONS:
        for at in ("fixed 0.85", "overbooked", "overbooked by turns"):
            ours, theirs = f"{at}, cost", f"{at}, sticky"
            yield table.change(regime, ours, theirs, -4.0, f"{regime}: cost routing at least 4% better, {at}")
            name = f"{regime}: 25% fewer recomputed tokens, {at}"
            yield table.recomputation(regime, ours, theirs, -25.0, name)
        name = f"{regime}: cost routing at least 9% better with the gate"
        yield table.change(regime, "gate, cost", "gate, sticky", -9.0, name)
    for regime, (without, with_history) in END_TO_END.items():
        name = f"{regime}: end to end at least {without:.0f}% below coupled and sticky"
        yield table.change(regime, "end to end", "coupled", -without, name)
        if with_history is not None:
            name = f"{regime}: end to end with history at least {with_history:.0f}% below coupled and sticky"
            yield table.change(regime, "end to end, history", "coupled", -with_history, name)


class Latency(msgspec.Struct, frozen=True):
    """Microseconds of CPU of one decision, the least of several rounds' means: other work on the machine only adds."""

    replicas: int
    place_us: float
    """A new trajectory."""
    return_us: float
    """A returning turn."""
    verl_place_us: float | None
    verl_return_us: float | None


def latency(replicas: int, rounds: int = 9, calls: int = 400) -> Latency:
    """Time decisions with eight trajectories a replica under way and memory that binds."""
    names = [f"replica-{number}" for number in range(replicas)]
    router = CostRouter(names, rng=random.Random(0), memory=LinearMemory(capacity=100_000))
    rng = random.Random(1)
    for number in range(8 * replicas):
        name, context = f"t{number}", rng.randrange(1_000, 30_000)
        placed = router.route(RouteRequest(trajectory_id=name, turn=0, context_tokens=context, group=f"g{number // 8}"))
        if rng.random() < 0.7:
            router.release(placed, name, Served(context_tokens=context + 200, cached_tokens=0, seconds=5.0))
    place: list[float] = []
    back: list[float] = []
    for turn in range(rounds):
        asked = [
            RouteRequest(trajectory_id=f"n{turn}-{n}", turn=0, context_tokens=5_000, group=f"h{n // 8}", now_s=turn)
            for n in range(calls)
        ]
        began_s = time.process_time()
        placed_at = [router.route(request) for request in asked]
        place.append(time.process_time() - began_s)
        for request, replica in zip(asked, placed_at, strict=True):
            router.release(replica, request.trajectory_id, Served(context_tokens=5_200, cached_tokens=0, seconds=5.0))
        asked = [
            RouteRequest(trajectory_id=r.trajectory_id, turn=1, context_tokens=5_400, group=r.group, now_s=turn + 0.5)
            for r in asked
        ]
        began_s = time.process_time()
        placed_at = [router.route(request) for request in asked]
        back.append(time.process_time() - began_s)
        for request, replica in zip(asked, placed_at, strict=True):
            router.release(replica, request.trajectory_id)
            router.finish(request.trajectory_id)
    verl = _verl_latency(names, rounds, calls)
    return Latency(
        replicas=replicas,
        place_us=1e6 * min(place) / calls,
        return_us=1e6 * min(back) / calls,
        verl_place_us=verl[0] if verl else None,
        verl_return_us=verl[1] if verl else None,
    )


def _verl_latency(names: list[str], rounds: int, calls: int) -> tuple[float, float] | None:
    try:
        from verl.workers.rollout.router import GlobalRequestLoadBalancer
    except ImportError:
        return None
    balancer = GlobalRequestLoadBalancer(dict.fromkeys(names))
    place: list[float] = []
    back: list[float] = []
    for turn in range(rounds):
        for times in (place, back):
            began_s = time.process_time()
            for number in range(calls):
                balancer.acquire_server(f"{turn}-{number}")
            times.append(time.process_time() - began_s)
    return 1e6 * min(place) / calls, 1e6 * min(back) / calls


def latency_bars(figures: Sequence[Latency]) -> Iterator[Bar]:
    """20 µs with 64 replicas and 60 µs with 1,024."""
    for figure in figures:
        most = {64: 20.0, 1024: 60.0}.get(figure.replicas)
        if most is not None:
            slower = max(figure.place_us, figure.return_us)
            yield Bar(f"a decision among {figure.replicas} replicas in {most:.0f} µs", slower <= most, slower, None, 0)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """What to run: the regimes with recorded sessions first, as they take longest."""
    if options.quick:
        quick = ("fixed 1, sticky", "fixed 1, cost", "coupled", "end to end")
        return [Job(regime, FIRST_SEED, None, quick) for regime in ("bfcl", "search", "lognormal-0.5")]
    regimes = [*(CODING if options.sessions else ()), *SYNTHETIC]
    if options.regimes:
        regimes = options.regimes.split(",")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    only = None if options.arms is None else tuple(options.arms.split(";"))
    return [Job(regime, seed, options.sessions, only) for seed in seeds for regime in regimes]


def main() -> int:
    """Run the benchmark; 0 when every bar that was measured holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three regimes, one batch each: under 30 s")
    parser.add_argument("--seeds", type=int, default=24, help="batches a regime (default: 24)")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help=f"default: {FIRST_SEED}")
    parser.add_argument("--regimes", help="only these, separated by commas")
    parser.add_argument("--arms", help="only these, separated by semicolons")
    parser.add_argument("--sessions", metavar="PATH", help="recorded sessions for the coding regimes")
    parser.add_argument("--processes", type=int, default=1, help="batches at a time (default: 1)")
    parser.add_argument("--json", metavar="PATH", help="write runs, bars and latencies; - is standard output")
    options = parser.parse_args()
    people = sys.stderr if options.json == "-" else sys.stdout
    latencies = [latency(replicas) for replicas in (4, 64, 1024)]
    jobs, runs = jobs_of(options), []
    with ProcessPoolExecutor(options.processes) as pool:
        for job, done in zip(jobs, pool.map(run_job, jobs), strict=True):
            runs += done
            _write(options.json, runs, [], latencies)  # what there is, should the rest be interrupted
            print(f"{job.regime}, seed {job.seed}: {len(done)} runs", file=sys.stderr, flush=True)
    table, regimes = Table(runs), list(dict.fromkeys(job.regime for job in jobs))
    for regime in regimes:
        print(regime, file=people)
        for arm in arms(regime):
            change = table.change(regime, arm.name, "fixed 1, sticky", 0.0, "")
            if change.figure is not None:
                error = "" if change.se is None else f" ±{change.se:.1f}"
                shares = f"{table.share(regime, arm.name) or 0.0:.2f} of the prefill recomputed"
                print(f"    {arm.name:30s} {change.figure:+6.1f}{error} % against the first; {shares}", file=people)
    for figure in latencies:
        print(f"{figure}", file=people)
    checked = [*bars(table, regimes), *latency_bars(latencies)]
    for bar in checked:
        if bar.holds is not None:
            error = "" if bar.se is None else f" ±{bar.se:.1f}"
            print(f"{'holds' if bar.holds else 'FAILS'}: {bar.name} ({bar.figure:.1f}{error})", file=people)
    _write(options.json, runs, checked, latencies)
    if options.json == "-":
        sys.stdout.write(_document(runs, checked, latencies).decode() + "\n")
    return 0 if all(bar.holds is not False for bar in checked) else 1


def _write(path: str | None, runs: list[Run], checked: list[Bar], latencies: list[Latency]) -> None:
    if path is not None and path != "-":
        Path(path).write_bytes(_document(runs, checked, latencies) + b"\n")


def _document(runs: list[Run], checked: list[Bar], latencies: list[Latency]) -> bytes:
    return msgspec.json.format(msgspec.json.encode({"runs": runs, "bars": checked, "latencies": latencies}), indent=1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MakespanError as error:
        sys.stderr.write(f"routing: {error}\n")
        sys.exit(2)
