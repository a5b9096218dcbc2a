"""`RolloutEngine`: runs a batch of trajectories to its end.

One coroutine a trajectory: admission, reset, then inference and action in turn until the environment says that it is
over. The engine knows nothing of vLLM, verl or sockets; it is given replicas, a router, an admission gate, an
environment backend and an agent, and writes what happens to an event log.

Invariants kept here: every trajectory ends in exactly one state and gives a result, whatever fails; a trajectory's
ticket, its place at a replica and its environment session are given back on every way out, cancellation included.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from makespan.rollout.admission import Admission
from makespan.rollout.agent import Agent, Reply
from makespan.rollout.conversation import ContextBuilder
from makespan.rollout.environment import (
    Action,
    EnvironmentBackend,
    EnvironmentFailure,
    Message,
    Session,
    StepResult,
)
from makespan.rollout.errors import MakespanError, ReplicaFailure
from makespan.rollout.replicas.base import Completion, Replica, Request, Sampling
from makespan.rollout.routing import Router, RouteRequest
from makespan.rollout.scheduling import ActionKey
from makespan.rollout.telemetry import entries
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.trajectory import (
    TERMINAL,
    Failure,
    Progress,
    Segment,
    Task,
    Trajectory,
    TrajectoryResult,
    TrajectoryState,
    Turn,
)

logger = logging.getLogger("makespan.engine")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What ends a trajectory that does not end by itself."""

    max_turns: int
    """Inferences of one trajectory."""
    max_context_tokens: int
    """Prompt and generated tokens together; at most the model's own limit."""
    trajectory_timeout_s: float | None
    """From admission to the end; None: no limit."""
    restarts: int = 0
    """How often a trajectory whose environment session was lost begins again from its reset; 0: it fails."""


