"""The tokens of one trajectory as verl trains on them.

A transcript is a prompt and a response. The response starts with the first generated token and holds everything
after it: what the model generated (mask 1, with the log-probability it was sampled at) and what the environment said
(mask 0, log-probability 0). Nothing is ever rendered twice: the next turn's prompt is this very list of token ids, so
it begins with the last turn's prompt and generated ids.

verl's continuous-token builder (`AgentLoopBase.ct_*`) tokenises messages and knows how each model family joins turns;
this module keeps the lists and their lengths consistent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from makespan.rollout.environment import Message


@dataclass
class Transcript:
    """Prompt, response, and the messages behind them. `mask` and `logprobs` are as long as the response."""

    prompt_ids: list[int]
    messages: list[dict[str, str]]
    token_ids: list[int] = field(default_factory=list)
    """Prompt and response: the next turn's prompt."""
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def response_ids(self) -> list[int]:
        # From the end: a builder may drop the last token of a turn, never one of the prompt.
        return self.token_ids[len(self.token_ids) - len(self.mask) :]

    async def append_generated(
        self, builder: Any, token_ids: list[int], logprobs: list[float] | None, text: str
    ) -> None:
        """The model's turn. `builder` is the agent loop (its `ct_merge_assistant_token`)."""
        merged, mask, aligned = await builder.ct_merge_assistant_token(
            self.token_ids,
            token_ids,
            self.mask,
            self.logprobs,
            assistant_logprobs=[0.0] * len(token_ids) if logprobs is None else logprobs,
        )
        self.token_ids, self.mask, self.logprobs = merged.token_ids, mask, aligned
        self.messages.append({"role": "assistant", "content": text})

    def append_unsampled(self, token_id: int) -> None:
        """A token that nobody generated."""
        self.token_ids.append(token_id)
        self.mask.append(0)
        self.logprobs.append(0.0)

    async def append_observation(
        self, builder: Any, messages: tuple[Message, ...], response_length: int, *, end_of_turn_id: int | None
    ) -> bool:
        """The environment's turn. False, and nothing appended, when no token could be generated after it.

        Args:
            builder: the agent loop (its `ct_merge_context_msg`).
            end_of_turn_id: given when the model's turn was cut before it ended: the token that ends it, so that the
                environment's words do not become a part of what the model said.

        Raises `ValueError` when the chat template cannot append these messages.
        """
        updated = [*self.messages, *as_dicts(messages)]
        end = [] if end_of_turn_id is None else [end_of_turn_id]
        merged, mask, aligned = await builder.ct_merge_context_msg(
            self.messages,
            updated,
            self.token_ids + end,
            self.mask + [0] * len(end),
            self.logprobs + [0.0] * len(end),
        )
        if len(mask) >= response_length:
            return False
        self.token_ids, self.mask, self.logprobs = merged.token_ids, mask, aligned
        self.messages = updated
        return True


def as_dicts(messages: tuple[Message, ...]) -> list[dict[str, str]]:
    """Messages in the shape of chat templates."""
    return [{"role": message.role, "content": message.content} for message in messages]
