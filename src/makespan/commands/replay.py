"""`makespan replay`: a recorded batch again, on real replicas and a real environment server.

Inference, caching, slots and policies are real; output lengths, environment durations and the tokens that the
environment gave are the trace's (`rollout/replay/playback.py` and `content.py` say how). The run directory is that of
`makespan run`, with `replay.json` beside it: what was replayed, and how much it was like the recording.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from makespan.commands.batch import Ended, Work, check_policies, run_batch
from makespan.commands.hosts import host_configs, model_limits
from makespan.commands.output import write_json
from makespan.commands.policies import add_policies, policies_of
from makespan.rollout.config import RunConfig, check
from makespan.rollout.errors import ConfigError
from makespan.rollout.replay.agent import TraceAgent
from makespan.rollout.replay.content import ReplayConversation, check_lengths, check_vocabulary, context_tokens
from makespan.rollout.replay.fidelity import Durations, fidelity
from makespan.rollout.replay.importers import FORMATS, load
from makespan.rollout.replay.plan import ENVIRONMENT, Plays, limits, plan
from makespan.rollout.replay.playback import PlayedEnvironments, with_playbacks
from makespan.rollout.replay.scaling import scaled_times
from makespan.rollout.replay.trace import Trace, TraceTrajectory
from makespan.rollout.resources import calibration
from makespan.rollout.simulation.batch import Policies, remaining
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.telemetry.merge import MergedLog

REPLAY_VERSION = 1

CONTEXT_STEP_TOKENS = 1024
"""The replicas' longest context is the trace's, rounded up to such steps: a longer one would only ask for memory."""

REQUEST_TIMEOUT_S = 86_400.0
"""A recorded action takes what it takes, and waits for its slot as long as the policies let it."""


def add_replay(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    command.add_argument("trace", type=Path, help="a trace file, or anything else that `makespan simulate` reads")
    command.add_argument("--format", help=f"of the trace: {', '.join(FORMATS)} (default: guessed)")
    command.add_argument("--skip-bad", action="store_true", help="leave out inconsistent trajectories, counting them")
    command.add_argument("--skip-long", action="store_true", help="leave out what the model's context does not hold")
    command.add_argument("--drop-ids", action="store_true", help="draw all tokens, also where the trace has ids")
    command.add_argument("--limit", type=int, help="replay the first so many trajectories")
    command.add_argument("--time-scale", type=float, default=1.0, help="multiplies environment times (default: 1)")
    command.add_argument("--seed", type=int, default=0, help="of drawn tokens, sampling and ties (default: 0)")
    add_policies(command)
    command.add_argument(
        "--history", metavar="PATH", help="what earlier batches taught: read first, replaced at the end"
    )
    command.add_argument("--calibration", type=Path, metavar="PATH", help="costs of inference, for `cost` and `oracle`")
    command.add_argument("--replicas", type=int, default=2, help="vLLM replicas (default: 2)")
    command.add_argument("--slots", type=int, default=8, help="environment actions that run at once (default: 8)")
    command.add_argument("--start-slots", type=int, help="environments that start at once (default: all)")
    add_engines(command)
    command.add_argument("--name", default="replay", help="of the run directory (default: replay)")


def add_engines(command: argparse._ActionsContainer) -> None:
    """Add what `replay` and `ablate --replay` ask of the machine."""
    command.add_argument("--model", default="embedded", help="embedded, smollm2 or a directory (default: embedded)")
    command.add_argument("--num-blocks", type=int, help="cache blocks of a replica (default: what its memory holds)")
    command.add_argument("--kv-cache-gib", type=float, default=1.0, help="cache memory of a replica (default: 1)")
    command.add_argument("--max-num-seqs", type=int, default=32, help="sequences in a replica at once (default: 32)")
    command.add_argument("--runs-directory", default="runs", metavar="PATH", help="where it is made (default: runs)")


def run_replay(options: argparse.Namespace, console: Console) -> int:
    """Run the command; returns the exit code as `makespan run` does. Raises `MakespanError`."""
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit must be at least 1, not {options.limit}")
    trace = load(options.trace, options.format, skip_bad=options.skip_bad)
    replay = _replay(options, trace)
    return run_batch(replay.config, lambda: prepare(replay), console, options.json)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Everything that a replay is made from."""

    config: RunConfig
    model: Path
    vocabulary: int
    trace: Trace
    """What is replayed, its times scaled."""
    time_scale: float
    cost: InferenceCost | None


