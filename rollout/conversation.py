"""From chat messages to token ids and back, without ever rendering a turn twice.

A trajectory's context only grows: turn n+1's prompt begins with turn n's exact prompt ids and generated ids. Rendering
the whole conversation again would not give that (a text has many tokenizations, and templates rewrite history), so the
first prompt is rendered once, and every later observation is rendered as what the template puts *after* an assistant
message: its end-of-turn mark, the new messages and the opening of the next assistant message.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol

from makespan.rollout.environment import Message
from makespan.rollout.errors import ConfigError

_MARK = "\u241fassistant\u241f"
"""Stands for an assistant message; a template has no reason to produce it itself."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


class ContextBuilder(Protocol):
    """What the engine needs of a conversation: how messages become the tokens of a context."""

    def new_context(self) -> MutableSequence[int]:
        """An empty context, of whatever type of sequence this builder's tokens are kept in."""
        ...

    def first_prompt(self, messages: Sequence[Message]) -> Sequence[int]: ...

    def extension(self, generated: Sequence[int], messages: Sequence[Message]) -> Sequence[int]: ...


class Conversation:
    """Renders messages for one model. Holds no trajectory: it is shared by all of them.

    Raises `ConfigError` for a chat template whose rendering of a conversation is not the beginning of its rendering of
    a longer one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._past = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        self._rendered_past = self._render(self._past, False)
        self._turn_end = self._encode(self._rendered_past.partition(_MARK)[2])
        if not self._turn_end and tokenizer.eos_token_id is None:
            raise ConfigError(
                "the chat template marks no end of an assistant message and the tokenizer has no EOS token"
            )
        self.stop_token_ids: tuple[int, ...] = self._stop_tokens()
        self.extension([], [Message("user", "?")])  # a template that rewrites history is found here, not in a batch

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program of the model's: whatever it raises, it cannot render this
            roles = ", ".join(sorted({message["role"] for message in messages}))
            raise ConfigError(
                f"the model's chat template cannot render messages of the roles {roles}: {error}"
            ) from error
        return str(rendered)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _stop_tokens(self) -> tuple[int, ...]:
        marks = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        if self._turn_end:
            text = self._tokenizer.decode(self._turn_end[:1], skip_special_tokens=True)
            if not text and self._turn_end[0] not in marks:  # a special token, so not a part of any text
                marks.append(self._turn_end[0])
        return tuple(marks)

    def new_context(self) -> list[int]:
        """A context without tokens."""
        return []

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation's beginning, up to where the assistant speaks."""
        return self._encode(self._render([{"role": m.role, "content": m.content} for m in messages], True))

    def extension(self, generated: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Token ids that follow `generated` when `messages` come next, up to where the assistant speaks again.

        Where the generated ids already end with the template's end-of-turn token it is not repeated.
        """
        longer = self._render([*self._past, *({"role": m.role, "content": m.content} for m in messages)], True)
        if not longer.startswith(self._rendered_past):
            raise ConfigError(
                "the model's chat template renders an earlier message differently once later ones follow, so a "
                "trajectory's tokens cannot be kept; use a template that only appends"
            )
        tail = longer[len(self._rendered_past) :]
        ids = self._encode(self._rendered_past.partition(_MARK)[2] + tail)
        if generated and ids and generated[-1] == ids[0] and ids[0] in self.stop_token_ids:
            return ids[1:]
        return ids

    def text(self, generated: Sequence[int]) -> str:
        """The text of generated ids, without the end-of-turn token."""
        return self._tokenizer.decode(list(generated), skip_special_tokens=True)

    def scripted(self, text: str) -> list[int]:
        """The ids that an assistant would have generated to say `text`, its end-of-turn token included."""
        return [*self._encode(text), *(self._turn_end[:1] or self.stop_token_ids[:1])]
