"""`makespan calibrate`: what prefill and decode cost on a real engine, for the plan and for the simulator."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from makespan.commands.output import check_output
from makespan.rollout.errors import ConfigError
from makespan.rollout.replicas.base import Request, Sampling
from makespan.rollout.replicas.vllm import VllmReplica, divide_cores, start_replicas, visible_gpus
from makespan.rollout.replicas.wire import HostConfig
from makespan.rollout.resources.calibration import Calibration, Measured, Probe, calibrate, fit, seconds
from makespan.rollout.resources.core_speed import CoreSpeed, metered

REPETITIONS = 5

Shape = tuple[int, int, int]

FIT: tuple[Shape, ...] = ((1, 1, 1), (1, 4, 1), (1, 12, 1), (1, 1, 48), (1, 8, 48), (4, 2, 48), (8, 6, 48), (16, 1, 48))
JUDGE: tuple[Shape, ...] = ((1, 2, 1), (1, 7, 1), (1, 4, 32), (2, 3, 64), (3, 5, 32), (6, 2, 32), (12, 2, 32))
"""Sequences, prompt (in `--unit-tokens`), generated tokens. The two sets share neither a prompt's length with the same
concurrency nor, but for one sequence, a concurrency."""


def add_calibrate(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("model", help="embedded, smollm2 or a model's directory")
    command.add_argument("--out", type=Path, default=Path("calibration.json"), help="default: calibration.json")
    command.add_argument(
        "--replicas", type=int, default=1, help="that share the machine, all measured at once (default: 1)"
    )
    command.add_argument("--unit-tokens", type=int, default=256, help="prompts are 1 to 12 times this (default: 256)")
    command.add_argument("--max-num-batched-tokens", type=int, default=2048, help="as in the run (default: 2048)")
    command.add_argument(
        "--kv-cache-gib", type=float, help="memory of the cache (default: 1 on a CPU, vLLM's on a GPU)"
    )
    command.add_argument(
        "--start-timeout-s", type=float, default=600.0, help="for the engine to come up (default: 600)"
    )


def run_calibrate(options: argparse.Namespace, console: Console) -> int:
    """Run the command; returns the exit code. Raises `MakespanError`."""
    from makespan.integrations.models import resolve

    check_output("--out", str(options.out))
    if options.unit_tokens < 16:
        raise ConfigError(f"--unit-tokens: prompts below 16 tokens measure nothing, not {options.unit_tokens}")
    gpus = visible_gpus()
    if options.replicas < 1 or (gpus and options.replicas > len(gpus)):
        has = f"1 to {len(gpus)}, as many GPUs are visible" if gpus else "at least 1"
        raise ConfigError(f"--replicas must be {has}, not {options.replicas}")
    model = resolve(options.model)
    gib = options.kv_cache_gib if options.kv_cache_gib is not None else (None if gpus else 1.0)
    config = HostConfig(
        model=str(model),
        max_model_len=options.unit_tokens * 12 + 64,
        max_num_seqs=max(sequences for sequences, _, _ in FIT),
        kv_cache_bytes=None if gib is None else int(gib * 2**30),
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefix_caching=True,  # as in a run; no two probes share a prefix
        cores=(),
        seed=0,
    )
    cores = divide_cores(options.replicas, sorted(os.sched_getaffinity(0)))
    configs = {
        f"replica-{index}": msgspec.structs.replace(config, gpu=gpus[index])
        if gpus
        else msgspec.structs.replace(config, cores=cores[index])
        for index in range(options.replicas)
    }
    with tempfile.TemporaryDirectory(prefix="makespan-") as directory:
        result = asyncio.run(
            _calibrate(options.model, configs, options.unit_tokens, Path(directory), options.start_timeout_s)
        )
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    _show(console, result)
    console.print(f"written to {options.out}; use it with --calibration {options.out}", soft_wrap=True)
    return 0


async def _calibrate(
    name: str, configs: dict[str, HostConfig], unit: int, logs: Path, start_timeout_s: float
) -> Calibration:
    cores = [config.cores for config in configs.values()]
    replicas = await start_replicas(configs, logs, start_timeout_s)
    try:
        async with metered([core for own in cores for core in own]) as speed:
            spans = await run_probes(list(replicas.values()), probes(FIT, unit) + probes(JUDGE, unit))
    finally:
        await asyncio.gather(*(replica.close() for replica in replicas.values()))
    measured, core_s = at_usual_speed(spans, speed, cores)
    fitted, judged = measured[: len(FIT)], measured[len(FIT) :]
    first = next(iter(configs.values()))
    machine = f"GPU {first.gpu}" if first.gpu is not None else f"{len(first.cores)} cores, {platform.machine()}"
    if len(configs) > 1:
        machine += f", each of {len(configs)} replicas"
    return calibrate(name, machine, fitted, judged, first.max_num_batched_tokens, core_s=core_s)


def probes(shapes: tuple[Shape, ...], unit_tokens: int) -> list[Probe]:
    """The probes of a set, with prompts in units of `unit_tokens`."""
    return [
        Probe(sequences=sequences, prompt_tokens=prompt * unit_tokens, generated_tokens=generated)
        for sequences, prompt, generated in shapes
    ]


class Span(NamedTuple):
    """When a replica ran a probe, on `time.monotonic`'s clock."""

    replica: int
    probe: Probe
    from_s: float
    to_s: float


