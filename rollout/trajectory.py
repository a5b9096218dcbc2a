"""The data model: a task, the trajectory that attempts it, its turns, and what came of it.

A trajectory alternates inference and environment actions. Its life is a small state machine; `Trajectory.enter` is the
only way to change state and refuses what the table `TRANSITIONS` does not allow, so that a trajectory ends in exactly
one state:

    pending -> resetting -> generating <-> acting -> finished | truncated | failed | cancelled
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from makespan.rollout.errors import TransitionError


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to attempt.

    Args:
        task_id: unique in its environment, e.g. `multi_turn_base_7`.
        environment: the environment's name on the server, e.g. `bfcl`.
        payload: what the environment needs beyond the id (JSON types).
    """

    task_id: str
    environment: str
    payload: dict[str, Any] = {}


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What has been observed of a trajectory so far; travels with every action."""

    turns: int = 0
    prompt_tokens: int = 0
    """Tokens of the context that were given (prompts and observations)."""
    generated_tokens: int = 0
    elapsed_s: float = 0.0
    """Since admission."""
    environment_s: float = 0.0
    """Seconds that environment actions of this trajectory ran."""
    max_turns: int | None = None
    max_tokens: int | None = None
    group: str = ""
    """Trajectories of the same prompt share a group."""


class TrajectoryState(StrEnum):
    PENDING = "pending"
    RESETTING = "resetting"
    GENERATING = "generating"
    ACTING = "acting"
    FINISHED = "finished"
    TRUNCATED = "truncated"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset(
    {TrajectoryState.FINISHED, TrajectoryState.TRUNCATED, TrajectoryState.FAILED, TrajectoryState.CANCELLED}
)
"""The states that a trajectory never leaves."""

_ENDS_EARLY = frozenset({TrajectoryState.FAILED, TrajectoryState.CANCELLED})

TRANSITIONS: dict[TrajectoryState, frozenset[TrajectoryState]] = {
    TrajectoryState.PENDING: _ENDS_EARLY | {TrajectoryState.RESETTING},
    TrajectoryState.RESETTING: _ENDS_EARLY | {TrajectoryState.GENERATING},
    TrajectoryState.GENERATING: _ENDS_EARLY | {TrajectoryState.ACTING, TrajectoryState.TRUNCATED},
    TrajectoryState.ACTING: _ENDS_EARLY
    | {TrajectoryState.GENERATING, TrajectoryState.FINISHED, TrajectoryState.TRUNCATED},
    TrajectoryState.FINISHED: frozenset(),
    TrajectoryState.TRUNCATED: frozenset(),
    TrajectoryState.FAILED: frozenset(),
    TrajectoryState.CANCELLED: frozenset(),
}
