"""What an environment is, and how the engine reaches one.

An *environment* has Gymnasium's shape with text in both directions: `reset(task)` gives the first observation,
`step(action)` the next one with its reward, `close()` frees what it holds. Authors write `Environment` (asynchronous)
or `SyncEnvironment` (plain functions, run in threads).

The engine never holds an environment: it opens *sessions* through an `EnvironmentBackend`, which owns the slots. Every
reply carries the time its owner measured (`ActionTiming`), so that no duration is a difference of two hosts' clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from makespan.rollout.errors import MakespanError
from makespan.rollout.gate import Grant
from makespan.rollout.trajectory import Progress, Task

FailureKind = Literal[
    "refused",  # the environment does not accept this task (wrong id, missing data): retrying cannot help
    "raised",  # the environment raised: its session is closed, its state is lost
    "timeout",  # the action did not answer within its deadline
    "busy",  # the server's queue is full
    "unknown_outcome",  # the action may or may not have happened: it is never sent again
    "unknown_session",  # the server does not know this session (it expired or the server restarted)
    "cancelled",  # the caller withdrew the action
    "unreachable",  # the server stopped answering
    "protocol",  # the two sides do not speak the same protocol
]


class EnvironmentFailure(MakespanError):
    """An action or a reset that failed.

    Args:
        kind: what happened, one of `FailureKind`.
        message: a sentence for people: what was wrong and, where known, what to do.
        retryable: whether the same request may be sent again without running an action twice.
    """

    def __init__(self, kind: FailureKind, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.retryable = retryable


class TaskRefused(MakespanError):
    """Raised by an environment's `reset` for a task it cannot run; becomes a failure of kind `refused`."""


class Message(msgspec.Struct, frozen=True):
    """One chat message: `role` as the model's chat template names it (`system`, `user`, `tool`), and its text."""

    role: str
    content: str


class Observation(msgspec.Struct, frozen=True):
    """What the agent sees next: the messages to append to its conversation, in order."""

    messages: tuple[Message, ...]
    info: dict[str, Any] = {}


class Action(msgspec.Struct, frozen=True):
    """What the agent did: the text it generated, without its end-of-turn token."""

    text: str


class StepResult(msgspec.Struct, frozen=True):
    """The outcome of one action.

    `terminated`: the task ended by its own rules. `truncated`: it was cut short by a limit. `reward` is the reward of
    this step (most environments give it with the last one; a trajectory's reward is the sum of its steps').
    """

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = {}


class Environment(Protocol):
    """One session of an environment. The server makes one for each trajectory and calls it from one task at a time."""

    async def reset(self, task: Task) -> Observation:
        """Start `task`. Raises `TaskRefused` when the task cannot be run here."""
        ...

    async def step(self, action: Action) -> StepResult: ...

    async def close(self) -> None: ...


class SyncEnvironment(Protocol):
    """The same for blocking code: each call runs in a thread, one at a time for a session."""

    def reset(self, task: Task) -> Observation: ...

    def step(self, action: Action) -> StepResult: ...

    def close(self) -> None: ...


class ActionTiming(msgspec.Struct, frozen=True):
    """How long an action waited for its slot and how long it held it, measured by the owner of the slots.

    An empty `slot_class` says that no slot was needed, because nothing was done.
    """

    slot_class: str
    queue_s: float
    service_s: float
    grant: Grant | None = None
    """What got it the slot, where its owner is in this process; a broker writes that into its own log."""


class Session(Protocol):
    """An open environment session, bound to one trajectory."""

    async def step(self, action: Action, *, key: float, progress: Progress) -> tuple[StepResult, ActionTiming]:
        """Run one action; among waiting actions the smallest `key` goes first, ties in order of arrival.

        Raises `EnvironmentFailure`.
        """
        ...

    async def close(self) -> None:
        """Free the session. Safe to call twice, after a failure and during cancellation."""
        ...


class EnvironmentBackend(Protocol):
    """Whatever owns environment sessions and slots: the ZeroMQ client, a replay, a simulation."""

    async def open(
        self, trajectory_id: str, task: Task, *, key: float, progress: Progress
    ) -> tuple[Session, Observation, ActionTiming]:
        """Start a session for a trajectory and reset it to `task`. Raises `EnvironmentFailure`."""
        ...

    def rekey(self, keys: Mapping[str, float]) -> None:
        """Give the waiting actions of these trajectories new keys; trajectories without one are ignored."""
        ...
