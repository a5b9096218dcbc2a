"""The options that `simulate` and `ablate` share: what is simulated, and on what."""

from __future__ import annotations

import argparse
from pathlib import Path

from makespan.rollout.errors import ConfigError
from makespan.rollout.replay.importers import FORMATS
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.resources import calibration
from makespan.rollout.simulation.batch import Hardware
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.regimes import CHAINS, GROUP_SIZE
from makespan.rollout.simulation.workload import Workload, knee_slots, smaller, workload

REPLICAS = 4
"""Simulated ones, by default."""

KV_TOKENS = ReplicaHardware().kv_tokens

AMPLE_TOKENS = 1 << 40
"""Memory that never binds."""


def add_workload(command: argparse.ArgumentParser) -> None:
    """Add the shared options."""
    command.add_argument("workload", metavar="TRACE|REGIME", help="a regime's name, or a trace file in a known format")
    command.add_argument("--format", help=f"of a trace file: {', '.join(FORMATS)} (default: guessed)")
    command.add_argument("--skip-bad", action="store_true", help="leave out inconsistent trajectories, counting them")
    command.add_argument("--sessions", type=Path, metavar="PATH", help="recorded sessions for the coding regimes")
    command.add_argument("--chains", type=int, help=f"size of a regime's batch (default: {CHAINS}; replayed 32)")
    command.add_argument("--group-size", type=int, help=f"chains a prompt (default: {GROUP_SIZE}; replayed 4)")
    command.add_argument("--token-scale", type=float, default=1.0, help="multiplies all lengths (default: 1)")
    command.add_argument("--time-scale", type=float, default=1.0, help="multiplies environment times (default: 1)")
    command.add_argument("--replicas", type=int, help="default: 4 simulated, 2 replayed")
    memory = command.add_mutually_exclusive_group()
    memory.add_argument("--kv-tokens", type=int, help=f"memory of a replica (default: {KV_TOKENS:,} tokens)")
    memory.add_argument("--ample", action="store_true", help="memory that never binds")
    command.add_argument("--calibration", type=Path, metavar="PATH", help="costs of inference, from makespan calibrate")
    command.add_argument("--slots", type=int, help="environment slots (default: the knee, work over longest chain)")
    command.add_argument("--start-slots", type=int, help="environments that start at once (default: no bound)")
    command.add_argument("--max-context", type=int, help="cut contexts to so many tokens (regimes: 120,000)")


def resolve(options: argparse.Namespace) -> tuple[Workload, Hardware]:
    """The workload and the hardware of a command line. Raises `MakespanError`."""
    work = workload(
        options.workload,
        sessions=options.sessions,
        format_=options.format,
        skip_bad=options.skip_bad,
        chains=CHAINS if options.chains is None else options.chains,
        group_size=GROUP_SIZE if options.group_size is None else options.group_size,
    )
    work = smaller(work, token_scale=options.token_scale, time_scale=options.time_scale)
    for name in ("replicas", "kv_tokens", "slots", "start_slots", "max_context"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    cost = InferenceCost() if options.calibration is None else calibration.read(options.calibration).cost
    kv_tokens = AMPLE_TOKENS if options.ample else options.kv_tokens or KV_TOKENS
    replica = ReplicaHardware(kv_tokens=kv_tokens, cost=cost)
    hardware = Hardware(
        replicas=options.replicas or REPLICAS,
        replica=replica,
        slots=options.slots or knee_slots(work, replica.cost),
        start_slots=options.start_slots,
        max_context_tokens=options.max_context or work.max_context_tokens,
    )
    return work, hardware


def describe(hardware: Hardware) -> str:
    """The hardware in a line."""
    memory = "ample memory" if hardware.replica.kv_tokens >= AMPLE_TOKENS else f"{hardware.replica.kv_tokens:,} tokens"
    return f"{hardware.replicas} replicas of {memory}, {hardware.slots} environment slots"
