"""`makespan run`: one batch, from a configuration file to a run directory."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from makespan.commands.batch import Ended, Work, check_policies, run_batch
from makespan.commands.hosts import check_model_length, host_configs
from makespan.commands.output import check_file
from makespan.commands.tasks import Scripts, load_tasks
from makespan.rollout.agent import Agent, ModelAgent, ScriptAgent
from makespan.rollout.config import RunConfig
from makespan.rollout.conversation import Conversation, Tokenizer
from makespan.rollout.errors import ConfigError
from makespan.rollout.replay.recorder import Recorder, with_ids
from makespan.rollout.replay.trace import Trace, write_trace
from makespan.rollout.runner import Limits
from makespan.rollout.telemetry.atif import write_trajectories
from makespan.rollout.telemetry.summary import Summary


def run(config: RunConfig, console: Console, json_path: str | None = None, record: Path | None = None) -> int:
    """Run a batch; returns the exit code: 0, 1 when no trajectory ended well, 2 when a task was refused, 130 and 143
    after a signal. `record` is where the batch is written as a trace.

    Raises `MakespanError` for whatever keeps the batch from starting.
    """
    check_file("--record", record)
    return run_batch(config, lambda: prepare(config, record), console, json_path)


def prepare(config: RunConfig, record: Path | None = None) -> Work:
    """Everything that can be found wrong before anything is started. Raises `ConfigError`."""
    check_policies(config)
    tasks, scripts = load_tasks(config)
    from makespan.integrations.models import resolve

    model = resolve(config.model.path)
    check_model_length(model, config.replicas.max_model_len)
    host_configs(config, model)
    conversation = Conversation(load_tokenizer(model))

    def conclude(ended: Ended) -> Summary:
        directory = ended.directory / "trajectories"
        write_trajectories(directory, ended.results, ended.log, model=str(model), source=config.actions)
        if record is not None:
            source = f"run {config.name} of {config.environment.name}, actions by {config.actions}"
            trace = with_ids(Recorder(ended.log, source).trace(), ended.results)
            header = msgspec.structs.replace(trace.header, assumptions=tuple(_notes(config)))
            write_trace(record, Trace(header, trace.trajectories))
        return ended.summary

    return Work(
        tasks=tasks,
        samples_per_task=config.samples_per_task,
        model=model,
        agent=_agent(config, conversation, scripts),
        conversation=conversation,
        limits=Limits(
            max_turns=config.limits.max_turns,
            max_context_tokens=config.replicas.max_model_len,
            trajectory_timeout_s=config.limits.trajectory_timeout_s,
            restarts=config.limits.restarts,
        ),
        notes=lambda log: _notes(config),
        conclude=conclude,
    )


def load_tokenizer(model: Path) -> Tokenizer:
    """The model's tokenizer. Raises `ConfigError` when the directory has none that transformers can read."""
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot read the tokenizer of {str(model)!r}: {error}") from error
    return tokenizer


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
