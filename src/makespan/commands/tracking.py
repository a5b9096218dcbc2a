"""What a run leaves for people to look at: its report, its place in W&B, and its figures for Prometheus while it runs.

Nothing here may cost a run its result: what cannot be written is said, and the run goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec
from rich.console import Console

from makespan.rollout.config import RunConfig
from makespan.rollout.engine import RolloutEngine
from makespan.rollout.replicas.base import Replica
from makespan.rollout.telemetry.engine_metrics import CountedEventLog, engine_families
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.telemetry.exposition import metrics_endpoint, render
from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.telemetry.report import reported, write_report


def engine_log(config: RunConfig, path: Path, clock: Callable[[], float]) -> EventLog:
    """The engine's event log, one that counts where Prometheus asks."""
    if config.tracking.metrics_port is None:
        return EventLog(path, "engine", clock)
    return CountedEventLog(path, "engine", clock)


@contextlib.asynccontextmanager
async def metrics(
    config: RunConfig, console: Console, engine: RolloutEngine, replicas: Mapping[str, Replica], log: EventLog
) -> AsyncIterator[None]:
    """Serve the engine's figures for the time of the block, where a port is set."""
    if not isinstance(log, CountedEventLog) or config.tracking.metrics_port is None:
        yield
        return

    def text() -> str:
        loads = {name: replica.load() for name, replica in replicas.items()}
        return render([*log.families(), *engine_families(engine.status(), loads)])

    async with metrics_endpoint(config.tracking.metrics_host, config.tracking.metrics_port, text) as url:
        console.print(f"metrics: {url}", soft_wrap=True)
        yield


def track(config: RunConfig, console: Console, directory: Path, log: MergedLog, notes: list[str]) -> None:
    """Write the report and the run's row in W&B, as far as they are wanted."""
    tracking = config.tracking
    if not tracking.report and tracking.wandb is None:
        return
    run = reported(log, name=directory.name, configuration=msgspec.to_builtins(config), notes=notes)
    if tracking.report:
        try:
            write_report(directory / "report.html", [run])
        except OSError as error:
            console.print(f"the report could not be written: {error}", style="red", soft_wrap=True)
        else:
            console.print(f"report: {directory / 'report.html'}", soft_wrap=True)
    if tracking.wandb is not None:
        from makespan.integrations.wandb import attach

        tracker = attach(
            project=tracking.wandb.project,
            name=directory.name,
            mode=tracking.wandb.mode,
            directory=str(directory),
            config=msgspec.to_builtins(config),
        )
        tracker.log(run, step=0)
        tracker.close()
