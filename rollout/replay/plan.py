"""From a trace to what the engine runs: tasks, limits, and which recorded trajectory each new one plays.

The engine names a trajectory `task#sample`. A recorded group is a task, and its trajectories are its samples, in the
order of the trace; so a replay's `math_7#2` plays the third recorded trajectory of the group `math_7`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from makespan.rollout.replay.trace import TraceTrajectory
from makespan.rollout.runner import Limits
from makespan.rollout.trajectory import Task

ENVIRONMENT = "replay"
"""The environment's name in a replay; its slot classes are `replay.start` and `replay.step`."""

UNLIMITED = 1 << 40
"""Stands for a cap that the trace does not have."""

Plays = Mapping[str, TraceTrajectory]
"""The recorded trajectory that each trajectory of the engine plays, by its id."""


def plan(trajectories: Sequence[TraceTrajectory]) -> tuple[list[Task], dict[str, TraceTrajectory]]:
    """The tasks to give to the engine, in the trace's order, and what their samples play."""
    samples: dict[str, int] = {}
    tasks: list[Task] = []
    plays: dict[str, TraceTrajectory] = {}
    by_group: dict[str, Task] = {}
    for recorded in trajectories:
        number = samples.get(recorded.group, 0)
        samples[recorded.group] = number + 1
        task = by_group.setdefault(recorded.group, Task(task_id=recorded.group, environment=ENVIRONMENT))
        tasks.append(task)
        plays[f"{recorded.group}#{number}"] = recorded
    return tasks, plays


def limits(trajectories: Sequence[TraceTrajectory]) -> Limits:
    """The caps under which the trajectories were made; where some had none, there is none."""

    def largest(caps: list[int | None]) -> int:
        known = [cap for cap in caps if cap is not None]
        return max(known) if known and len(known) == len(caps) else UNLIMITED

    return Limits(
        max_turns=largest([t.max_turns for t in trajectories]),
        max_context_tokens=largest([t.max_tokens for t in trajectories]),
        trajectory_timeout_s=None,
    )
