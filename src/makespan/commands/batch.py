"""One batch, whatever it is of: from a configuration and some `Work` to a run directory.

`makespan run` and `makespan replay` differ in what they attempt and in what they make of it; what lies between is
here. The parts start side by side (replicas, environment server), the engine runs the batch, and whatever happens,
what was observed is written: event logs, `summary.json`, the resolved configuration, and what the command adds.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from makespan.commands.display import progress, show_summary
from makespan.commands.hosts import machine, parts
from makespan.commands.memory import replica_memory
from makespan.commands.output import check_output, write_json
from makespan.commands.tracking import engine_log, metrics, track
from makespan.envs.client import EnvClient
from makespan.envs.slots import step_class
from makespan.rollout.admission import make_admission
from makespan.rollout.agent import Agent
from makespan.rollout.config import RunConfig, to_yaml
from makespan.rollout.conversation import ContextBuilder
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.engine import RolloutEngine
from makespan.rollout.environment import EnvironmentBackend, EnvironmentFailure
from makespan.rollout.errors import ConfigError
from makespan.rollout.history import History, read_history, write_history
from makespan.rollout.memory import LinearMemory, ReplicaMemory
from makespan.rollout.order import make_order, smaller_limit
from makespan.rollout.replicas.vllm import VllmReplica, visible_gpus
from makespan.rollout.routing import make_router
from makespan.rollout.runner import Limits
from makespan.rollout.scheduling import RemainingSeconds, action_policy
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.telemetry.analysis import analyse
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.telemetry.merge import MergedLog, merge_directory
from makespan.rollout.telemetry.summary import Summary, summarise
from makespan.rollout.trajectory import Task, TrajectoryResult

INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes of a run that a signal ended, by the shell's convention."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A batch that is over, or was stopped, for whoever draws conclusions from it."""

    directory: Path
    results: Sequence[TrajectoryResult]
    log: MergedLog
    summary: Summary


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a batch attempts, by whom, and what is made of it."""

    tasks: Sequence[Task]
    model: Path
    agent: Agent
    conversation: ContextBuilder
    limits: Limits
    notes: Callable[[MergedLog], list[str]]
    """What a reader must know to take the figures for what they are."""
    conclude: Callable[[Ended], Any]
    """Writes what the command leaves in the run directory beside the summary, and gives the figures for `--json`."""
    samples_per_task: int = 1
    environments: Callable[[EnvClient], EnvironmentBackend] = lambda client: client
    """What the engine reaches the environment server through."""
    remaining_s: RemainingSeconds | None = None
    """What the action policy `oracle` knows."""
    cost: InferenceCost | None = None
    """Of inference, where it was calibrated."""
    facts: dict[str, Any] | None = None
    """What the event log is to say of the batch beforehand."""

    @property
    def trajectories(self) -> int:
        return len(self.tasks) * self.samples_per_task


def run_batch(config: RunConfig, prepare: Callable[[], Work], console: Console, json_path: str | None) -> int:
    """Run the batch that `prepare` gives; returns the exit code: 0, 1 when no trajectory ended well, 2 when a task was
    refused, 130 and 143 after a signal.

    Raises `MakespanError` for whatever keeps the batch from starting.
    """
    with asyncio.Runner() as runner:
        return runner.run(_Batch(config, prepare, console, json_path).execute())


def check_policies(config: RunConfig, remaining_s: RemainingSeconds | None = None) -> None:
    """Raise `ConfigError` for a policy that does not exist, and for the oracle where nothing tells it the future."""
    make_router(config.routing.policy, ["replica-0"], random.Random(0))
    admission = config.admission
    make_admission(
        admission.policy, admission.concurrency, memory=LinearMemory(capacity=1), reference=admission.reference
    )
    make_order(config.admission.order, Coordinator(), None, remaining_s)
    action_policy(config.scheduling.policy, Coordinator(), remaining_s)


class _Batch:
    def __init__(self, config: RunConfig, prepare: Callable[[], Work], console: Console, json_path: str | None) -> None:
        self._config = config
        self._prepare = prepare
        self._console = console
        self._json_path = json_path
        self._engine: RolloutEngine | None = None
        self._signal: signal.Signals | None = None
        self._results: list[TrajectoryResult] = []
        self._history = History() if config.history is None else read_history(Path(config.history))
        self._setup_s: float | None = None

    async def execute(self) -> int:
        config = self._config
        main = asyncio.current_task()
        assert main is not None
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for number in INTERRUPTED:
            loop.add_signal_handler(number, self._interrupt, number, main)
        check_output("--json", self._json_path)
        work = self._prepare()
        self._directory = make_run_directory(Path(config.runs_directory), config.name)
        (self._directory / "config.yaml").write_text(to_yaml(config))
        try:
            await self._batch(work, start_s)
        except asyncio.CancelledError:
            if self._signal is None:
                raise
        finally:
            summary = self._write(work)
        if self._signal is not None:
            self._console.print(f"interrupted; what there is was written to {self._directory}")
            return INTERRUPTED[self._signal]
        assert summary is not None
        return self._verdict(summary)

    def _interrupt(self, number: signal.Signals, main: asyncio.Task[int]) -> None:
        """The first signal ends the batch, or the start-up; a second one cannot hurry the clean-up."""
        if self._signal is not None:
            return
        self._signal = number
        if self._engine is not None:
            self._engine.stop()
        else:
            main.cancel()

    async def _batch(self, work: Work, start_s: float) -> None:
        config, console, loop = self._config, self._console, asyncio.get_running_loop()
        events = engine_log(config, self._directory / "events" / "engine.jsonl", loop.time)
        name = config.environment.name
        console.print(f"starting {config.replicas.count} replicas of {work.model.name} and the environment {name}")
        with events:
            async with parts(config, work.model, self._directory) as (replicas, client):
                coordinator = Coordinator(self._history, slots={name: client.info.slots[step_class(name)]})
                engine = make_engine(config, work, replicas, client, coordinator, events)
                self._setup_s = loop.time() - start_s
                console.print(f"ready after {self._setup_s:.0f} s: {work.trajectories} trajectories")
                self._engine = engine
                async with (
                    metrics(config, console, engine, replicas, events),
                    progress(console, engine, lambda: _slots_in_use(client)),
                ):
                    await engine.run(work.tasks, samples_per_task=work.samples_per_task, on_end=self._results.append)
                if config.history is not None:
                    write_history(Path(config.history), coordinator.history)

    def _write(self, work: Work) -> Summary | None:
        """Write what was observed; None when the batch never began."""
        directory, config = self._directory, self._config
        log = merge_directory(directory / "events")
        if next(log.of("batch_start"), None) is None:
            return None
        summary = summarise(
            analyse(log),
            name=directory.name,
            source=work.agent.source,
            notes=[*work.notes(log), *_log_notes(log)],
            setup_s=self._setup_s,
            machine=machine(),
            total=work.trajectories,
        )
        write_json(str(directory / "summary.json"), summary)
        figures = work.conclude(Ended(directory=directory, results=self._results, log=log, summary=summary))
        write_json(self._json_path, figures)
        show_summary(self._console, summary)
        track(config, self._console, directory, log, summary.notes)
        self._console.print(f"run directory: {directory}", soft_wrap=True)
        return summary

    def _verdict(self, summary: Summary) -> int:
        counts = summary.trajectories
        first = next((r for r in self._results if r.failure is not None and r.state == "failed"), None)
        if first is not None and first.failure is not None:
            self._console.print(
                f"{counts.failed} trajectories failed; the first: {first.trajectory_id}: {first.failure.message}",
                soft_wrap=True,
                style="red",
            )
        if summary.failures.get("refused"):
            return 2
        return 0 if counts.finished + counts.truncated else 1


def make_engine(
    config: RunConfig,
    work: Work,
    replicas: dict[str, VllmReplica],
    client: EnvClient,
    coordinator: Coordinator,
    events: EventLog,
) -> RolloutEngine:
    """The engine of a batch, by the policies of its configuration; its log is told what it runs on."""
    if work.facts is not None:
        events.emit("facts", **work.facts)
    events.emit("environment_server", slots=client.info.slots, server=client.info.server_id)
    for replica in replicas.values():
        events.emit("replica", replica=replica.replica_id, **msgspec.structs.asdict(replica.ready))
    admission = config.admission
    memory: ReplicaMemory | None = replica_memory(
        work.model,
        next(iter(replicas.values())).ready,
        on_gpu=bool(visible_gpus()),
        prefix_caching=config.replicas.prefix_caching,
    )
    at_once = smaller_limit(admission.concurrency, admission.reference)
    order = make_order(admission.order, coordinator, at_once, work.remaining_s)
    return RolloutEngine(
        replicas=replicas,
        router=make_router(
            config.routing.policy, list(replicas), random.Random(config.seed), memory=memory, cost=work.cost
        ),
        admission=make_admission(
            admission.policy,
            admission.concurrency,
            order,
            memory=memory,
            replicas=len(replicas),
            reference=admission.reference,
        ),
        environments=work.environments(client),
        agent=work.agent,
        conversation=work.conversation,
        coordinator=coordinator,
        scheduling=action_policy(config.scheduling.policy, coordinator, work.remaining_s),
        limits=work.limits,
        events=events,
    )


def make_run_directory(parent: Path, name: str) -> Path:
    """A new directory `parent/name`, or `parent/name-2`, … when that exists.

    Raises `ConfigError` for a name that cannot be a directory's.
    """
    if not name.isprintable() or not name or name in (".", "..") or "/" in name:
        raise ConfigError(f"name: {name!r} cannot be a directory's name")
    number = 1
    while True:
        directory = parent / (name if number == 1 else f"{name}-{number}")
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(f"runs_directory: cannot make {str(directory)!r}: {error.strerror}") from error
        else:
            return directory


async def _slots_in_use(client: EnvClient) -> str:
    try:
        status = await client.status()
    except EnvironmentFailure:
        return "unknown"
    return ", ".join(f"{slot.running}/{slot.slots} {name}" for name, slot in status.slots.items())


def _log_notes(log: MergedLog) -> list[str]:
    notes = list(log.missing)
    notes += [f"the last line of the log {writer} was cut off" for writer in log.torn]
    return notes
