"""`makespan ablate --replay`: every rung replays the same batches on the same engines, one after the other.

Replicas and environment server start once. Before each batch all cached prefixes are dropped, and the order of the
rungs rotates from batch to batch, so that a machine that gets slower favours none of them. Afterwards the same rungs
are simulated on what the engines say of themselves, where their costs were calibrated, each batch with the costs of
cores as fast as they were in it.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from makespan.commands.batch import make_engine, make_run_directory
from makespan.commands.hosts import connected, environment_address, host_configs, machine, running_replicas
from makespan.commands.memory import replica_memory
from makespan.commands.output import write_json
from makespan.commands.replay import Engines, Replay, prepare, replay_config
from makespan.rollout.admission import OversampleCut
from makespan.rollout.config import RunConfig
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.history import History
from makespan.rollout.replay.fidelity import fidelity
from makespan.rollout.replay.plan import plan
from makespan.rollout.replay.trace import Trace, TraceTurn
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.replicas.vllm import VllmReplica, visible_gpus
from makespan.rollout.resources.calibration import Calibration
from makespan.rollout.resources.core_speed import CoreSpeed, metered
from makespan.rollout.routing import STICKY
from makespan.rollout.simulation.batch import Hardware, Policies
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.ladder import Outcome, Rung, outcome, outcome_of
from makespan.rollout.simulation.workload import Workload, known_before
from makespan.rollout.telemetry.analysis import analyse
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.telemetry.merge import MergedLog, merge


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One rung on one batch."""

    rung: str
    seed: int
    outcome: Outcome
    environment_pct: float | None
    """By how much the environments' seconds deviate from the recorded ones."""
    other_turns: int
    """Turns with another number of tokens than the recorded ones, or that were not replayed."""
    core_s: float | None = None
    """How fast the replicas' cores were during the batch (`CoreSpeed`); None on GPUs."""
    homes: dict[str, str] | None = None
    """Where sticky routing placed each trajectory, at random where replicas had as few in flight; None: it moves."""
    simulated_s: float | None = None
    """The makespan of the same batch under the same policies in simulation, on cores of that speed and with the same
    `homes`: the mean over draws of other ties, and of small deviations of the environments' times."""
    simulated_sd_s: float | None = None
    """Standard deviation over these draws: the replay is one of them."""


class Ablation(msgspec.Struct, frozen=True, kw_only=True):
    """What was replayed, and on what."""

    hardware: Hardware
    """What the engines say of themselves, in the simulator's terms."""
    machine: dict[str, str | int]
    runs: list[Replayed]
    directory: str


OnRun = Callable[[Replayed], None]

LEAST_DRAWS, MOST_DRAWS = 8, 64
"""Simulations of a batch. What happens on a tie can decide a makespan: with scarce memory its standard deviation over
draws was 7 to 23% of it under sticky routing, whose placements are known since. A replay is one draw."""
JITTER = 0.01
"""Each draw's environment times deviate by so much (standard deviation of the logarithm), as they do in a replay: a few
milliseconds decide who comes first, and that what follows."""
CERTAIN = 0.02
"""The mean over draws is known well enough when its standard error is so small a share of it."""


def replayed(
    options: argparse.Namespace,
    work: Workload,
    seeds: Sequence[int],
    rungs: Sequence[Rung],
    *,
    replicas: int,
    slots: int,
    calibration: Calibration | None,
    on_run: OnRun,
) -> Ablation:
    """Replay every rung on the batch of every seed; with a calibration the same is simulated. What there is stands in
    the run directory's `ablation.json` after each batch.

    Raises `MakespanError` for whatever keeps the batches from starting.
    """
    batches = {seed: work.batch(seed) for seed in seeds}
    everything = [recorded for batch in batches.values() for recorded in batch.trajectories]
    engines = Engines.of(options.model)
    engines.check(everything)
    config = replay_config(
        options,
        Policies(),
        tasks=max(len(batch.trajectories) for batch in batches.values()),
        max_model_len=engines.max_model_len(everything),
        replicas=replicas,
        slots=slots,
        seed=0,
    )
    cores = [core for host in host_configs(config, engines.model).values() for core in host.cores]
    directory = make_run_directory(Path(options.runs_directory), options.name)
    live = _Live(options, work, engines, slots, calibration, cores, directory)
    with asyncio.Runner() as runner:
        ablation = runner.run(live.replay(batches, rungs, config, on_run))
    if calibration is not None:
        ablation = msgspec.structs.replace(
            ablation, runs=[live.simulated(run, batches, rungs) for run in ablation.runs]
        )
    write_json(str(directory / "ablation.json"), ablation)
    return ablation


