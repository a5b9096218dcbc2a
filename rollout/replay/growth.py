"""From recorded prompts and completions to turns of a context that only grows.

Recordings of other harnesses do not always grow: a history is compacted, hidden reasoning is dropped. What is kept of
such a recording is the length of every generation and the growth of every prompt; a prompt that shrank gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from makespan.rollout.replay.trace import TraceError, TraceTurn


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as another format records it."""

    prompt_tokens: int
    generated_tokens: int
    environment_s: float | None = None
    """Seconds of the action that followed, None where none did."""
    cached_tokens: int | None = None
    generated_ids: list[int] | None = None


def grown(
    turns: Sequence[Recorded],
    *,
    fields: tuple[str, str] = ("prompt_tokens", "generated_tokens"),
    turns_field: str = "turns",
    observation_clip: tuple[int, int] = (0, 1 << 40),
    first_prompt_tokens: int = 1 << 40,
) -> tuple[TraceTurn, ...]:
    """The turns of a growing context, each observation being what the next prompt gained beyond the generated tokens.

    Args:
        turns: as recorded.
        fields: what the source calls its prompt and generated tokens, and `turns_field` its turns: for errors.
        observation_clip: smallest and largest observation.
        first_prompt_tokens: the first prompt is cut to so many.

    Raises `TraceError` for lengths that cannot be.
    """
    for number, turn in enumerate(turns):
        for name, tokens in zip(fields, (turn.prompt_tokens, turn.generated_tokens), strict=True):
            if tokens < 1:
                raise TraceError(
                    f"{turns_field}[{number}].{name}", f"an inference has at least one token, not {tokens}"
                )
        if turn.cached_tokens is not None and not 0 <= turn.cached_tokens <= turn.prompt_tokens:
            message = f"a cached prefix of {turn.cached_tokens} tokens of a prompt of {turn.prompt_tokens}"
            raise TraceError(f"{turns_field}[{number}].cached_tokens", message)
    low, high = observation_clip
    context = min(turns[0].prompt_tokens, first_prompt_tokens) if turns else 0
    kept = []
    for number, turn in enumerate(turns):
        observation = 0
        if number + 1 < len(turns):
            gained = turns[number + 1].prompt_tokens - turn.prompt_tokens - turn.generated_tokens
            observation = min(high, max(low, gained))
        kept.append(
            TraceTurn(
                prompt_tokens=context,
                generated_tokens=turn.generated_tokens,
                observation_tokens=observation,
                environment_s=turn.environment_s,
                cached_tokens=None if turn.cached_tokens is None else min(turn.cached_tokens, context),
                generated_ids=turn.generated_ids,
            )
        )
        context += turn.generated_tokens + observation
    return tuple(kept)
