"""Small recordings by hand, for the tests of replays."""

from __future__ import annotations

from typing import Any

from makespan.rollout.replay.trace import TraceTrajectory, TraceTurn

Step = tuple[int, int, float | None]
"""Generated tokens, tokens of the observation, seconds of the action."""


def recording(name: str, group: str, prompt_tokens: int, *steps: Step, **more: Any) -> TraceTrajectory:
    """A trajectory whose context grows by its steps; nothing is observed after the last one."""
    turns = []
    context = prompt_tokens
    for number, (generated, observed, seconds) in enumerate(steps):
        observed = observed if number + 1 < len(steps) else 0
        turns.append(
            TraceTurn(
                prompt_tokens=context,
                generated_tokens=generated,
                observation_tokens=observed,
                environment_s=seconds,
            )
        )
        context += generated + observed
    return TraceTrajectory(trajectory_id=name, task_id=group, group=group, turns=tuple(turns), **more)