class _Live:
    def __init__(
        self,
        options: argparse.Namespace,
        work: Workload,
        engines: Engines,
        slots: int,
        calibration: Calibration | None,
        cores: Sequence[int],
        directory: Path,
    ) -> None:
        self._options = options
        self._work = work
        self._engines = engines
        self._slots = slots
        self._calibration = calibration
        self._cost = None if calibration is None else calibration.cost
        self._cores = cores
        self._directory = directory
        self._hardware: Hardware | None = None

    async def replay(
        self, batches: dict[int, Trace], rungs: Sequence[Rung], config: RunConfig, on_run: OnRun
    ) -> Ablation:
        runs: list[Replayed] = []
        async with (
            environment_address(config, self._directory) as address,
            running_replicas(config, self._engines.model, self._directory) as replicas,
            metered(self._cores) as speed,
        ):
            self._hardware = self._measured_hardware(replicas)
            for number, (seed, batch) in enumerate(batches.items()):
                turned = [*rungs[number % len(rungs) :], *rungs[: number % len(rungs)]]
                for rung in turned:
                    runs.append(await self._batch(rung, seed, batch, replicas, address, speed))
                    on_run(runs[-1])
                    write_json(str(self._directory / "ablation.json"), self._ablation(runs))
        return self._ablation(runs)

    async def _batch(
        self,
        rung: Rung,
        seed: int,
        batch: Trace,
        replicas: dict[str, VllmReplica],
        address: str,
        speed: CoreSpeed,
    ) -> Replayed:
        assert self._hardware is not None
        policies = rung.policies(batch, self._hardware)
        replay = Replay(
            config=replay_config(
                self._options,
                policies,
                tasks=len(batch.trajectories),
                max_model_len=self._engines.max_model_len(batch.trajectories),
                replicas=len(replicas),
                slots=self._slots,
                seed=seed,
            ),
            model=self._engines.model,
            vocabulary=self._engines.vocabulary,
            trace=batch,
            time_scale=1.0,
            cost=self._cost,
        )
        prepared = prepare(replay)
        known = known_before(self._work, seed, policies.history, self._cost or InferenceCost())
        coordinator = Coordinator(known, slots={replay.config.environment.name: self._slots})
        path = self._directory / f"{rung.name}.{seed}" / "events" / "engine.jsonl"
        path.parent.mkdir(parents=True)
        for replica in replicas.values():
            await replica.reset_prefix_cache()
        loop = asyncio.get_running_loop()
        with EventLog(path, "engine", loop.time) as events:
            async with connected(replay.config, address, f"{self._directory.name}-{rung.name}-{seed}") as client:
                engine = make_engine(replay.config, prepared, replicas, client, coordinator, events)
                cut = None if policies.needed is None else OversampleCut(policies.needed, engine.stop)
                began_s = time.monotonic()
                await engine.run(prepared.tasks, on_end=cut)
                core_s = speed.seconds(self._cores, began_s, time.monotonic())
        log = merge([path])
        like = fidelity(log, plan(batch.trajectories)[1])
        missing = 0 if policies.needed is not None else like.turns - like.replayed_turns
        return Replayed(
            rung=rung.name,
            seed=seed,
            outcome=outcome_of(log, analyse(log), batch),
            environment_pct=like.durations.total_pct,
            other_turns=like.other_prompts + like.other_generations + missing,
            core_s=core_s,
            homes=homes(log) if policies.routing == STICKY else None,
        )

    def simulated(self, run: Replayed, batches: dict[int, Trace], rungs: Sequence[Rung]) -> Replayed:
        """The run with its makespan in simulation."""
        assert self._hardware is not None
        assert self._calibration is not None
        (rung,) = (rung for rung in rungs if rung.name == run.rung)
        return simulated(run, rung, self._work, batches[run.seed], self._hardware, self._calibration.core_s)

    def _measured_hardware(self, replicas: dict[str, VllmReplica]) -> Hardware:
        """What the replicas say of themselves, in the simulator's terms; memory that nobody told counts as ample."""
        ready = next(iter(replicas.values())).ready
        memory = replica_memory(self._engines.model, ready, on_gpu=bool(visible_gpus()), prefix_caching=True)
        replica = ReplicaHardware(
            max_sequences=self._options.max_num_seqs,
            shared_prompts=True,
            kv_tokens=1 << 40,
            cost=self._cost or InferenceCost(),
        )
        if memory is not None:
            replica = msgspec.structs.replace(
                replica,
                kv_tokens=memory.capacity * memory.block_tokens // memory.attention,
                block_tokens=memory.block_tokens,
                state_tokens=memory.states * memory.block_tokens // memory.attention,
                checkpoint_tokens=memory.states * memory.block_tokens // memory.attention // 2,
                keeps_generated=not memory.states,
            )
        start = self._options.start_slots
        return Hardware(replicas=len(replicas), replica=replica, slots=self._slots, start_slots=start)

    def _ablation(self, runs: Sequence[Replayed]) -> Ablation:
        assert self._hardware is not None
        return Ablation(hardware=self._hardware, machine=machine(), runs=list(runs), directory=str(self._directory))


