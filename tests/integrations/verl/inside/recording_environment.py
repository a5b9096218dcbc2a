"""BFCL that keeps a record of its own: what each session was asked, told and answered, one JSON object a session."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from makespan.envs.bfcl.environment import BfclEnvironment
from makespan.rollout.environment import Action, Observation, StepResult
from makespan.rollout.trajectory import Task


class RecordingBfcl(BfclEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self._record: dict[str, Any] = {}

    def reset(self, task: Task) -> Observation:
        observation = super().reset(task)
        self._record = {"task_id": task.task_id, "first": _messages(observation), "turns": []}
        return observation

    def step(self, action: Action) -> StepResult:
        result = super().step(action)
        self._record["turns"].append(
            {"action": action.text, "observation": _messages(result.observation), "terminated": result.terminated}
        )
        return result

    def close(self) -> None:
        if self._record:
            directory = Path(os.environ["ENVIRONMENT_RECORD"])
            (directory / f"{uuid.uuid4().hex}.json").write_text(json.dumps(self._record))
            self._record = {}
        super().close()


def _messages(observation: Observation) -> list[list[str]]:
    return [[message.role, message.content] for message in observation.messages]
