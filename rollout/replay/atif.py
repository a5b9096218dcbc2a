"""Trajectories in ATIF (`makespan run` writes them, other harnesses too), read for their lengths and times.

ATIF has no field for how long a tool took. Where a document carries it in an observation's `extra.service_s`, as those
of `makespan run` do, that is taken; elsewhere the time between a step's timestamp and the next agent step's, inference
included, has to do. A document that has neither is left out and counted.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from makespan.rollout.replay.growth import Recorded, grown
from makespan.rollout.replay.trace import TraceError, TraceTrajectory

GAP_CAP_S = 30.0
"""Longest time between two steps that is believed to be a tool's."""

ASSUMPTIONS = (
    "an action's time is `extra.service_s` of its observation, or else the time to the next agent step (inference "
    f"included), at most {GAP_CAP_S:g} s",
    "an observation is what the next prompt gained beyond the completion; a prompt that shrank gains nothing",
    "starting an environment takes no time, and there are no caps: ATIF has no fields for them",
)


class _Metrics(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    completion_token_ids: list[int] | None = None


class _Result(msgspec.Struct, frozen=True):
    extra: dict[str, Any] | None = None


class _Observation(msgspec.Struct, frozen=True):
    results: tuple[_Result, ...] = ()


class _Step(msgspec.Struct, frozen=True):
    source: str
    timestamp: str | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None


class _Document(msgspec.Struct, frozen=True):
    schema_version: str
    steps: tuple[_Step, ...]
    trajectory_id: str | None = None
    session_id: str | None = None
    extra: dict[str, Any] | None = None


def parse_document(document: bytes) -> list[TraceTrajectory]:
    """One ATIF document as a trajectory. Raises `TraceError`."""
    parsed = msgspec.json.decode(document, type=_Document)
    if not parsed.schema_version.startswith("ATIF-v1."):
        raise TraceError("schema_version", f"{parsed.schema_version!r}; this makespan reads ATIF-v1")
    steps = [(number, step) for number, step in enumerate(parsed.steps) if step.source == "agent"]
    recorded = []
    for place, (number, step) in enumerate(steps):
        following = steps[place + 1][1] if place + 1 < len(steps) else None
        recorded.append(_recorded(number, step, following))
    extra = parsed.extra or {}
    name = parsed.trajectory_id or parsed.session_id or ""
    if not name:
        raise TraceError("trajectory_id", "missing, and there is no session_id either")
    reward = extra.get("reward")
    return [
        TraceTrajectory(
            trajectory_id=name,
            task_id=str(extra.get("task_id", name)),
            group=str(extra.get("group", name)),
            turns=grown(
                recorded, fields=("metrics.prompt_tokens", "metrics.completion_tokens"), turns_field="agent steps"
            ),
            reward=float(reward) if isinstance(reward, int | float) else None,
        )
    ]


def _recorded(number: int, step: _Step, following: _Step | None) -> Recorded:
    metrics = step.metrics
    if metrics is None or metrics.prompt_tokens is None or metrics.completion_tokens is None:
        raise TraceError(f"steps[{number}].metrics", "no prompt_tokens and completion_tokens")
    ids = metrics.completion_token_ids
    return Recorded(
        prompt_tokens=metrics.prompt_tokens,
        generated_tokens=metrics.completion_tokens,
        environment_s=_environment_s(number, step, following),
        cached_tokens=metrics.cached_tokens,
        generated_ids=ids if ids is not None and len(ids) == metrics.completion_tokens else None,
    )


def _environment_s(number: int, step: _Step, following: _Step | None) -> float | None:
    results = step.observation.results if step.observation else ()
    measured = [r.extra["service_s"] for r in results if r.extra and r.extra.get("service_s") is not None]
    if measured:
        return float(max(measured))  # the messages of one answer each carry their action's time
    if following is None:
        return None
    if step.timestamp is None or following.timestamp is None:
        raise TraceError(f"steps[{number}].timestamp", "no durations: neither extra.service_s nor timestamps")
    try:
        gap_s = (datetime.fromisoformat(following.timestamp) - datetime.fromisoformat(step.timestamp)).total_seconds()
    except (ValueError, TypeError) as error:
        raise TraceError(f"steps[{number}].timestamp", f"{step.timestamp!r}: {error}") from error
    if gap_s < 0:
        raise TraceError(f"steps[{number}].timestamp", f"time goes backwards: {gap_s} s to the next step")
    return min(GAP_CAP_S, gap_s)
