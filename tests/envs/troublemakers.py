"""Environments that hog, hoard, die and print."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from makespan.rollout.environment import Action, Message, Observation, StepResult
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
