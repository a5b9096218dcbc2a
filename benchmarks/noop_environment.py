"""An environment that does nothing, for measuring what is around it."""

from __future__ import annotations

from makespan.rollout.environment import Action, Message, Observation, StepResult
from makespan.rollout.trajectory import Task

_OBSERVATION = Observation((Message("user", "ok"),))


class Noop:
    """Answers at once."""

    async def reset(self, task: Task) -> Observation:
        return _OBSERVATION

    async def step(self, action: Action) -> StepResult:
        return StepResult(_OBSERVATION)

    async def close(self) -> None:
        return None
