"""The data model: a task, the trajectory that attempts it, its turns, and what came of it.

A trajectory alternates inference and environment actions. Its life is a small state machine; `Trajectory.enter` is the
only way to change state and refuses what the table `TRANSITIONS` does not allow, so that a trajectory ends in exactly
one state:

    pending -> resetting -> generating <-> acting -> finished | truncated | failed | cancelled

A lost environment session leads from acting, or from resetting, back to resetting.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
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
    TrajectoryState.RESETTING: _ENDS_EARLY | {TrajectoryState.GENERATING, TrajectoryState.RESETTING},
    TrajectoryState.GENERATING: _ENDS_EARLY | {TrajectoryState.ACTING, TrajectoryState.TRUNCATED},
    TrajectoryState.ACTING: _ENDS_EARLY
    | {
        TrajectoryState.GENERATING,
        TrajectoryState.FINISHED,
        TrajectoryState.TRUNCATED,
        TrajectoryState.RESETTING,
    },
    TrajectoryState.FINISHED: frozenset(),
    TrajectoryState.TRUNCATED: frozenset(),
    TrajectoryState.FAILED: frozenset(),
    TrajectoryState.CANCELLED: frozenset(),
}


class Segment(msgspec.Struct, frozen=True):
    """A stretch of a trajectory's context: given tokens (`logprobs` None, not trained on) or the agent's."""

    token_ids: Sequence[int]
    generated: bool
    logprobs: list[float] | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One inference and the action that followed it, in texts (the tokens are in the trajectory's segments)."""

    index: int
    replica_id: str
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int | None
    action: str
    observation: tuple[tuple[str, str], ...] = ()
    """(role, text) of each message that the environment answered with."""
    reward: float = 0.0


class Failure(msgspec.Struct, frozen=True):
    """Why a trajectory failed or was cut: a kind for programs, a sentence for people."""

    kind: str
    message: str


class TrajectoryResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a trajectory. Failed and cancelled ones have no reward and are not to be trained on."""

    trajectory_id: str
    task_id: str
    group: str
    state: TrajectoryState
    reward: float | None
    failure: Failure | None
    first_prompt: tuple[tuple[str, str], ...]
    turns: tuple[Turn, ...]
    segments: tuple[Segment, ...]
    info: dict[str, Any] = {}
    """What the environment said with the last step."""


class Trajectory:
    """A trajectory in progress: its state, its context and its turns. Moved by the engine only."""

    def __init__(
        self, trajectory_id: str, task: Task, group: str, context_ids: MutableSequence[int] | None = None
    ) -> None:
        self.trajectory_id = trajectory_id
        self.task = task
        self.group = group
        self.state = TrajectoryState.PENDING
        self.first_prompt: tuple[tuple[str, str], ...] = ()
        self.segments: list[Segment] = []
        self.turns: list[Turn] = []
        self.context_ids: MutableSequence[int] = [] if context_ids is None else context_ids
        self.computed_tokens = 0
        """Length of the context prefix that some replica has computed for this trajectory."""
        self.generated_tokens = 0
        self.restarts = 0
        self.environment_s = 0.0
        self.reward = 0.0
        self.failure: Failure | None = None
        self.info: dict[str, Any] = {}

    def enter(self, state: TrajectoryState) -> None:
        """Change state. Raises `TransitionError` where `TRANSITIONS` has no such step."""
        if state not in TRANSITIONS[self.state]:
            raise TransitionError(f"trajectory {self.trajectory_id} cannot go from {self.state} to {state}")
        self.state = state

    def append(self, segment: Segment) -> None:
        """Extend the context."""
        self.segments.append(segment)
        self.context_ids.extend(segment.token_ids)
        if segment.generated:
            self.generated_tokens += len(segment.token_ids)

    def restart(self, context_ids: MutableSequence[int]) -> None:
        """Forget the attempt so far, to begin again from the reset with an empty context.

        The first prompt will be the same, so that much of it has been computed before.
        """
        self.restarts += 1
        self.computed_tokens = min(self.computed_tokens, len(self.segments[0].token_ids) if self.segments else 0)
        self.segments, self.turns, self.context_ids = [], [], context_ids
        self.generated_tokens = 0
        self.reward, self.info = 0.0, {}

    def end(self, state: TrajectoryState, failure: Failure | None = None) -> None:
        """Enter a terminal state for a reason."""
        self.enter(state)
        self.failure = failure

    def result(self) -> TrajectoryResult:
        """The trajectory as it stands, for good once its state is terminal."""
        scored = self.state in (TrajectoryState.FINISHED, TrajectoryState.TRUNCATED)
        return TrajectoryResult(
            trajectory_id=self.trajectory_id,
            task_id=self.task.task_id,
            group=self.group,
            state=self.state,
            reward=self.reward if scored else None,
            failure=self.failure,
            first_prompt=self.first_prompt,
            turns=tuple(self.turns),
            segments=tuple(self.segments),
            info=self.info,
        )
