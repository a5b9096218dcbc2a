"""The agent's side of a turn: how tokens are sampled, and what the agent is taken to have said.

Two sources of actions. `ModelAgent`: the model's own text is the action. `ScriptAgent`: inference is real, with as many
tokens as the scripted action has, but the script's action and its tokens take the place of what was generated; such a
trajectory measures the system, and its reward says nothing of the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from makespan.rollout.conversation import Conversation
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.replicas.base import Completion, Sampling
from makespan.rollout.trajectory import Trajectory

ActionSource = Literal["model", "script", "trace"]


class Reply(msgspec.Struct, frozen=True):
    """What the agent said in a turn.

    `token_ids` go into the context; `logprobs` belong to them one by one, None where they were not sampled.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: list[float] | None


class Agent(Protocol):
    """The contract of an action source."""

    @property
    def source(self) -> ActionSource: ...

    def sampling(self, trajectory: Trajectory, room_tokens: int) -> Sampling | None:
        """How to generate the next turn when `room_tokens` more fit into the context; None: the turn does not fit."""
        ...

    def reply(self, trajectory: Trajectory, completion: Completion) -> Reply: ...


def turn_seed(seed: int, trajectory: Trajectory) -> int:
    """The seed of a trajectory's next turn, made of the run's seed, the trajectory and the turn, so that what is
    sampled does not depend on which requests happen to share an engine step."""
    return zlib.crc32(f"{seed}/{trajectory.trajectory_id}/{len(trajectory.turns)}".encode())


class ModelAgent:
    """The model speaks for itself, each turn with a seed of its own."""

    source: ActionSource = "model"

    def __init__(
        self, conversation: Conversation, *, max_tokens: int, temperature: float, top_p: float, seed: int
    ) -> None:
        self._conversation = conversation
        self._seed = seed
        self._sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_token_ids=conversation.stop_token_ids,
        )

    def sampling(self, trajectory: Trajectory, room_tokens: int) -> Sampling | None:
        if room_tokens < 1:
            return None
        return msgspec.structs.replace(
            self._sampling,
            max_tokens=min(self._sampling.max_tokens, room_tokens),
            seed=turn_seed(self._seed, trajectory),
        )

    def reply(self, trajectory: Trajectory, completion: Completion) -> Reply:
        return Reply(self._conversation.text(completion.token_ids), completion.token_ids, completion.logprobs)


class ScriptAgent:
    """Each task follows its script, an action text a turn."""

    source: ActionSource = "script"

    def __init__(
        self, conversation: Conversation, scripts: Mapping[str, tuple[str, ...]], *, temperature: float
    ) -> None:
        self._conversation = conversation
        self._scripts = scripts
        self._temperature = temperature

    def _action(self, trajectory: Trajectory) -> str:
        task_id, turn = trajectory.task.task_id, len(trajectory.turns)
        script = self._scripts.get(task_id, ())
        if turn >= len(script):
            raise EnvironmentFailure(
                "raised",
                f"the script of task {task_id!r} has {len(script)} actions, and the environment asks for one more: "
                "the script and the environment's data do not belong together",
            )
        return script[turn]

    def sampling(self, trajectory: Trajectory, room_tokens: int) -> Sampling | None:
        length = len(self._conversation.scripted(self._action(trajectory)))
        if length > room_tokens:
            return None
        return Sampling(max_tokens=length, min_tokens=length, temperature=self._temperature)

    def reply(self, trajectory: Trajectory, completion: Completion) -> Reply:
        action = self._action(trajectory)
        return Reply(action, self._conversation.scripted(action), None)
