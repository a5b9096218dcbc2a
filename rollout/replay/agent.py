"""The agent of a replay, and the conversation of one in lengths: a turn generates as many tokens as the recorded one.

In a replay in lengths messages carry no text but the number of tokens that they stand for, so that the engine, which
only passes them on, needs not know that it replays. (`content.py` has the conversation of a replay in tokens.)
"""

from __future__ import annotations

from collections.abc import Sequence

from makespan.rollout.agent import ActionSource, Reply, turn_seed
from makespan.rollout.environment import EnvironmentFailure, Message
from makespan.rollout.replay.plan import Plays
from makespan.rollout.replicas.base import Completion, Sampling
from makespan.rollout.simulation.tokens import CountedTokens
from makespan.rollout.trajectory import Trajectory


def length_message(role: str, tokens: int) -> Message:
    """A message that stands for `tokens` tokens."""
    return Message(role, str(tokens))


class LengthConversation:
    """Turns length messages into counted tokens.

    Args:
        max_context_tokens: how much of its history a context keeps; None: all of it.
    """

    def __init__(self, max_context_tokens: int | None = None) -> None:
        self._limit = max_context_tokens

    def new_context(self) -> CountedTokens:
        """A context without tokens."""
        return CountedTokens(limit=self._limit)

    def first_prompt(self, messages: Sequence[Message]) -> CountedTokens:
        """The tokens that the messages stand for."""
        return CountedTokens(sum(int(message.content) for message in messages))

    def extension(self, generated: Sequence[int], messages: Sequence[Message]) -> CountedTokens:
        """The tokens that the messages stand for; marks between turns are counted in them."""
        return self.first_prompt(messages)


class TraceAgent:
    """Generates what was recorded, token for token in number.

    Args:
        plays: what each trajectory plays.
        seed: sample with it, each turn with a seed of its own, so that siblings go different ways; None: greedily.
    """

    source: ActionSource = "trace"

    def __init__(self, plays: Plays, *, seed: int | None = None) -> None:
        self._plays = plays
        self._seed = seed

    def sampling(self, trajectory: Trajectory, room_tokens: int) -> Sampling:
        """The recorded length, whatever the room: a recorded turn did fit."""
        turns, turn = self._plays[trajectory.trajectory_id].turns, len(trajectory.turns)
        if turn >= len(turns):
            raise EnvironmentFailure("protocol", f"the recording has {len(turns)} turns, and one more was asked for")
        tokens = turns[turn].generated_tokens
        if self._seed is None:
            return Sampling(max_tokens=tokens, min_tokens=tokens, temperature=0.0)
        return Sampling(max_tokens=tokens, min_tokens=tokens, seed=turn_seed(self._seed, trajectory))

    def reply(self, trajectory: Trajectory, completion: Completion) -> Reply:
        return Reply("", completion.token_ids, completion.logprobs)
