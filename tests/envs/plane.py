"""What the tests of the environment plane share: short calls, and a look at the processes."""

from __future__ import annotations

import time
from pathlib import Path

from makespan.envs.client import EnvClient, EnvSession
from makespan.rollout.environment import Action, ActionTiming, Observation, StepResult
from makespan.rollout.trajectory import Progress, Task


async def open_session(client: EnvClient, task: Task, key: float = 0.0) -> tuple[EnvSession, Observation, ActionTiming]:
    return await client.open(task.task_id, task, key=key, progress=Progress())


async def step(session: EnvSession, text: str = "go", key: float = 0.0) -> tuple[StepResult, ActionTiming]:
    return await session.step(Action(text), key=key, progress=Progress())


def descendants(pid: int) -> set[int]:
    """The processes below `pid`, from /proc."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found - {pid}
        found |= more


def gone(pids: set[int], within_s: float = 10.0) -> bool:
    """Whether all of the processes end in time."""
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in _status(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
