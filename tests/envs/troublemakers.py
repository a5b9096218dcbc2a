"""Environments that hog, hoard, die, print and raise what nobody expects."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from makespan.rollout.environment import Action, Message, Observation, StepResult, TaskRefused
from makespan.rollout.trajectory import Task


class Troublemaker:
    """Does what the action says; blocking, and holding the interpreter while it computes."""

    def __init__(self) -> None:
        print("an environment may print")
        self.hoard: list[Any] = []

    def reset(self, task: Task) -> Observation:
        return Observation((Message("user", f"pid {os.getpid()}"),))

    def step(self, action: Action) -> StepResult:
        what, _, amount = action.text.partition(" ")
        if what == "compute":
            deadline = time.monotonic() + float(amount)
            while time.monotonic() < deadline:
                sum(range(1_000))
        elif what == "hoard":
            self.hoard.append(bytearray(int(amount)))
        elif what == "die":
            os._exit(int(amount))
        elif what == "exit":
            sys.exit(int(amount))
        elif what == "print":
            print("x" * int(amount))
        return StepResult(Observation((Message("user", f"did {action.text}"),)))

    def close(self) -> None:
        self.hoard.clear()


class Panic(BaseException):
    """As foreign code raises it: no `Exception`."""


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError


RAISED: dict[str, BaseException] = {
    "surrogate": ValueError("half a pair: \ud800"),
    "mute": Mute(),
    "interrupt": KeyboardInterrupt("now"),
    "panic": Panic("poisoned"),
    "cancelled": asyncio.CancelledError("by itself"),
    "exhausted": StopIteration("over"),
}


class Raiser:
    """Raises, refuses and gives what its actions and its task say; blocking."""

    def reset(self, task: Task) -> Observation:
        if "refuse" in task.payload:
            raise TaskRefused("no task \ud800")
        self.closing = task.payload.get("close", "")
        return Observation((Message("user", "ready"),))

    def step(self, action: Action) -> StepResult:
        if action.text in RAISED:
            raise RAISED[action.text]
        if action.text == "content":
            return StepResult(Observation((Message("user", "\ud800"),)))
        if action.text == "info":
            return StepResult(Observation(()), info={"\ud800": 1})
        return StepResult(Observation(()), reward=float(action.text))

    def close(self) -> None:
        if self.closing:
            raise RAISED[self.closing]


class AsyncRaiser:
    """The same in the event loop."""

    def __init__(self) -> None:
        self._raiser = Raiser()

    async def reset(self, task: Task) -> Observation:
        return self._raiser.reset(task)

    async def step(self, action: Action) -> StepResult:
        return self._raiser.step(action)

    async def close(self) -> None:
        self._raiser.close()
