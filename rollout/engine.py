"""`RolloutEngine`: runs a batch of trajectories to its end.

One coroutine a trajectory: admission, reset, then inference and action in turn until the environment says that it is
over. The engine knows nothing of vLLM, verl or sockets; it is given replicas, a router, an admission gate, an
environment backend and an agent, and writes what happens to an event log.

Invariants kept here: every trajectory ends in exactly one state and gives a result, whatever fails; a trajectory's
ticket, its place at a replica and its environment session are given back on every way out, cancellation included.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from makespan.rollout.admission import Admission
from makespan.rollout.agent import Agent
from makespan.rollout.conversation import ContextBuilder
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.environment import EnvironmentBackend, EnvironmentFailure
from makespan.rollout.errors import MakespanError, ReplicaFailure
from makespan.rollout.replicas.base import Replica
from makespan.rollout.routing import Router
from makespan.rollout.runner import Limits, TrajectoryRunner
from makespan.rollout.scheduling import ActionPolicy
from makespan.rollout.telemetry import entries
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.trajectory import (
    TERMINAL,
    Failure,
    Task,
    Trajectory,
    TrajectoryResult,
    TrajectoryState,
)

logger = logging.getLogger("makespan.engine")


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot for a progress display."""

    total: int
    done: int
    failed: int
    running: int
    waiting: int
    acting: int
    generated_tokens: int
    turns: int