LOST_SESSION = frozenset({"unknown_outcome", "unknown_session"})
"""Failures after which the session is gone and its last action may have happened: it cannot go on, only begin again."""


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
        action_key: ActionKey,
        limits: Limits,
        events: EventLog,
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._admission = admission
        self._environments = environments
        self._agent = agent
        self._conversation = conversation
        self._action_key = action_key
        self._limits = limits
        self._events = events
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
            replicas=sorted(self._replicas),
            concurrency=self._admission.statistics().concurrency,
            source=self._agent.source,
            max_turns=self._limits.max_turns,
            max_context_tokens=self._limits.max_context_tokens,
        )
        for trajectory in self._trajectories:
            self._events.emit(
                "submitted", trajectory.trajectory_id, task_id=trajectory.task.task_id, group=trajectory.group
            )
        async with asyncio.TaskGroup() as group:
            self._tasks = [group.create_task(self._run(t, on_end), name=t.trajectory_id) for t in self._trajectories]
        for trajectory in self._trajectories:
            if trajectory.state not in TERMINAL:  # stopped before its coroutine took its first step
                _end_early(trajectory, TrajectoryState.CANCELLED, "cancelled", "the batch was stopped")
                self._finish(trajectory, on_end)
        self._events.emit("batch_end", stopped=self._stopping)
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
                async with deadline:
                    if self._limits.trajectory_timeout_s is not None:
                        now = asyncio.get_running_loop().time()
                        deadline.reschedule(now + self._limits.trajectory_timeout_s)
                    await self._live(trajectory)
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
                entries.end(self._events, trajectory)
                raise
        finally:
            self._router.finish(trajectory.trajectory_id)
        self._finish(trajectory, on_end)

    def _finish(self, trajectory: Trajectory, on_end: Callable[[TrajectoryResult], None] | None) -> None:
        entries.end(self._events, trajectory)
        if on_end is not None:
            on_end(trajectory.result())

    async def _live(self, trajectory: Trajectory) -> None:
        """Attempt the task, and again from its reset when the environment lost the session and restarts are left."""
        started_s = asyncio.get_running_loop().time()
        while True:
            try:
                await self._attempt(trajectory, started_s)
            except EnvironmentFailure as failure:
                lost = failure.kind in LOST_SESSION and trajectory.state not in TERMINAL
                if not lost or trajectory.restarts >= self._limits.restarts:
                    raise
                self._events.emit(
                    "restarted",
                    trajectory.trajectory_id,
                    turn=len(trajectory.turns),
                    kind=failure.kind,
                    message=str(failure),
                )
                trajectory.restart(self._conversation.new_context())
            else:
                return

    async def _attempt(self, trajectory: Trajectory, started_s: float) -> None:
        session = await self._reset(trajectory, started_s)
        try:
            while trajectory.state not in TERMINAL:
                await self._turn(trajectory, session, started_s)
        finally:
            await session.close()

    async def _reset(self, trajectory: Trajectory, started_s: float) -> Session:
        trajectory.enter(TrajectoryState.RESETTING)
        start_s = asyncio.get_running_loop().time()
        progress = self._progress(trajectory, started_s)
        with self._noting_failure("reset", trajectory, start_s, turn=0):
            session, observation, timing = await self._environments.open(
                trajectory.trajectory_id,
                trajectory.task,
                key=self._action_key(trajectory.trajectory_id, progress),
                progress=progress,
            )
        try:
            trajectory.environment_s += timing.service_s
            entries.action(self._events, "reset", trajectory, timing, start_s, turn=0)
            trajectory.first_prompt = _texts(observation.messages)
            trajectory.append(Segment(self._conversation.first_prompt(observation.messages), generated=False))
        except BaseException:
            await session.close()
            raise
        return session

    async def _turn(self, trajectory: Trajectory, session: Session, started_s: float) -> None:
        trajectory.enter(TrajectoryState.GENERATING)
        turn = len(trajectory.turns)
        room_tokens = self._limits.max_context_tokens - len(trajectory.context_ids)
        if turn >= self._limits.max_turns:
            trajectory.end(TrajectoryState.TRUNCATED, Failure("turns", f"cut after {turn} turns (limits.max_turns)"))
            return
        sampling = self._agent.sampling(trajectory, room_tokens)
        if sampling is None:
            message = f"cut: the next turn does not fit into {self._limits.max_context_tokens} tokens of context"
            trajectory.end(TrajectoryState.TRUNCATED, Failure("context", message))
            return
        prompt_tokens = len(trajectory.context_ids)
        replica_id, completion = await self._generate(trajectory, turn, sampling)
        reply = self._agent.reply(trajectory, completion)
        _count_computed(trajectory, completion, reply)
        trajectory.append(Segment(reply.token_ids, generated=True, logprobs=reply.logprobs))

        trajectory.enter(TrajectoryState.ACTING)
        result = await self._act(trajectory, session, reply, started_s, turn)
        trajectory.reward += result.reward
        trajectory.info = result.info
        trajectory.turns.append(
            Turn(
                index=turn,
                replica_id=replica_id,
                prompt_tokens=prompt_tokens,
                generated_tokens=len(reply.token_ids),
                cached_tokens=completion.cached_tokens,
                action=reply.text,
                observation=_texts(result.observation.messages),
                reward=result.reward,
            )
        )
        if result.terminated:
            trajectory.end(TrajectoryState.FINISHED)
        elif result.truncated:
            trajectory.end(TrajectoryState.TRUNCATED, Failure("environment", "cut by the environment's own limit"))
        else:
            ids = self._conversation.extension(reply.token_ids, result.observation.messages)
            trajectory.append(Segment(ids, generated=False))

    async def _generate(self, trajectory: Trajectory, turn: int, sampling: Sampling) -> tuple[str, Completion]:
        """One inference; a replica that died is removed and another one is asked."""
        route = RouteRequest(
            trajectory_id=trajectory.trajectory_id,
            turn=turn,
            context_tokens=len(trajectory.context_ids),
            group=trajectory.group,
        )
        attempt = 0
        while True:
            replica_id = self._router.route(route)
            request = Request(
                request_id=f"{trajectory.trajectory_id}/{trajectory.restarts}/{turn}/{attempt}",
                trajectory_id=trajectory.trajectory_id,
                turn=turn,
                prompt_ids=trajectory.context_ids,
                sampling=sampling,
            )
            start_s = asyncio.get_running_loop().time()
            try:
                completion = await self._replicas[replica_id].generate(request)
            except ReplicaFailure as failure:
                if not failure.retryable:
                    raise
                self._router.remove([replica_id])
                self._events.emit(
                    "replica_lost", trajectory.trajectory_id, replica=replica_id, turn=turn, message=str(failure)
                )
                attempt += 1
                continue
            finally:
                self._router.release(replica_id)
            entries.inference(self._events, trajectory, turn, replica_id, completion, start_s)
            return replica_id, completion

    async def _act(
        self, trajectory: Trajectory, session: Session, reply: Reply, started_s: float, turn: int
    ) -> StepResult:
        progress = self._progress(trajectory, started_s)
        start_s = asyncio.get_running_loop().time()
        with self._noting_failure("act", trajectory, start_s, turn):
            result, timing = await session.step(
                Action(reply.text), key=self._action_key(trajectory.trajectory_id, progress), progress=progress
            )
        trajectory.environment_s += timing.service_s
        entries.action(self._events, "act", trajectory, timing, start_s, turn=turn)
        return result

    @contextlib.contextmanager
    def _noting_failure(self, kind: str, trajectory: Trajectory, start_s: float, turn: int) -> Iterator[None]:
        """An action that fails held a slot, too: the log must not read as if nothing had run."""
        try:
            yield
        except EnvironmentFailure as failure:
            entries.failed_action(self._events, kind, trajectory, failure.kind, start_s, turn)
            raise
        except asyncio.CancelledError:
            entries.failed_action(self._events, kind, trajectory, "cancelled", start_s, turn)
            raise

    def _progress(self, trajectory: Trajectory, started_s: float) -> Progress:
        return Progress(
            turns=len(trajectory.turns),
            prompt_tokens=len(trajectory.context_ids) - trajectory.generated_tokens,
            generated_tokens=trajectory.generated_tokens,
            elapsed_s=asyncio.get_running_loop().time() - started_s,
            environment_s=trajectory.environment_s,
            max_turns=self._limits.max_turns,
            max_tokens=self._limits.max_context_tokens,
            group=trajectory.group,
        )


def _end_early(trajectory: Trajectory, state: TrajectoryState, kind: str, message: str) -> None:
    """End a trajectory for a reason, unless it had ended before (closing its session may be what failed)."""
    if trajectory.state not in TERMINAL:
        trajectory.end(state, Failure(kind, message))


def _texts(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, message.content) for message in messages)


def _count_computed(trajectory: Trajectory, completion: Completion, reply: Reply) -> None:
    """Note how much of the context a replica has now computed: the prompt, and what it generated as far as the context
    goes on with the same tokens; the last token's own state is not computed until the next turn."""
    if reply.token_ids is completion.token_ids:
        trajectory.computed_tokens = len(trajectory.context_ids) + max(0, len(completion.token_ids) - 1)
        return
    same = 0
    for generated, kept in zip(completion.token_ids[:-1], reply.token_ids, strict=False):
        if generated != kept:
            break
        same += 1
    trajectory.computed_tokens = len(trajectory.context_ids) + same
