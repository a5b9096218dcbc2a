"""The ground truth of a task as the actions of an agent that knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from makespan.envs.bfcl.data import scenario
from makespan.envs.bfcl.environment import STEPS_PER_TURN
from makespan.rollout.trajectory import Task

END_OF_TURN = "Done."
"""A text without a call."""


def script(task: Task) -> tuple[str, ...]:
    """Action texts that solve a task: each ground-truth call in an action of its own, and an end after each user turn.

    A user turn with more calls than the environment allows steps (two of `multi_turn_long_context` have 34) takes as
    few calls an action as fit. Raises `TaskRefused` as the environment would.
    """
    return tuple(action for calls in scenario(task).ground_truth for action in _turn(calls))


def _turn(calls: Sequence[str]) -> Iterator[str]:
    calls_an_action = max(1, ceil(len(calls) / STEPS_PER_TURN))
    for first in range(0, len(calls), calls_an_action):
        yield f"[{', '.join(calls[first : first + calls_an_action])}]"
    yield END_OF_TURN
