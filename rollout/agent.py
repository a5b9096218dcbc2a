"""The agent's side of a turn: how tokens are sampled, and what the agent is taken to have said.

Two sources of actions. `ModelAgent`: the model's own text is the action. `ScriptAgent`: inference is real, with as many
tokens as the scripted action has, but the script's action and its tokens take the place of what was generated; such a
trajectory measures the system, and its reward says nothing of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from makespan.rollout.conversation import Conversation
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.replicas.base import Completion, Sampling

ActionSource = Literal["model", "script"]


class Reply(msgspec.Struct, frozen=True):
    """What the agent said in a turn.

    `token_ids` go into the context; `logprobs` belong to them one by one, None where they were not sampled.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float] | None


class Agent(Protocol):
    """The contract of an action source."""

    @property
    def source(self) -> ActionSource: ...

    def sampling(self, task_id: str, turn: int, room_tokens: int) -> Sampling | None:
        """How to generate turn `turn` of a task when `room_tokens` fit into the model's context; None: it cannot."""
        ...

    def reply(self, task_id: str, turn: int, completion: Completion) -> Reply: ...


class ModelAgent:
    """The model speaks for itself."""

    source: ActionSource = "model"

    def __init__(
        self, conversation: Conversation, *, max_tokens: int, temperature: float, top_p: float, seed: int | None
    ) -> None:
        self._conversation = conversation
        self._sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token_ids=conversation.stop_token_ids,
        )

    def sampling(self, task_id: str, turn: int, room_tokens: int) -> Sampling | None:
        if room_tokens < 1:
            return None
        return msgspec.structs.replace(self._sampling, max_tokens=min(self._sampling.max_tokens, room_tokens))

    def reply(self, task_id: str, turn: int, completion: Completion) -> Reply:
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

    def _action(self, task_id: str, turn: int) -> str:
        script = self._scripts.get(task_id, ())
        if turn >= len(script):
            raise EnvironmentFailure(
                "raised",
                f"the script of task {task_id!r} has {len(script)} actions, and the environment asks for one more: "
                "the script and the environment's data do not belong together",
            )
        return script[turn]

    def sampling(self, task_id: str, turn: int, room_tokens: int) -> Sampling | None:
        length = len(self._conversation.scripted(self._action(task_id, turn)))
        if length > room_tokens:
            return None
        return Sampling(max_tokens=length, min_tokens=length, temperature=self._temperature)

    def reply(self, task_id: str, turn: int, completion: Completion) -> Reply:
        action = self._action(task_id, turn)
        return Reply(action, self._conversation.scripted(action), None)