def homes(log: MergedLog) -> dict[str, str]:
    """The replica that generated each trajectory's first turn."""
    found: dict[str, str] = {}
    for event in log.of("generate"):
        assert event.trajectory_id is not None
        found.setdefault(event.trajectory_id, event.data["replica"])
    return found


def simulated(
    run: Replayed, rung: Rung, work: Workload, batch: Trace, hardware: Hardware, calibrated_core_s: float | None
) -> Replayed:
    """The run with what simulation says of its batch under its policies, on cores of the speed that they had and with
    trajectories where sticky routing placed them."""
    policies = rung.policies(batch, hardware)

    def known() -> History | None:
        return known_before(work, run.seed, policies.history, hardware.replica.cost)

    paced = at_speed(hardware, run.core_s, calibrated_core_s)
    draws_s = drawn_s(batch, paced, policies, run.seed, known, run.homes)
    mean_s, sd_s = statistics.fmean(draws_s), statistics.stdev(draws_s)
    return msgspec.structs.replace(run, simulated_s=mean_s, simulated_sd_s=sd_s)


def drawn_s(
    batch: Trace,
    hardware: Hardware,
    policies: Policies,
    seed: int,
    known: Callable[[], History | None],
    homes: Mapping[str, str] | None = None,
) -> list[float]:
    """Makespans in simulation, each with other draws of ties and with environment times that deviate by `JITTER`, until
    their mean is `CERTAIN` or there are `MOST_DRAWS`; `known` gives what the job knows before the batch, anew each
    time, as a batch adds to it. With `homes` sticky routing draws no ties."""
    drawn: list[float] = []
    while len(drawn) < MOST_DRAWS:
        draw = MOST_DRAWS * seed + len(drawn)
        shaken = _shaken(batch, random.Random(draw))
        drawn.append(outcome(shaken, hardware, policies, draw, known(), homes).makespan_s)
        if len(drawn) >= LEAST_DRAWS:
            error = statistics.stdev(drawn) / len(drawn) ** 0.5
            if error <= CERTAIN * statistics.fmean(drawn):
                break
    return drawn


def _shaken(batch: Trace, rng: random.Random) -> Trace:
    """The batch with environment times that deviate a little."""

    def shaken(turn: TraceTurn) -> TraceTurn:
        if turn.environment_s is None:
            return turn
        return msgspec.structs.replace(turn, environment_s=turn.environment_s * math.exp(rng.gauss(0.0, JITTER)))

    chains = tuple(
        msgspec.structs.replace(chain, turns=tuple(map(shaken, chain.turns))) for chain in batch.trajectories
    )
    return msgspec.structs.replace(batch, trajectories=chains)


def at_speed(hardware: Hardware, core_s: float | None, calibrated_core_s: float | None) -> Hardware:
    """The hardware whose costs were calibrated on cores with readings of `calibrated_core_s`, with those of cores with
    `core_s`; as it is where either is not known."""
    if core_s is None or calibrated_core_s is None:
        return hardware
    cost = hardware.replica.cost.times(core_s / calibrated_core_s)
    return msgspec.structs.replace(hardware, replica=msgspec.structs.replace(hardware.replica, cost=cost))