class RolloutEngine:
    """Runs batches. One engine serves one batch at a time; its parts may be reused by the next one."""

    def __init__(
        self,
        *,
        replicas: Mapping[str, Replica],
        router: Router,
        admission: Admission,
        environments: EnvironmentBackend,
        agent: Agent,
        conversation: ContextBuilder,
        coordinator: Coordinator,
        scheduling: ActionPolicy,
        limits: Limits,
        events: EventLog,
    ) -> None:
        self._replica_ids = sorted(replicas)
        self._router = router
        self._admission = admission
        self._agent = agent
        self._conversation = conversation
        self._coordinator = coordinator
        self._limits = limits
        self._events = events
        self._runner = TrajectoryRunner(
            replicas=replicas,
            router=router,
            admission=admission,
            environments=environments,
            agent=agent,
            conversation=conversation,
            coordinator=coordinator,
            scheduling=scheduling,
            limits=limits,
            events=events,
        )
        self._trajectories: list[Trajectory] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def run(
        self,
        tasks: Sequence[Task],
        *,
        samples_per_task: int = 1,
        on_end: Callable[[TrajectoryResult], None] | None = None,
    ) -> list[TrajectoryResult]:
        """Attempt each task `samples_per_task` times; the samples of a task are a group.

        A task that stands in `tasks` more than once has so many times more samples.

        Returns one result for each trajectory, in the order of tasks and samples. `on_end` is called with each as it
        ends.
        """
        self._trajectories = self._make_trajectories(tasks, samples_per_task)
        self._stopping = False
        self._events.emit(
            "batch_start",
            trajectories=len(self._trajectories),
            replicas=self._replica_ids,
            concurrency=self._admission.statistics().concurrency,
            source=self._agent.source,
            max_turns=self._limits.max_turns,
            max_context_tokens=self._limits.max_context_tokens,
        )
        self._coordinator.begin(max_turns=self._limits.max_turns, max_tokens=self._limits.max_context_tokens)
        for trajectory in self._trajectories:
            self._coordinator.join(trajectory.trajectory_id, trajectory.group, trajectory.task.environment)
            self._events.emit(
                "submitted", trajectory.trajectory_id, task_id=trajectory.task.task_id, group=trajectory.group
            )
        async with asyncio.TaskGroup() as group:
            self._tasks = [group.create_task(self._run(t, on_end), name=t.trajectory_id) for t in self._trajectories]
            self._admission.enqueue(t.trajectory_id for t in self._trajectories)
        for trajectory in self._trajectories:
            if trajectory.state not in TERMINAL:  # stopped before its coroutine took its first step
                self._admission.withdraw(trajectory.trajectory_id)
                _end_early(trajectory, TrajectoryState.CANCELLED, "cancelled", "the batch was stopped")
                self._finish(trajectory, on_end)
        self._events.emit("batch_end", stopped=self._stopping)
        self._coordinator.finish()
        self._events.flush()
        return [trajectory.result() for trajectory in self._trajectories]

    def _make_trajectories(self, tasks: Sequence[Task], samples_per_task: int) -> list[Trajectory]:
        samples: dict[str, int] = {}
        trajectories = []
        for task in tasks:
            first = samples.get(task.task_id, 0)
            samples[task.task_id] = first + samples_per_task
            trajectories += [
                Trajectory(f"{task.task_id}#{number}", task, task.task_id, self._conversation.new_context())
                for number in range(first, first + samples_per_task)
            ]
        return trajectories

    def stop(self) -> None:
        """End the batch now: what has not ended is cancelled, and `run` returns what there is."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    def status(self) -> EngineStatus:
        """Where the batch stands."""
        states = [trajectory.state for trajectory in self._trajectories]
        failed = sum(state in (TrajectoryState.FAILED, TrajectoryState.CANCELLED) for state in states)
        ended = failed + sum(state in (TrajectoryState.FINISHED, TrajectoryState.TRUNCATED) for state in states)
        waiting = self._admission.statistics().waiting
        return EngineStatus(
            total=len(states),
            done=ended - failed,
            failed=failed,
            running=len(states) - ended - waiting,
            waiting=waiting,
            acting=sum(state in (TrajectoryState.ACTING, TrajectoryState.RESETTING) for state in states),
            generated_tokens=sum(trajectory.generated_tokens for trajectory in self._trajectories),
            turns=sum(len(trajectory.turns) for trajectory in self._trajectories),
        )

    # One trajectory

    async def _run(self, trajectory: Trajectory, on_end: Callable[[TrajectoryResult], None] | None) -> None:
        deadline = asyncio.timeout(None)
        try:
            async with self._admission.admit(trajectory.trajectory_id):
                self._events.emit("admitted", trajectory.trajectory_id)
                self._coordinator.started(trajectory.trajectory_id)
                async with deadline:
                    if self._limits.trajectory_timeout_s is not None:
                        now = asyncio.get_running_loop().time()
                        deadline.reschedule(now + self._limits.trajectory_timeout_s)
                    await self._runner.run(trajectory, deadline)
        except EnvironmentFailure as failure:
            _end_early(trajectory, TrajectoryState.FAILED, failure.kind, str(failure))
        except MakespanError as failure:
            kind = "replica" if isinstance(failure, ReplicaFailure) else "configuration"
            _end_early(trajectory, TrajectoryState.FAILED, kind, str(failure))
        except Exception as error:  # a bug, or what nobody foresaw: it costs this trajectory, aloud, not the batch
            if isinstance(error, TimeoutError) and deadline.expired():
                message = f"the trajectory took longer than {self._limits.trajectory_timeout_s} s after its admission"
                _end_early(trajectory, TrajectoryState.FAILED, "deadline", message)
            else:
                logger.exception("trajectory %s failed by an unexpected error", trajectory.trajectory_id)
                _end_early(trajectory, TrajectoryState.FAILED, "internal", f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            _end_early(trajectory, TrajectoryState.CANCELLED, "cancelled", "the batch was stopped")
            if not self._stopping:
                self._note_end(trajectory)
                raise
        finally:
            self._router.finish(trajectory.trajectory_id)
        self._finish(trajectory, on_end)

    def _finish(self, trajectory: Trajectory, on_end: Callable[[TrajectoryResult], None] | None) -> None:
        self._note_end(trajectory)
        if on_end is not None:
            on_end(trajectory.result())

    def _note_end(self, trajectory: Trajectory) -> None:
        entries.end(self._events, trajectory)
        scored = trajectory.state in (TrajectoryState.FINISHED, TrajectoryState.TRUNCATED)
        self._coordinator.end(trajectory.trajectory_id, counts=scored)


def _end_early(trajectory: Trajectory, state: TrajectoryState, kind: str, message: str) -> None:
    """End a trajectory for a reason, unless it had ended before (closing its session may be what failed)."""
    if trajectory.state not in TERMINAL:
        trajectory.end(state, Failure(kind, message))
