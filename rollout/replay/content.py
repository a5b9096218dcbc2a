"""The tokens of a replay: which ids stand in a context whose lengths are recorded.

A prefix cache works on ids, so a replay needs some, and the right ones in common. What the environment gave is the
trace's own ids where it has them. Otherwise ids are drawn, by the replay's seed and the name of the stretch: the same
in every replay of the trace, the same first prompt for all trajectories of a group (a shorter one is the beginning of
a longer one), and nothing in common elsewhere. What the agent said is what the replica generated in this replay, in
the recorded number; each turn of each trajectory is sampled with a seed of its own, so siblings go different ways.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from makespan.rollout.environment import Message
from makespan.rollout.errors import ConfigError
from makespan.rollout.replay.plan import Plays
from makespan.rollout.replay.playback import FIRST_PROMPT, Stretch, stretch
from makespan.rollout.replay.trace import TraceTrajectory


class ReplayConversation:
    """Turns the stretches of a replay into token ids.

    Args:
        plays: what each trajectory plays.
        vocabulary: number of the model's token ids. Drawn ids are from the middle half: tokenizers keep their special
            tokens at either end.
        seed: of the drawn ids.
    """

    def __init__(self, plays: Plays, *, vocabulary: int, seed: int) -> None:
        self._plays = plays
        self._ids = range(vocabulary // 4, max(vocabulary // 4 + 1, 3 * vocabulary // 4))
        self._seed = seed

    def new_context(self) -> list[int]:
        """A context without tokens."""
        return []

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids that the messages stand for."""
        return [token for message in messages for token in self._tokens(stretch(message))]

    def extension(self, generated: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The ids that the messages stand for; marks between turns are counted in them."""
        return self.first_prompt(messages)

    def _tokens(self, part: Stretch) -> list[int]:
        recorded = self._plays[part.trajectory_id]
        if part.turn == FIRST_PROMPT:
            ids, name = recorded.prompt_ids, recorded.group
        else:
            ids, name = recorded.turns[part.turn].observation_ids, f"{part.trajectory_id}\0{part.turn}"
        return ids if ids is not None else self._drawn(name, part.tokens)

    def _drawn(self, name: str, tokens: int) -> list[int]:
        """The first ids of the sequence of this name."""
        return random.Random(f"{self._seed}\0{name}").choices(self._ids, k=tokens)


def context_tokens(recorded: TraceTrajectory) -> int:
    """How long the context of a trajectory gets."""
    last = recorded.turns[-1]
    return last.prompt_tokens + last.generated_tokens


def check_lengths(trajectories: Sequence[TraceTrajectory], limit_tokens: int, model: str) -> None:
    """Raise `ConfigError` when a context is longer than the model's."""
    long = [recorded for recorded in trajectories if context_tokens(recorded) > limit_tokens]
    if not long:
        return
    longest = max(long, key=context_tokens)
    turn = next(n for n, t in enumerate(longest.turns) if t.prompt_tokens + t.generated_tokens > limit_tokens)
    raise ConfigError(
        f"{len(long)} of {len(trajectories)} trajectories do not fit into the {limit_tokens:,} tokens of {model}; "
        f"the longest, {longest.trajectory_id!r}, passes the limit in turn {turn} and reaches "
        f"{context_tokens(longest):,}: take a model with longer contexts (--model), or leave such trajectories out "
        "(--skip-long)"
    )


def check_vocabulary(trajectories: Sequence[TraceTrajectory], vocabulary: int, model: str) -> None:
    """Raise `ConfigError` for recorded ids of prompts and observations that the model does not have."""
    for recorded in trajectories:
        parts = [("prompt_ids", recorded.prompt_ids)]
        parts += [(f"turns[{n}].observation_ids", turn.observation_ids) for n, turn in enumerate(recorded.turns)]
        for field, ids in parts:
            wrong = next((token for token in ids or () if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise ConfigError(
                    f"trajectory {recorded.trajectory_id!r}, {field}: token id {wrong} is not one of {model}'s "
                    f"{vocabulary:,}: replay it with the model that it was recorded with (--model), or without its ids "
                    "(--drop-ids), which are then drawn"
                )
