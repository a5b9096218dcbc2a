"""What it costs to decide whose action runs next, with very many waiting.

    python benchmarks/dispatch.py --quick --json -
    python benchmarks/dispatch.py --waiting 50000 --json dispatch.json

Three prices, in microseconds of one core. A *dispatch*: an action's end frees a slot, the gate grants it to the
smallest key, and the chain's next action is submitted with a key; the same first come, first served, in the same run,
is the baseline of its ratio. A *pass*: the forecast is renewed and all waiting actions are ranked anew; spread over the
dispatches between two passes, if these follow each other as closely as they may.

Keys stand between passes, and that may cost makespan: the last figure is the change of the makespan, over several
batches in virtual time, of ranking every 16 dispatches against ranking at every one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import msgspec

from makespan.rollout.coordinator import RERANK_DISPATCHES, Coordinator
from makespan.rollout.gate import ActionGate
from makespan.rollout.history import ChainRecord, History
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.simulation.batch import Hardware, Policies
from makespan.rollout.simulation.ladder import Paired, paired
from makespan.rollout.simulation.ladder import outcome as simulated
from makespan.rollout.simulation.workload import knee_slots, known_before, workload
from makespan.rollout.trajectory import Progress

SIBLINGS = 8
SLOTS = 512
BAR_US = 20.0


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Prices at one length of the queue."""

    waiting: int
    dispatch_us: float
    fifo_dispatch_us: float
    ratio: float
    pass_ms: float
    pass_us_a_dispatch: float
    """Spread over the dispatches between two passes when passes follow each other as closely as they may."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What the benchmark found."""

    dispatch: list[Dispatch]
    standing_keys_pct: dict[str, Paired]
    """Change of the makespan by keys that stand for 16 dispatches, in percent, by regime."""
    under_bar: bool


def taught() -> History:
    """A history of lengths as in training: lognormal around 15 turns."""
    rng = random.Random(0)
    lengths = [min(600, max(1, round(15 * 2.718 ** rng.gauss()))) for _ in range(512)]
    history = History()
    history.learn(ChainRecord(f"old-{n}", k, 3.0 * k, 4.0 * k, 600 * k) for n, k in enumerate(lengths))
    return history


class Queue:
    """`waiting` chains with an action in the gate each, somewhere in their lives."""

    def __init__(self, waiting: int, *, keyed: bool) -> None:
        rng = random.Random(1)
        self.coordinator = Coordinator(taught(), slots={"env": SLOTS})
        self.coordinator.begin(max_turns=600)
        self.gate: ActionGate[str] = ActionGate(SLOTS)
        self.turns: dict[str, int] = {}
        self._keyed = keyed
        names = [f"g{n // SIBLINGS}#{n % SIBLINGS}" for n in range(waiting + SLOTS)]
        for name in names:
            self.coordinator.join(name, name.partition("#")[0], "env")
            self.coordinator.started(name)
        for name in names:
            self.turns[name] = rng.randint(0, 20)
            self.coordinator.inferred(name, 3.0 * rng.random() * self.turns[name], 2000)
            self.submit(name)
        self.running = self.gate.grant(0.0)

    def submit(self, name: str) -> None:
        key = self.coordinator.key(name, Progress(turns=self.turns[name])) if self._keyed else 0.0
        self.gate.submit(name, key)

    def dispatch_us(self, count: int) -> float:
        """Microseconds of one: release, grant, and the next action's key."""
        began_s = time.perf_counter()
        for _ in range(count):
            over = self.running.pop()
            self.gate.release(over)
            if self._keyed:
                self.coordinator.acted(over, 4.0)
            self.turns[over] += 1
            self.submit(over)
            self.running += self.gate.grant(0.0)
        return 1e6 * (time.perf_counter() - began_s) / count

    def pass_ms(self, count: int) -> float:
        """Milliseconds of a pass: forecast, keys of all, and the gate's new order."""
        began_s = time.perf_counter()
        for number in range(count):
            self.coordinator.end(f"g{number}#0", counts=True)
            self.gate.rekey_all(self.coordinator.rekeys(1e6 * (number + 1)).items())
        return 1e3 * (time.perf_counter() - began_s) / count


def price(waiting: int, dispatches: int, passes: int) -> Dispatch:
    """All prices at one length of the queue; the best of three, because other work only makes them worse."""
    keyed, fifo = Queue(waiting, keyed=True), Queue(waiting, keyed=False)
    caas_us = min(keyed.dispatch_us(dispatches) for _ in range(3))
    fifo_us = min(fifo.dispatch_us(dispatches) for _ in range(3))
    pass_ms = keyed.pass_ms(passes)
    return Dispatch(
        waiting=waiting,
        dispatch_us=caas_us,
        fifo_dispatch_us=fifo_us,
        ratio=caas_us / fifo_us,
        pass_ms=pass_ms,
        pass_us_a_dispatch=1e3 * pass_ms / RERANK_DISPATCHES,
    )


def standing_keys(regime: str, seeds: range) -> Paired:
    """Change of the makespan, in percent, of ranking every 16 dispatches against ranking at every one."""
    work = workload(regime)
    replica = ReplicaHardware(kv_tokens=1 << 40)
    hardware = Hardware(slots=knee_slots(work, replica.cost), replica=replica, max_context_tokens=None)
    changes = []
    for seed in seeds:
        batch, known = work.batch(seed), known_before(work, seed, "last-step", replica.cost)
        times = []
        for every in (1, RERANK_DISPATCHES):
            policies = Policies(scheduling="caas", order="forecast", history="last-step", rerank_dispatches=every)
            times.append(simulated(batch, hardware, policies, seed, known).makespan_s)
        changes.append(100 * (times[1] / times[0] - 1))
    return paired(changes)


def main() -> int:
    """Run the benchmark; 0 when a dispatch stays under its bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5,000 waiting, and one regime on three batches")
    parser.add_argument("--waiting", type=int, default=50_000, help="actions in the queue (default: 50,000)")
    parser.add_argument("--seeds", type=int, default=24, help="batches a regime (default: 24)")
    parser.add_argument("--json", metavar="PATH", help="write the figures; - is standard output")
    options = parser.parse_args()
    people = sys.stderr if options.json == "-" else sys.stdout
    lengths = (1_000, 5_000) if options.quick else (1_000, options.waiting)
    prices = [price(waiting, 2_000 if options.quick else 20_000, 5) for waiting in lengths]
    for found in prices:
        print(
            f"{found.waiting:,} waiting: {found.dispatch_us:.1f} µs a dispatch ({found.ratio:.1f} times fifo's "
            f"{found.fifo_dispatch_us:.1f}), {found.pass_ms:.1f} ms a pass "
            f"({found.pass_us_a_dispatch:,.0f} µs a dispatch)",
            file=people,
        )
    regimes, seeds = (("bfcl",), 3) if options.quick else (("bfcl", "search", "lognormal-1"), options.seeds)
    standing = {regime: standing_keys(regime, range(100, 100 + seeds)) for regime in regimes}
    for regime, change in standing.items():
        error = "" if change.se is None else f" ±{change.se:.1f}"
        print(f"{regime}: keys that stand for {RERANK_DISPATCHES} dispatches: {change.mean:+.1f}{error} %", file=people)
    figures = Figures(
        dispatch=prices, standing_keys_pct=standing, under_bar=all(found.dispatch_us < BAR_US for found in prices)
    )
    if options.json:
        document = msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n"
        if options.json == "-":
            sys.stdout.buffer.write(document)
        else:
            Path(options.json).write_bytes(document)
    return 0 if figures.under_bar else 1


if __name__ == "__main__":
    sys.exit(main())
