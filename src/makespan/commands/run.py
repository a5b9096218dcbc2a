"""`makespan run`: one batch, from a configuration file to a run directory.

The parts start side by side (replicas, environment server), the engine runs the batch, and whatever happens, what was
observed is written: event logs, trajectories, `summary.json` and the resolved configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from makespan.commands.display import progress, show_summary
from makespan.commands.output import check_output, write_json
from makespan.commands.tasks import Scripts, load_tasks
from makespan.commands.tracking import engine_log, metrics, track
from makespan.envs.client import EnvClient
from makespan.envs.server import ServerConfig
from makespan.envs.slots import step_class
from makespan.envs.spawn import spawn_server
from makespan.envs.worker import EnvironmentConfig as HostedEnvironment
from makespan.rollout.admission import make_admission
from makespan.rollout.agent import Agent, ModelAgent, ScriptAgent
from makespan.rollout.config import RunConfig, to_yaml
from makespan.rollout.conversation import Conversation, Tokenizer
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.engine import RolloutEngine
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.errors import ConfigError
from makespan.rollout.history import History, read_history, write_history
from makespan.rollout.order import make_order
from makespan.rollout.replicas.vllm import VllmReplica, divide_cores, start_replicas, visible_gpus
from makespan.rollout.replicas.wire import HostConfig
from makespan.rollout.routing import make_router
from makespan.rollout.runner import Limits
from makespan.rollout.scheduling import action_policy
from makespan.rollout.telemetry.analysis import analyse
from makespan.rollout.telemetry.atif import write_trajectories
from makespan.rollout.telemetry.merge import MergedLog, merge_directory
from makespan.rollout.telemetry.summary import Summary, summarise
from makespan.rollout.trajectory import Task, TrajectoryResult

if TYPE_CHECKING:
    from makespan.envs.latency import Latency

INTERRUPTED = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit codes of a run that a signal ended, by the shell's convention."""


