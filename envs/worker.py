"""A worker: hosts environment sessions and runs their actions.

The worker is a DEALER of the broker. It owns the memory that makes actions run at most once: beside each session it
keeps the number of its last action and, once known, the outcome, until the session's next action or its end. It limits
nothing: whatever it is told to start, it starts at once (the slots are the broker's).

Every action is a task of the worker's task group. An environment that raises takes its own session down and nothing
else; a session that is stopped has its task cancelled, its environment closed, and is then confirmed as stopped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from socket import gethostname as host_name

import msgspec
import zmq

from makespan.envs import worker_protocol as wp
from makespan.envs.config import EnvironmentConfig, WorkerConfig
from makespan.envs.execution import Execution, execute
from makespan.envs.isolation import EnvironmentRaised
from makespan.envs.latency import WithLatency
from makespan.envs.protocol import NOTHING, encode, pack, said_by, sendable
from makespan.envs.registry import Factory, resolve
from makespan.envs.sockets import DealerSocket, connect_dealer
from makespan.rollout.environment import Action, Environment, FailureKind, StepResult, TaskRefused
from makespan.rollout.errors import FormatError
from makespan.rollout.trajectory import Task

__all__ = ["EnvironmentConfig", "Worker", "WorkerConfig"]

log = logging.getLogger(__name__)

THREADS = 1_024
"""Upper bound of a worker's pool; threads are made when needed: the slots bound what runs, abandoned calls add."""

DRAIN_POLL_S = 0.1

MESSAGE_CHARACTERS = 10_000
"""How much of an error's text travels."""

ENDED_REMEMBERED = 65_536
"""Names of stopped sessions that are kept, to recognise a late copy of their start."""


@dataclass(slots=True, eq=False)
class _Hosted:
    """A session here."""

    start: wp.Start
    execution: Execution | None = None
    environment: Environment | None = None
    """The execution, or what adds latency to it."""
    seq: int = 0
    task: asyncio.Task[None] | None = None
    """Runs action `seq`, or closes the environment after it."""
    running: bool = True
    outcome: bytes = b""
    """The frame that told the broker of action `seq`; empty until it is over."""
    closed: bool = False


