"""Trajectories in the Agent Trajectory Interchange Format (ATIF 1.8, the `atif` package's models).

ATIF has no field for how long a tool took, so durations stand in `extra`: on an agent step `queue_s`, `prefill_s` and
`decode_s` of its inference, on its observation the slot's `queue_s` and `service_s`. Token ids and log-probabilities
are in the step's metrics, in the order in which they were in the context.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import atif
import msgspec

from makespan import __version__
from makespan.rollout.agent import ActionSource
from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.trajectory import Segment, TrajectoryResult, Turn

SCHEMA_VERSION = "ATIF-v1.8"

LONGEST_FILE_NAME = 120
"""Characters of an id that are kept in a file's name; file systems allow 255 bytes."""

Durations = dict[tuple[str, int, str], dict[str, Any]]
"""What the event log measured, by (trajectory id, turn, kind of event)."""

_MEASURED = ("queue_s", "prefill_s", "decode_s", "service_s", "slot_class", "replica")


def durations(log: MergedLog) -> Durations:
    """The measured durations of every inference and action of a run."""
    found: Durations = {}
    for kind in ("generate", "act"):
        for event in log.of(kind):
            measured = {name: event.data[name] for name in _MEASURED if event.data.get(name) is not None}
            found[event.trajectory_id, event.data["turn"], kind] = measured
    return found


def to_atif(result: TrajectoryResult, *, model: str, source: ActionSource, measured: Durations) -> atif.Trajectory:
    """One trajectory as an ATIF document. A trajectory that failed before its first message has one system step that
    says so, since ATIF wants at least the story of what happened."""
    steps = [
        atif.Step(step_id=number, source="system" if role == "system" else "user", message=text)
        for number, (role, text) in enumerate(result.first_prompt, start=1)
    ]
    generated = [segment for segment in result.segments if segment.generated]
    for turn, segment in zip(result.turns, generated, strict=False):
        steps.append(_agent_step(len(steps) + 1, result.trajectory_id, turn, segment, source, measured))
    if result.failure is not None:
        text = f"{result.state.value} ({result.failure.kind}): {result.failure.message}"
        steps.append(atif.Step(step_id=len(steps) + 1, source="system", message=text))
    return atif.Trajectory(
        schema_version=SCHEMA_VERSION,
        trajectory_id=result.trajectory_id,
        agent=atif.Agent(name="makespan", version=__version__, model_name=model, extra={"action_source": source}),
        steps=steps,
        final_metrics=atif.FinalMetrics(
            total_prompt_tokens=sum(turn.prompt_tokens for turn in result.turns),
            total_completion_tokens=sum(turn.generated_tokens for turn in result.turns),
            total_cached_tokens=_cached(result.turns),
            total_steps=len(steps),
        ),
        extra={
            "task_id": result.task_id,
            "group": result.group,
            "state": result.state.value,
            "reward": result.reward,
            "info": result.info,
        },
    )


def _cached(turns: Sequence[Turn]) -> int | None:
    counts = [turn.cached_tokens for turn in turns]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _agent_step(
    step_id: int, trajectory_id: str, turn: Turn, segment: Segment, source: ActionSource, measured: Durations
) -> atif.Step:
    action = measured.get((trajectory_id, turn.index, "act"))
    results = [
        atif.ObservationResult(content=text, extra=({"role": role, **action} if action else {"role": role}))
        for role, text in turn.observation
    ]
    return atif.Step(
        step_id=step_id,
        source="agent",
        message=turn.action,
        observation=atif.Observation(results=results) if results else None,
        metrics=atif.Metrics(
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.generated_tokens,
            cached_tokens=turn.cached_tokens,
            completion_token_ids=list(segment.token_ids),
            logprobs=segment.logprobs,
        ),
        extra={
            "turn": turn.index,
            "reward": turn.reward,
            "action_source": source,
            "inference": measured.get((trajectory_id, turn.index, "generate")),
        },
    )


def write_trajectories(
    directory: Path, results: Sequence[TrajectoryResult], log: MergedLog, *, model: str, source: ActionSource
) -> None:
    """One JSON file a trajectory, named after its id."""
    directory.mkdir(parents=True, exist_ok=True)
    measured = durations(log)
    for result in results:
        document = to_atif(result, model=model, source=source, measured=measured).to_json_dict()
        (directory / f"{file_name(result.trajectory_id)}.json").write_bytes(msgspec.json.encode(document))


def file_name(trajectory_id: str) -> str:
    """A trajectory's id as a file's name, another one for each id.

    Ids of letters, digits and `._-#` that are not too long stand as they are. Any other id loses the characters that
    a file system may not like, and gains a part of its hash.
    """
    readable = re.sub(r"[^A-Za-z0-9._#-]", "_", trajectory_id)
    if readable == trajectory_id and len(readable) <= LONGEST_FILE_NAME:
        return readable
    digest = hashlib.sha256(trajectory_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{readable[:LONGEST_FILE_NAME]}~{digest[:16]}"
