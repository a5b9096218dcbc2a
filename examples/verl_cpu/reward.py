"""The example's reward: the environment's, and a small one for varied words.

A model with random weights never solves a task, so with the environment's reward alone every advantage would be 0 and
nothing would be learnt. The second part differs between trajectories and shows the whole path of a reward through
verl. Leave it out for a real model: then the agent loop's `reward: environment` is all that is needed.
"""

from __future__ import annotations

from typing import Any

VARIETY_WEIGHT = 0.1


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """verl's reward function: `extra_info` has what the agent loop reports, the environment's reward among it."""
    environment_reward = float((extra_info or {}).get("environment_reward", 0.0))
    words = solution_str.split()
    variety = len(set(words)) / len(words) if words else 0.0
    return {
        "score": environment_reward + VARIETY_WEIGHT * variety,
        "environment_reward": environment_reward,
        "variety": variety,
    }