class Interrupted(Exception):
    """A signal ended the run."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = INTERRUPTED[number]


def run(config: RunConfig, console: Console, json_path: str | None = None) -> int:
    """Run a batch; returns the exit code: 0, 1 when no trajectory ended well, 2 when a task was refused, 130 and 143
    after a signal.

    Raises `MakespanError` for whatever keeps the batch from starting.
    """
    with asyncio.Runner() as runner:
        return runner.run(_Run(config, console, json_path).execute())


class _Run:
    def __init__(self, config: RunConfig, console: Console, json_path: str | None) -> None:
        self._config = config
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
        tasks, scripts, model, conversation = prepare(config)
        self._directory = make_run_directory(Path(config.runs_directory), config.name)
        (self._directory / "config.yaml").write_text(to_yaml(config))
        total = len(tasks) * config.samples_per_task
        try:
            await self._batch(tasks, scripts, model, conversation, start_s)
        except asyncio.CancelledError:
            if self._signal is None:
                raise
        finally:
            summary = self._write(total, str(model))
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

    async def _batch(
        self, tasks: list[Task], scripts: Scripts, model: Path, conversation: Conversation, start_s: float
    ) -> None:
        config, console, loop = self._config, self._console, asyncio.get_running_loop()
        events = engine_log(config, self._directory / "events" / "engine.jsonl", loop.time)
        console.print(
            f"starting {config.replicas.count} replicas of {model.name} and the environment {config.environment.name}"
        )
        with events:
            async with _parts(config, model, self._directory) as (replicas, client):
                coordinator = Coordinator(
                    self._history,
                    slots={config.environment.name: client.info.slots[step_class(config.environment.name)]},
                )
                order = make_order(config.admission.order, coordinator, config.admission.concurrency)
                engine = RolloutEngine(
                    replicas=replicas,
                    router=make_router(config.routing.policy, list(replicas), random.Random(config.seed)),
                    admission=make_admission(config.admission.policy, config.admission.concurrency, order),
                    environments=client,
                    agent=_agent(config, conversation, scripts),
                    conversation=conversation,
                    coordinator=coordinator,
                    scheduling=action_policy(config.scheduling.policy, coordinator),
                    limits=Limits(
                        max_turns=config.limits.max_turns,
                        max_context_tokens=config.replicas.max_model_len,
                        trajectory_timeout_s=config.limits.trajectory_timeout_s,
                        restarts=config.limits.restarts,
                    ),
                    events=events,
                )
                events.emit("environment_server", slots=client.info.slots, server=client.info.server_id)
                for replica in replicas.values():
                    events.emit("replica", replica=replica.replica_id, **msgspec.structs.asdict(replica.ready))
                self._setup_s = loop.time() - start_s
                console.print(f"ready after {self._setup_s:.0f} s: {len(tasks) * config.samples_per_task} trajectories")
                self._engine = engine
                async with (
                    metrics(config, console, engine, replicas, events),
                    progress(console, engine, lambda: _slots_in_use(client)),
                ):
                    await engine.run(tasks, samples_per_task=config.samples_per_task, on_end=self._results.append)
                if config.history is not None:
                    write_history(Path(config.history), coordinator.history)

    def _write(self, total: int, model: str) -> Summary | None:
        """Write what was observed; None when the batch never began."""
        directory, config = self._directory, self._config
        log = merge_directory(directory / "events")
        if next(log.of("batch_start"), None) is None:
            return None
        summary = summarise(
            analyse(log),
            name=directory.name,
            source=config.actions,
            notes=[*_notes(config), *_log_notes(log)],
            setup_s=self._setup_s,
            machine=machine(),
            total=total,
        )
        write_json(str(directory / "summary.json"), summary)
        write_trajectories(directory / "trajectories", self._results, log, model=model, source=config.actions)
        write_json(self._json_path, summary)
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


def prepare(config: RunConfig) -> tuple[list[Task], Scripts, Path, Conversation]:
    """Everything that can be found wrong before anything is started. Raises `ConfigError`."""
    make_router(config.routing.policy, ["replica-0"], random.Random(0))
    make_admission(config.admission.policy, config.admission.concurrency)
    make_order(config.admission.order, Coordinator(), None)
    action_policy(config.scheduling.policy, Coordinator())
    tasks, scripts = load_tasks(config)
    from makespan.integrations.models import resolve

    model = resolve(config.model.path)
    check_model_length(model, config.replicas.max_model_len)
    host_configs(config, model)
    return tasks, scripts, model, Conversation(load_tokenizer(model))


def check_model_length(model: Path, max_model_len: int) -> None:
    """Raise `ConfigError` when the model was not made for contexts of `max_model_len` tokens."""
    try:
        limit = msgspec.json.decode((model / "config.json").read_bytes()).get("max_position_embeddings")
    except (msgspec.MsgspecError, AttributeError) as error:
        raise ConfigError(f"model.path: {model / 'config.json'} is not a model's configuration: {error}") from error
    if isinstance(limit, int) and max_model_len > limit:
        raise ConfigError(
            f"replicas.max_model_len is {max_model_len}, and {model.name} was made for {limit} tokens: "
            f"--set replicas.max_model_len={limit}"
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


def load_tokenizer(model: Path) -> Tokenizer:
    """The model's tokenizer. Raises `ConfigError` when the directory has none that transformers can read."""
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read the tokenizer of {str(model)!r}: {error}") from error
    return tokenizer


@contextlib.asynccontextmanager
async def _parts(
    config: RunConfig, model: Path, directory: Path
) -> AsyncIterator[tuple[dict[str, VllmReplica], EnvClient]]:
    """Replicas and a connected environment client, for the time of the block."""
    async with _environment_address(config, directory) as address:
        job = f"{directory.name}-{os.getpid()}"
        environment = config.environment
        async with EnvClient(
            address,
            job=job,
            connect_timeout_s=environment.connect_timeout_s,
            request_timeout_s=environment.request_timeout_s,
        ) as client:
            if environment.name not in client.info.environments:
                known = ", ".join(client.info.environments)
                raise ConfigError(
                    f"environment.name: the server at {address} has no {environment.name!r} (it has: {known})"
                )
            replicas = await start_replicas(
                host_configs(config, model), directory / "logs", config.replicas.start_timeout_s
            )
            try:
                yield replicas, client
            finally:
                await asyncio.shield(asyncio.gather(*(replica.close() for replica in replicas.values())))


