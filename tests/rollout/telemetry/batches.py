"""Batches whose figures are easy to work out by hand, and simulated ones of any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from makespan.cli import main
from makespan.rollout.telemetry.merge import MergedLog, merge
from tests.rollout.telemetry import logs


def one_hundred() -> list[dict[str, Any]]:
    """A hundred trajectories. The first 98 end after 1, 2, … 98 s, the last two after 110 and 120 s.

    Only trajectories 98 and 99 do anything: 98 is served by replica-0 from 90 to 100 s, and acts from 100 to 110 s
    after 2 s in the queue of one of two slots; 99 is served by replica-1 from 80 to 95 s and acts from 105 to 120 s
    without waiting.
    """
    ends = [*range(1, 99), 110, 120]
    events = [
        logs.event(0, 0.0, "environment_server", slots={"env.step": 2}, server=None),
        logs.start(1, 0.0, trajectories=100, replicas=["replica-0", "replica-1"], concurrency=100),
    ]
    names = [f"t{number}#0" for number in range(100)]
    seq = 2
    for name in names:
        events.append(logs.event(seq, 0.0, "submitted", name, task_id=name, group=name))
        events.append(logs.event(seq + 1, 0.0, "admitted", name))
        seq += 2
    happenings = [
        logs.generate(0, 100.0, "t98#0", 90.0, decode_s=10.0),
        logs.act(0, 110.0, "t98#0", 100.0, queue_s=2.0, service_s=8.0),
        logs.generate(0, 95.0, "t99#0", 80.0, decode_s=15.0, replica="replica-1"),
        logs.act(0, 120.0, "t99#0", 105.0, service_s=15.0),
        *(logs.ended(0, float(end), name) for end, name in zip(ends, names, strict=True)),
    ]
    for happening in sorted(happenings, key=lambda event: event["monotonic_s"]):
        events.append({**happening, "seq": seq})
        seq += 1
    events.append(logs.event(seq, 120.0, "batch_end", stopped=False))
    return [logs.header(), *events]


def merged(directory: Path, lines: list[dict[str, Any]], server: list[dict[str, Any]] | None = None) -> MergedLog:
    """The merged view of a log written by hand, and of an environment server's."""
    paths = [logs.write(directory / "engine.jsonl", lines)]
    if server is not None:
        paths.append(logs.write(directory / "broker.jsonl", [logs.header("broker"), *server]))
    return merge(paths)


def simulated(path: Path, regime: str, chains: int, *options: str) -> MergedLog:
    """A simulated batch of a regime; `options` are those of `makespan simulate`."""
    assert main(["simulate", regime, "--chains", str(chains), "--events", str(path), *options]) == 0
    return merge([path])