async def run_probes(replicas: Sequence[VllmReplica], asked: list[Probe]) -> list[Span]:
    """Run all probes in each of `REPETITIONS` rounds, so that a disturbance hits each of them once. Every replica runs
    the same probe at the same time: what they share, memory bandwidth above all, is shared as in a batch."""
    rng = random.Random(0)
    spans: list[Span] = []
    for _ in range(REPETITIONS):
        for probe in asked:
            at_once = (_once(index, replica, probe, rng) for index, replica in enumerate(replicas))
            spans += await asyncio.gather(*at_once)
    return spans


def at_usual_speed(
    spans: Sequence[Span], speed: CoreSpeed, cores: Sequence[Sequence[int]]
) -> tuple[list[Measured], float | None]:
    """What each probe takes while the replicas' `cores` are as fast as they were in the mean over all probes, the
    median of its repetitions; and the mean reading of the cores' speed (None where it was not metered)."""
    began_s, ended_s = min(span.from_s for span in spans), max(span.to_s for span in spans)
    usual = [speed.seconds(own, began_s, ended_s) for own in cores]
    found: dict[Probe, list[float]] = {}
    for span in spans:
        took_s, usual_s = span.to_s - span.from_s, usual[span.replica]
        then_s = speed.seconds(cores[span.replica], span.from_s, span.to_s)
        if then_s is not None and usual_s is not None:
            took_s *= usual_s / then_s
        found.setdefault(span.probe, []).append(took_s)
    measured = [Measured(probe=probe, seconds=statistics.median(times)) for probe, times in found.items()]
    known = [usual_s for usual_s in usual if usual_s is not None]
    return measured, statistics.fmean(known) if known else None


async def _once(index: int, replica: VllmReplica, probe: Probe, rng: random.Random) -> Span:
    tokens = probe.generated_tokens
    sampling = Sampling(max_tokens=tokens, min_tokens=tokens)  # sampled, as rollouts are
    requests = [
        Request(
            request_id=f"probe-{rng.getrandbits(64):x}",
            trajectory_id=f"probe-{sequence}",
            turn=0,
            prompt_ids=[rng.randrange(3, 400) for _ in range(probe.prompt_tokens)],
            sampling=sampling,
        )
        for sequence in range(probe.sequences)
    ]
    began_s = time.monotonic()
    await asyncio.gather(*(replica.generate(request) for request in requests))
    return Span(index, probe, began_s, time.monotonic())


def _show(console: Console, result: Calibration) -> None:
    cost = result.cost
    table = Table(show_header=False)
    table.add_row("a step", f"{cost.step_s * 1e3:.3f} ms")
    table.add_row("a sequence in a step", f"{cost.sequence_s * 1e3:.3f} ms")
    table.add_row("a token of context read", f"{cost.context_s * 1e9:.1f} ns")
    table.add_row("a prompt token computed", f"{cost.prefill_s * 1e6:.1f} µs")
    table.add_row("error on other lengths and concurrencies", f"median {result.median_error:.1%}")
    table.add_row("", f"largest {result.largest_error:.1%}")
    console.print(table)
    judged = Table("sequences", "prompt", "generated", "measured s", "predicted s", title="judged on")
    part = fit(result.fitted_on, cost.chunk_tokens)
    for one in result.judged_on:
        figures = (one.probe.sequences, one.probe.prompt_tokens, one.probe.generated_tokens)
        judged.add_row(*(f"{x:,}" for x in figures), f"{one.seconds:.3f}", f"{seconds(one.probe, part):.3f}")
    console.print(judged)