@dataclass(frozen=True, kw_only=True)
class Engines:
    """What replays run on."""

    model: Path
    vocabulary: int
    context_tokens: int | None
    """The longest context that the model was made for."""

    @staticmethod
    def of(name: str) -> Engines:
        """The limits of a model by its name or directory. Raises `ConfigError`."""
        from makespan.integrations.models import resolve

        model = resolve(name)
        known = model_limits(model)
        if known.vocabulary is None:
            raise ConfigError(
                f"model.path: the configuration of {model.name} has no vocab_size: tokens cannot be drawn"
            )
        return Engines(model=model, vocabulary=known.vocabulary, context_tokens=known.context_tokens)

    def check(self, trajectories: Sequence[TraceTrajectory]) -> None:
        """Raise `ConfigError` for trajectories that the model cannot replay."""
        if self.context_tokens is not None:
            check_lengths(trajectories, self.context_tokens, self.model.name)
        check_vocabulary(trajectories, self.vocabulary, self.model.name)

    def max_model_len(self, trajectories: Sequence[TraceTrajectory]) -> int:
        """The longest context that the replicas are to serve: that of the trajectories, rounded up."""
        longest = max(map(context_tokens, trajectories))
        rounded = -(-longest // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS
        return rounded if self.context_tokens is None else min(rounded, self.context_tokens)


def _replay(options: argparse.Namespace, trace: Trace) -> Replay:
    """Choose from the trace and check what was chosen. Raises `ConfigError`."""
    engines = Engines.of(options.model)
    trace = _chosen(options, trace, engines.context_tokens)
    engines.check(trace.trajectories)
    trace = Trace(trace.header, scaled_times(trace.trajectories, options.time_scale))
    policies = policies_of(options)
    if policies.admission == "coupled" and policies.concurrency is None:
        policies = msgspec.structs.replace(policies, concurrency=options.slots)
    return Replay(
        config=replay_config(
            options,
            policies,
            tasks=len(trace.trajectories),
            max_model_len=engines.max_model_len(trace.trajectories),
            replicas=options.replicas,
            slots=options.slots,
            seed=options.seed,
            history=options.history,
        ),
        model=engines.model,
        vocabulary=engines.vocabulary,
        trace=trace,
        time_scale=options.time_scale,
        cost=None if options.calibration is None else calibration.read(options.calibration).cost,
    )


def _chosen(options: argparse.Namespace, trace: Trace, limit_tokens: int | None) -> Trace:
    """The trajectories to replay, with what was left out of them counted."""
    header, trajectories = trace.header, trace.trajectories[: options.limit]
    if options.skip_long and limit_tokens is not None:
        kept = tuple(recorded for recorded in trajectories if context_tokens(recorded) <= limit_tokens)
        if not kept:
            raise ConfigError(f"--skip-long: every trajectory is longer than {limit_tokens:,} tokens")
        if left_out := len(trajectories) - len(kept):
            header = msgspec.structs.replace(header, dropped={**header.dropped, "too long for the model": left_out})
        trajectories = kept
    if options.drop_ids:
        trajectories = tuple(_without_ids(recorded) for recorded in trajectories)
    return Trace(header, trajectories)


def _without_ids(recorded: TraceTrajectory) -> TraceTrajectory:
    turns = tuple(msgspec.structs.replace(turn, observation_ids=None) for turn in recorded.turns)
    return msgspec.structs.replace(recorded, prompt_ids=None, turns=turns)


def replay_config(
    options: argparse.Namespace,
    policies: Policies,
    *,
    tasks: int,
    max_model_len: int,
    replicas: int,
    slots: int,
    seed: int,
    history: str | None = None,
) -> RunConfig:
    """The configuration of one batch, as `makespan run` would take it. `options` are those of `add_engines`, the name
    and the starting slots. Raises `ConfigError`."""
    document: dict[str, Any] = {
        "name": options.name,
        "runs_directory": options.runs_directory,
        "seed": seed,
        "tasks": tasks,
        "history": history,
        "model": {"path": options.model},
        "replicas": {
            "count": replicas,
            "max_num_seqs": options.max_num_seqs,
            "max_model_len": max_model_len,
            "kv_cache_gib": options.kv_cache_gib,
            "num_blocks": options.num_blocks,
        },
        "environment": {
            "name": ENVIRONMENT,
            "slots": {"start": tasks if options.start_slots is None else options.start_slots, "step": slots},
            "request_timeout_s": REQUEST_TIMEOUT_S,
        },
        "admission": {
            "policy": policies.admission,
            "concurrency": policies.concurrency,
            "reference": policies.reference,
            "order": policies.order,
        },
        "routing": {"policy": policies.routing},
        "scheduling": {"policy": policies.scheduling},
        "limits": {"trajectory_timeout_s": None},
    }
    return check(document, "makespan replay")


def prepare(replay: Replay) -> Work:
    """The batch to run. Raises `ConfigError`."""
    config = replay.config
    tasks, plays = plan(replay.trace.trajectories)
    remaining_s = remaining(plays, replay.cost or InferenceCost())
    check_policies(config, remaining_s)
    host_configs(config, replay.model)

    def notes(log: MergedLog) -> list[str]:
        return _notes(replay, fidelity(log, plays).durations)

    def conclude(ended: Ended) -> dict[str, Any]:
        figures = _figures(replay, plays, ended)
        write_json(str(ended.directory / "replay.json"), figures)
        return figures

    return Work(
        tasks=with_playbacks(tasks, plays),
        model=replay.model,
        agent=TraceAgent(plays, seed=config.seed),
        conversation=ReplayConversation(plays, vocabulary=replay.vocabulary, seed=config.seed),
        limits=limits(replay.trace.trajectories),
        notes=notes,
        conclude=conclude,
        environments=lambda client: PlayedEnvironments(client, plays),
        remaining_s=remaining_s,
        cost=replay.cost,
        facts={"trace": msgspec.to_builtins(replay.trace.header), "time_scale": replay.time_scale},
    )


def _figures(replay: Replay, plays: Plays, ended: Ended) -> dict[str, Any]:
    """What `replay.json` and `--json` say."""
    config = replay.config
    return {
        "version": REPLAY_VERSION,
        "trace": msgspec.to_builtins(replay.trace.header),
        "time_scale": replay.time_scale,
        "seed": config.seed,
        "policies": {
            "admission": config.admission.policy,
            "concurrency": config.admission.concurrency,
            "reference": config.admission.reference,
            "order": config.admission.order,
            "routing": config.routing.policy,
            "scheduling": config.scheduling.policy,
            "history": config.history,
        },
        "fidelity": msgspec.to_builtins(fidelity(ended.log, plays)),
        "summary": msgspec.to_builtins(ended.summary),
    }


def _notes(replay: Replay, durations: Durations) -> list[str]:
    source = replay.trace.header.source or "of unknown source"
    notes = [f"replayed from a trace ({source}): lengths and environment times are the recording's"]
    if replay.time_scale != 1.0:
        notes.append(f"environment times are multiplied by {replay.time_scale:g}")
    if durations.total_pct is not None and durations.within_share is not None:
        verdict = "within" if durations.within else "NOT within"
        notes.append(
            f"environment actions deviate from their recorded seconds by {durations.total_pct:+.2f}% in total, "
            f"{verdict} {durations.tolerance_pct:g}%; one by one {durations.within_share:.0%} of {durations.actions} "
            f"are within it (median {durations.action_pct_p50:+.2f}%, largest {durations.action_pct_largest:+.2f}%)"
        )
    notes += [f"assumed: {assumption}" for assumption in replay.trace.header.assumptions]
    notes += [f"left out: {count} trajectories ({reason})" for reason, count in replay.trace.header.dropped.items()]
    return notes
