"""`counting`: the smallest bundled environment. It counts what it is told and can be told to misbehave.

Good for a first look at a server, and for tests of everything that can go wrong. The task's payload says what to do:

    length (int, 3)         the action that ends the task; its reward is 1
    step_s, reset_s (0.0)   seconds that a step or the reset sleeps
    raise_in (int)          the action (from 1; 0 is the reset) that raises RuntimeError
    refuse (str)            refuse the task with this reason
    ledger (str)            a file to which `task_id action-number` is appended whenever an action runs
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from makespan.rollout.environment import Action, Message, Observation, StepResult, TaskRefused
from makespan.rollout.trajectory import Task


class _Script:
    """What both forms share: the payload, and what each action does."""

    def __init__(self) -> None:
        self.task = Task(task_id="", environment="counting")
        self.actions = 0

    def begin(self, task: Task) -> float:
        self.task, self.actions = task, 0
        if "refuse" in task.payload:
            raise TaskRefused(str(task.payload["refuse"]))
        self._run()
        return float(task.payload.get("reset_s", 0.0))

    def advance(self) -> float:
        self.actions += 1
        self._run()
        return float(self.task.payload.get("step_s", 0.0))

    def observation(self, text: str) -> Observation:
        return Observation((Message("user", text),))

    def result(self, action: Action) -> StepResult:
        over = self.actions >= int(self.task.payload.get("length", 3))
        text = f"{self.actions}: {action.text}"
        return StepResult(self.observation(text), reward=1.0 if over else 0.0, terminated=over)

    def _run(self) -> None:
        ledger = self.task.payload.get("ledger")
        if ledger is not None:
            with Path(ledger).open("a") as file:
                file.write(f"{self.task.task_id} {self.actions}\n")
        if self.task.payload.get("raise_in") == self.actions:
            raise RuntimeError(f"told to raise in action {self.actions}")


class CountingEnvironment:
    """The asynchronous form."""

    def __init__(self) -> None:
        self._script = _Script()

    async def reset(self, task: Task) -> Observation:
        await asyncio.sleep(self._script.begin(task))
        return self._script.observation(f"count, please: {task.task_id}")

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(self._script.advance())
        return self._script.result(action)

    async def close(self) -> None:
        return None


class SyncCountingEnvironment:
    """The blocking form; runs in a thread."""

    def __init__(self) -> None:
        self._script = _Script()

    def reset(self, task: Task) -> Observation:
        time.sleep(self._script.begin(task))
        return self._script.observation(f"count, please: {task.task_id}")

    def step(self, action: Action) -> StepResult:
        time.sleep(self._script.advance())
        return self._script.result(action)

    def close(self) -> None:
        return None