def host_configs(config: RunConfig, model: Path) -> dict[str, HostConfig]:
    """What each replica's host is started with: a GPU each where there are any, else the cores divided between them.

    Raises `ConfigError` for more replicas than GPUs.
    """
    replicas = config.replicas
    gpus = visible_gpus()
    if gpus and replicas.count > len(gpus):
        raise ConfigError(
            f"replicas.count is {replicas.count}, and {len(gpus)} GPUs are visible: --set replicas.count={len(gpus)}"
        )
    cores = divide_cores(replicas.count, sorted(os.sched_getaffinity(0)))
    memory = None if replicas.kv_cache_gib is None else int(replicas.kv_cache_gib * 2**30)
    return {
        f"replica-{index}": HostConfig(
            model=str(model),
            max_model_len=replicas.max_model_len,
            max_num_seqs=replicas.max_num_seqs,
            kv_cache_bytes=memory,
            max_num_batched_tokens=replicas.max_num_batched_tokens,
            prefix_caching=replicas.prefix_caching,
            cores=() if gpus else cores[index],
            gpu=gpus[index] if gpus else None,
            seed=config.seed,
            num_blocks=replicas.num_blocks,
        )
        for index in range(replicas.count)
    }


@contextlib.asynccontextmanager
async def _environment_address(config: RunConfig, directory: Path) -> AsyncIterator[str]:
    environment = config.environment
    if environment.address is not None:
        yield environment.address
        return
    server = ServerConfig(
        slots={f"{environment.name}.{kind}": count for kind, count in environment.slots.items()},
        environments={environment.name: HostedEnvironment(latency=_latency(config))},
        event_log=str(directory / "events" / "broker.jsonl"),
    )
    async with spawn_server(server, log_path=directory / "logs" / "environment-server.log") as address:
        yield address


def _latency(config: RunConfig) -> Latency | None:
    if (latency := config.environment.latency) is None:
        return None
    from makespan.envs.latency import Latency

    return Latency(median_s=latency.median_s, sigma=latency.sigma, cap_s=latency.cap_s, seed=config.seed)


def _agent(config: RunConfig, conversation: Conversation, scripts: Scripts) -> Agent:
    sampling = config.sampling
    if config.actions == "script":
        return ScriptAgent(conversation, scripts, temperature=sampling.temperature)
    return ModelAgent(
        conversation,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=config.seed,
    )


async def _slots_in_use(client: EnvClient) -> str:
    try:
        status = await client.status()
    except EnvironmentFailure:
        return "unknown"
    return ", ".join(f"{slot.running}/{slot.slots} {name}" for name, slot in status.slots.items())


def _notes(config: RunConfig) -> list[str]:
    notes = []
    if config.actions == "script":
        notes.append("actions are scripted: the reward checks the environment and says nothing of the model")
    if config.model.path == "embedded":
        notes.append("the embedded model has random weights: it measures the system, not a model's quality")
    if (latency := config.environment.latency) is not None and config.environment.address is None:
        notes.append(
            f"environment steps are slowed to lognormal durations (median {latency.median_s} s, sigma {latency.sigma}, "
            f"at most {latency.cap_s} s)"
        )
    if config.environment.address is not None:
        notes.append("the environment server is not this run's own: its event log is where it was started")
    return notes


def _log_notes(log: MergedLog) -> list[str]:
    notes = list(log.missing)
    notes += [f"the last line of the log {writer} was cut off" for writer in log.torn]
    return notes


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
