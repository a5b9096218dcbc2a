"""`TrajectoryRunner`: takes one trajectory from its reset to its end.

Reset, then inference and action in turn until the environment says that it is over or a limit cuts it. What goes wrong
is raised; `engine.py` turns it into the trajectory's terminal state. A place at a replica and an environment session
are given back on every way out, cancellation included.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from makespan.rollout.admission import Admission
from makespan.rollout.admission_policy import ReturningTurn
from makespan.rollout.agent import Agent, Reply
from makespan.rollout.conversation import ContextBuilder
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.environment import (
    Action,
    EnvironmentBackend,
    EnvironmentFailure,
    Message,
    Session,
    StepResult,
)
from makespan.rollout.errors import ReplicaFailure
from makespan.rollout.priority import request_priority
from makespan.rollout.replicas.base import Completion, Replica, Request, Sampling
from makespan.rollout.routing import Router, RouteRequest, Served
from makespan.rollout.scheduling import ActionPolicy
from makespan.rollout.telemetry import entries
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.trajectory import (
    TERMINAL,
    Failure,
    Progress,
    Segment,
    Trajectory,
    TrajectoryState,
    Turn,
)


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


class TrajectoryRunner:
    """Runs trajectories of one batch, one coroutine each.

    Args:
        scheduling: the keys of actions. It is asked for new ones whenever an action is over.
    """

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
        self._replicas = replicas
        self._admission = admission
        self._router = router
        self._environments = environments
        self._agent = agent
        self._conversation = conversation
        self._coordinator = coordinator
        self._scheduling = scheduling
        self._limits = limits
        self._events = events
        self._dead: set[str] = set()  # replicas

    async def run(self, trajectory: Trajectory, deadline: asyncio.Timeout) -> None:
        """Attempt the task, and again from its reset when the environment lost the session and restarts are left.

        `deadline` is moved on by the time that the trajectory is parked.
        """
        started_s = asyncio.get_running_loop().time()
        while True:
            try:
                await self._attempt(trajectory, started_s, deadline)
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

    async def _attempt(self, trajectory: Trajectory, started_s: float, deadline: asyncio.Timeout) -> None:
        session = await self._reset(trajectory, started_s)
        try:
            while trajectory.state not in TERMINAL:
                await self._turn(trajectory, session, started_s, deadline)
        finally:
            await session.close()

    async def _reset(self, trajectory: Trajectory, started_s: float) -> Session:
        trajectory.enter(TrajectoryState.RESETTING)
        start_s = asyncio.get_running_loop().time()
        progress = self._progress(trajectory, started_s)
        key = self._scheduling.key(trajectory.trajectory_id, progress)
        with self._noting_failure("reset", trajectory, start_s, turn=0):
            session, observation, timing = await self._environments.open(
                trajectory.trajectory_id,
                trajectory.task,
                key=key,
                progress=progress,
            )
        self._coordinator.was_reset(trajectory.trajectory_id)
        try:
            trajectory.environment_s += timing.service_s
            entries.action(self._events, "reset", trajectory, timing, start_s, turn=0, key=key)
            trajectory.first_prompt = _texts(observation.messages)
            trajectory.append(Segment(self._conversation.first_prompt(observation.messages), generated=False))
        except BaseException:
            await session.close()
            raise
        return session

    async def _turn(
        self, trajectory: Trajectory, session: Session, started_s: float, deadline: asyncio.Timeout
    ) -> None:
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
        parked = await self._pass_boundary(trajectory, deadline)
        replica_id, completion = await self._generate(trajectory, turn, sampling)
        if not parked:
            self._note_cache(trajectory, completion)
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

    async def _pass_boundary(self, trajectory: Trajectory, deadline: asyncio.Timeout) -> bool:
        """Wait while the trajectory is parked, which is not its own time; gives whether it was."""
        prompt_tokens = len(trajectory.context_ids)
        if self._admission.reach(trajectory.trajectory_id, prompt_tokens):
            return False
        self._router.pause(trajectory.trajectory_id)
        loop, due_s = asyncio.get_running_loop(), deadline.when()
        start_s = loop.time()
        deadline.reschedule(None)
        await self._admission.resume(trajectory.trajectory_id)
        if due_s is not None:
            deadline.reschedule(due_s + loop.time() - start_s)
        self._events.emit(
            "parked",
            trajectory.trajectory_id,
            turn=len(trajectory.turns),
            start_s=start_s,
            prompt_tokens=prompt_tokens,
        )
        return True

    def _note_cache(self, trajectory: Trajectory, completion: Completion) -> None:
        """Tell admission what a turn found of what was cached when the last one ended, where its replica says.

        A turn that moved counts, too: it moved because it had lost its cache, or because where it was is overfull.
        """
        if not trajectory.turns or completion.cached_tokens is None or trajectory.turns[-1].replica_id in self._dead:
            return
        turn = ReturningTurn(
            prompt_tokens=trajectory.turns[-1].prompt_tokens,
            computed_tokens=min(trajectory.computed_tokens, len(trajectory.context_ids)),
            cached_tokens=completion.cached_tokens,
            preemptions=completion.preemptions or 0,
        )
        self._admission.served(turn)

    async def _generate(self, trajectory: Trajectory, turn: int, sampling: Sampling) -> tuple[str, Completion]:
        """One inference; a replica that died is removed and another one is asked."""
        attempt = 0
        while True:
            start_s = asyncio.get_running_loop().time()
            route = RouteRequest(
                trajectory_id=trajectory.trajectory_id,
                turn=turn,
                context_tokens=len(trajectory.context_ids),
                group=trajectory.group,
                now_s=start_s,
            )
            served: Served | None = None
            replica_id = self._router.route(route)
            request = Request(
                request_id=f"{trajectory.trajectory_id}/{trajectory.restarts}/{turn}/{attempt}",
                trajectory_id=trajectory.trajectory_id,
                turn=turn,
                prompt_ids=trajectory.context_ids,
                sampling=sampling,
                priority=self._priority(trajectory.trajectory_id, turn),
            )
            try:
                completion = await self._replicas[replica_id].generate(request)
                served = Served(
                    context_tokens=len(trajectory.context_ids) + len(completion.token_ids),
                    cached_tokens=completion.cached_tokens,
                    seconds=asyncio.get_running_loop().time() - start_s,
                    prefill_s=completion.prefill_s,
                    decode_s=completion.decode_s,
                )
            except ReplicaFailure as failure:
                if not failure.retryable:
                    raise
                self._router.remove([replica_id])
                self._dead.add(replica_id)
                self._admission.resize(len(self._router.in_flight()))
                self._events.emit(
                    "replica_lost", trajectory.trajectory_id, replica=replica_id, turn=turn, message=str(failure)
                )
                attempt += 1
                continue
            finally:
                self._router.release(replica_id, trajectory.trajectory_id, served)
            entries.inference(self._events, trajectory, turn, replica_id, completion, start_s)
            self._coordinator.inferred(
                trajectory.trajectory_id,
                asyncio.get_running_loop().time() - start_s,
                len(trajectory.context_ids) + len(completion.token_ids),
            )
            return replica_id, completion

    async def _act(
        self, trajectory: Trajectory, session: Session, reply: Reply, started_s: float, turn: int
    ) -> StepResult:
        progress = self._progress(trajectory, started_s)
        start_s = asyncio.get_running_loop().time()
        key = self._scheduling.key(trajectory.trajectory_id, progress)
        why = self._scheduling.why(trajectory.trajectory_id) if self._events.writes else None
        with self._noting_failure("act", trajectory, start_s, turn):
            result, timing = await session.step(Action(reply.text), key=key, progress=progress)
        trajectory.environment_s += timing.service_s
        entries.action(self._events, "act", trajectory, timing, start_s, turn=turn, key=key, why=why)
        self._coordinator.acted(trajectory.trajectory_id, timing.service_s)
        self._rekey()
        return result

    def _priority(self, trajectory_id: str, turn: int) -> int:
        why = self._scheduling.why(trajectory_id) if turn else None
        return request_priority(turn, why is not None and why.slack_s < 0)

    def _rekey(self) -> None:
        """Give the waiting actions the keys of a new pass, if one was due."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        keys = self._scheduling.rekeys(began_s)
        if keys:
            self._environments.rekey(keys)
            self._scheduling.pass_took(loop.time() - began_s)
            if self._events.writes:
                entries.rekeyed(self._events, keys, self._scheduling.why)

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