class Worker:
    """Hosts sessions for one broker. `await run(context, stop, on_joined)` serves until `stop` is set."""

    def __init__(self, config: WorkerConfig) -> None:
        self.worker_id = config.worker_id or f"worker-{host_name()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._config = config
        self._factories: dict[str, Factory] = {
            name: resolve(environment.factory or name) for name, environment in config.environments.items()
        }
        self._hosted: dict[str, _Hosted] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._abandoned: list[Execution] = []
        self._draining = asyncio.Event()
        self._decode_task: msgspec.msgpack.Decoder[Task] = msgspec.msgpack.Decoder(Task)
        self._decode_action: msgspec.msgpack.Decoder[Action] = msgspec.msgpack.Decoder(Action)

    async def run(
        self, context: zmq.Context[zmq.Socket[bytes]], stop: asyncio.Event, on_joined: Callable[[], object]
    ) -> None:
        """Serve until `stop` is set, or until it is drained; then stop every session and return.

        `on_joined` is called once, when the broker has answered for the first time.
        """
        self._on_joined: Callable[[], object] | None = on_joined
        config = self._config
        socket = connect_dealer(context, config.broker, self.worker_id.encode(), max_frame_bytes=config.max_frame_bytes)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="environment")
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._socket = DealerSocket(socket, self._receive)
            self._introduce()
            beats = tasks.create_task(self._beat())
            drains = tasks.create_task(self._drain(stop))
            try:
                await stop.wait()
            finally:
                beats.cancel()
                drains.cancel()
                for hosted in list(self._hosted.values()):
                    self._stop(hosted)
        self._socket.close(linger_ms=500)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Take no new sessions and end with the last one."""
        self._draining.set()

    async def _drain(self, stop: asyncio.Event) -> None:
        await self._draining.wait()
        log.info("draining: %d sessions to go", len(self._hosted))
        self._send_beat()
        deadline_s = asyncio.get_running_loop().time() + self._config.drain_timeout_s
        await asyncio.sleep(self._config.beat_s)  # a session that was on its way when we said so is still ours
        while self._hosted and asyncio.get_running_loop().time() < deadline_s:  # noqa: ASYNC110 - sessions end anywhere
            await asyncio.sleep(DRAIN_POLL_S)
        stop.set()

    @property
    def abandoned(self) -> int:
        """Calls that were given up and have not returned."""
        self._abandoned = [execution for execution in self._abandoned if execution.abandoned]
        return len(self._abandoned)

    # --- what the broker says -------------------------------------------------------------------------------

    def _receive(self, frame: bytes) -> None:
        try:
            message = wp.decode_to_worker(frame)
        except FormatError as error:
            log.warning("frame from the broker dropped: %s", error)
            return
        match message:
            case wp.Step():
                self._step(message)
            case wp.Start():
                self._start(message)
            case wp.Stop():
                self._remember_ended(message.sid)
                hosted = self._hosted.get(message.sid)
                if hosted is None:
                    self._send(wp.Stopped(sid=message.sid))
                else:
                    self._stop(hosted)
            case wp.Recall():
                self._recall(message)
            case wp.WhoAreYou():
                self._introduce()
            case wp.BeatReply():
                if self._on_joined is not None:
                    on_joined, self._on_joined = self._on_joined, None
                    on_joined()

    def _start(self, message: wp.Start) -> None:
        hosted = self._hosted.get(message.sid)
        if hosted is not None:
            self._repeat(hosted, 0)
            return
        if message.sid in self._ended:  # a late copy
            self._send(wp.Stopped(sid=message.sid))
            return
        if message.environment not in self._factories:
            text = f"this worker does not host {message.environment!r}"
            self._send(wp.Outcome(sid=message.sid, seq=0, kind="refused", message=text, closed=True))
            return
        hosted = self._hosted[message.sid] = _Hosted(message)
        self._begin(hosted, self._decode_task, message.task)

    def _remember_ended(self, sid: str) -> None:
        self._ended[sid] = None
        if len(self._ended) > ENDED_REMEMBERED:
            self._ended.popitem(last=False)

    def _step(self, message: wp.Step) -> None:
        hosted = self._hosted.get(message.sid)
        if hosted is None or (hosted.closed and message.seq > hosted.seq):
            text = "this worker does not host the session any more"
            self._send(wp.Outcome(sid=message.sid, seq=message.seq, kind="unknown_session", message=text, closed=True))
        elif message.seq <= hosted.seq:
            self._repeat(hosted, message.seq)
        elif hosted.running:
            text = f"action {message.seq} while action {hosted.seq} runs"
            self._send(wp.Outcome(sid=message.sid, seq=message.seq, kind="protocol", message=text))
        else:
            hosted.seq, hosted.running, hosted.outcome = message.seq, True, b""
            self._begin(hosted, self._decode_action, message.action)

    def _begin(
        self,
        hosted: _Hosted,
        decoder: msgspec.msgpack.Decoder[Task] | msgspec.msgpack.Decoder[Action],
        raw: msgspec.Raw,
    ) -> None:
        """Start what the broker asked for, if it makes sense."""
        try:
            what = decoder.decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._report(hosted, NOTHING, "protocol", f"not a task or an action: {error}", 0.0)
            hosted.task = self._tasks.create_task(self._close(hosted))
        else:
            hosted.task = self._tasks.create_task(self._run(hosted, what))

    def _recall(self, message: wp.Recall) -> None:
        hosted = self._hosted.get(message.sid)
        if hosted is None:
            text = "this worker does not host the session any more"
            self._send(wp.Outcome(sid=message.sid, seq=message.seq, kind="unknown_session", message=text, closed=True))
        else:
            self._repeat(hosted, message.seq)

    def _repeat(self, hosted: _Hosted, seq: int) -> None:
        """An action that is known: its outcome once more if it is the last one and over, silence otherwise."""
        if seq == hosted.seq and hosted.outcome:
            self._socket.send(hosted.outcome)

    # --- what runs ------------------------------------------------------------------------------------------

    async def _call(self, hosted: _Hosted, what: Task | Action) -> msgspec.Raw:
        """The reset to a task or one step of a session's environment."""
        if isinstance(what, Action):
            assert hosted.environment is not None, "a session that was not reset is closed"
            return pack(_checked(await hosted.environment.step(what)))
        name = hosted.start.environment
        config = self._config.environments[name]
        execution = hosted.execution = execute(config, name, self._factories[name], self._pool)
        hosted.environment = execution if config.latency is None else WithLatency(execution, config.latency)
        return pack(await hosted.environment.reset(what))

    async def _run(self, hosted: _Hosted, what: Task | Action) -> None:
        """Run one call of an environment and report it; close the session if it failed."""
        clock = asyncio.get_running_loop().time
        started_s = clock()
        limit_s = self._config.environments[hosted.start.environment].step_timeout_s
        limit: asyncio.Timeout | None = None
        kind: FailureKind | None = None
        value, text = NOTHING, ""
        try:
            if limit_s is None:
                value = await self._call(hosted, what)
            else:
                async with asyncio.timeout(limit_s) as limit:
                    value = await self._call(hosted, what)
        except BaseException as error:  # whatever it is, it must not take the other sessions along
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise  # stopped from outside, not an exception of the environment
            if isinstance(error, TimeoutError) and limit is not None and limit.expired():
                kind, text = "timeout", f"the environment did not answer within {clock() - started_s:.1f} s"
            else:
                kind, text = self._failure(hosted, error)
        self._report(hosted, value, kind, text, clock() - started_s)
        if hosted.closed:
            await self._close(hosted)

    def _failure(self, hosted: _Hosted, error: BaseException) -> tuple[FailureKind, str]:
        """What an exception of an environment is called, and said, on the wire."""
        if isinstance(error, TaskRefused):
            return "refused", said_by(error)
        log.warning("the environment raised", exc_info=error, extra=_ids(hosted))
        text = said_by(error)
        return "raised", text if isinstance(error, EnvironmentRaised) else f"{type(error).__name__}: {text}"

    def _report(
        self, hosted: _Hosted, value: msgspec.Raw, kind: FailureKind | None, text: str, execution_s: float
    ) -> None:
        """Tell the broker what came of the session's action, and remember it."""
        size = len(bytes(value))
        if size > self._config.max_frame_bytes:
            value, kind = NOTHING, "raised"
            text = f"the observation has {size} bytes; at most {self._config.max_frame_bytes} are carried"
        hosted.running = False
        hosted.closed = kind is not None
        outcome = wp.Outcome(
            sid=hosted.start.sid,
            seq=hosted.seq,
            value=value,
            kind=kind,
            message=sendable(text)[:MESSAGE_CHARACTERS],
            execution_s=execution_s,
            closed=hosted.closed,
        )
        hosted.outcome = encode(outcome)
        self._socket.send(hosted.outcome)

    async def _close(self, hosted: _Hosted) -> None:
        """Close a session's environment, within bounds, whatever it raises."""
        execution, hosted.execution, hosted.environment = hosted.execution, None, None
        if execution is None:
            return
        try:
            async with asyncio.timeout(self._config.close_timeout_s):
                await execution.close()
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_being_cancelled():
                raise
            log.warning("an environment failed to close", exc_info=error, extra=_ids(hosted))
        if execution.abandoned:
            self._abandoned.append(execution)

    def _stop(self, hosted: _Hosted) -> None:
        self._hosted.pop(hosted.start.sid, None)
        self._tasks.create_task(self._stop_and_confirm(hosted))

    async def _stop_and_confirm(self, hosted: _Hosted) -> None:
        task = hosted.task
        if task is not None and not task.done():
            if hosted.running:
                task.cancel()
            await asyncio.wait([task], timeout=self._config.close_timeout_s)
        await self._close(hosted)
        self._send(wp.Stopped(sid=hosted.start.sid))

    # --- what the broker hears ------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.beat_s)
            self._send_beat()

    def _send_beat(self) -> None:
        running = sum(1 for hosted in self._hosted.values() if hosted.running)
        self._send(wp.Beat(running=running, abandoned=self.abandoned, draining=self._draining.is_set()))

    def _introduce(self) -> None:
        sessions = tuple(
            wp.HostedSession(
                sid=hosted.start.sid,
                client=hosted.start.client,
                session=hosted.start.session,
                environment=hosted.start.environment,
                trajectory_id=hosted.start.trajectory_id,
                job=hosted.start.job,
                seq=hosted.seq,
                running=hosted.running,
                closed=hosted.closed,
            )
            for hosted in self._hosted.values()
        )
        environments = tuple(self._config.environments)
        self._send(
            wp.Introduce(worker_id=self.worker_id, pid=os.getpid(), environments=environments, sessions=sessions)
        )

    def _send(self, message: wp.FromWorker) -> None:
        self._socket.send(encode(message))


def _ids(hosted: _Hosted) -> dict[str, str]:
    """What the log says a record is about."""
    start = hosted.start
    return {"session": start.session, "trajectory": start.trajectory_id, "job": start.job, "client": start.client}


def _checked(result: StepResult) -> StepResult:
    """What an environment gave, if its reward is one. Raises `EnvironmentRaised`."""
    if isinstance(result, StepResult) and not math.isfinite(result.reward):
        raise EnvironmentRaised(f"the environment's reward is {result.reward}, it must be a finite number")
    return result


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
