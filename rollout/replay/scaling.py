"""A recorded batch made smaller: the same turns, with fewer tokens and shorter environment times.

Two cores cannot run in minutes what a node of GPUs runs. A scaled batch keeps its shape (how lengths, times and groups
are distributed, and in what proportion) but not its balance: a decode step costs the same whatever the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from makespan.rollout.errors import ConfigError
from makespan.rollout.replay.trace import TraceTrajectory, TraceTurn


def scaled_times(trajectories: Sequence[TraceTrajectory], scale: float) -> tuple[TraceTrajectory, ...]:
    """The same trajectories with all environment times multiplied. Raises `ConfigError` for a scale that is none."""
    check_scales(1.0, scale)
    return tuple(
        msgspec.structs.replace(
            recorded,
            reset_s=recorded.reset_s * scale,
            turns=tuple(
                msgspec.structs.replace(
                    turn, environment_s=None if turn.environment_s is None else turn.environment_s * scale
                )
                for turn in recorded.turns
            ),
        )
        for recorded in trajectories
    )


def scaled_tokens(trajectories: Sequence[TraceTrajectory], scale: float) -> tuple[TraceTrajectory, ...]:
    """The same trajectories with every stretch of tokens (first prompt, generation, observation) and the cap on tokens
    multiplied, each to at least 1 token; ids, which stand for the full lengths, are left out unless the scale is 1.

    Raises `ConfigError` for a scale that is none.
    """
    check_scales(scale, 1.0)
    return tuple(trajectories) if scale == 1.0 else tuple(_shorter(recorded, scale) for recorded in trajectories)


def _shorter(recorded: TraceTrajectory, scale: float) -> TraceTrajectory:
    def shorter(tokens: int) -> int:
        return max(1, round(tokens * scale)) if tokens else 0

    turns: list[TraceTurn] = []
    prompt = shorter(recorded.turns[0].prompt_tokens)
    for turn in recorded.turns:
        generated, observation = shorter(turn.generated_tokens), shorter(turn.observation_tokens)
        turns.append(
            msgspec.structs.replace(
                turn,
                prompt_tokens=prompt,
                generated_tokens=generated,
                observation_tokens=observation,
                observation_ids=None,
            )
        )
        prompt += generated + observation
    end = turns[-1].prompt_tokens + turns[-1].generated_tokens  # by rounding it can be a little over the cap
    cap = None if recorded.max_tokens is None else max(end, math.ceil(recorded.max_tokens * scale))
    return msgspec.structs.replace(recorded, prompt_ids=None, turns=tuple(turns), max_tokens=cap)


def check_scales(tokens: float, times: float) -> None:
    """Raise `ConfigError` for a scale that is none."""
    for option, scale, one in (("--token-scale", tokens, "lengths"), ("--time-scale", times, "times")):
        if not (scale > 0 and math.isfinite(scale)):
            raise ConfigError(f"{option} is {scale:g}; it must be above 0 (1: the recorded {one}, 0.1: a tenth)")
