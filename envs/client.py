"""The client of an environment server: one per process, shared by all of its trajectories.

`EnvClient` is the engine's `EnvironmentBackend` over ZeroMQ. Requests survive lost messages, cut connections and a
restarted broker (`makespan.envs.connection`); when the client dies, its sessions end with its lease. Every failure is
raised as an `EnvironmentFailure`. Cancelling a task that awaits an action withdraws the action and closes its session.
"""

from __future__ import annotations

import contextlib
from asyncio import CancelledError
from collections.abc import AsyncIterator, Iterator, Mapping
from types import TracebackType
from typing import TypeVar

import msgspec

from makespan.envs.config import check_seconds
from makespan.envs.connection import Connection, ServerInfo, status
from makespan.envs.protocol import (
    LONGEST_JOB_NAME,
    Act,
    Close,
    Lease,
    Open,
    Rekey,
    Release,
    Result,
    StatusReply,
    encode,
    pack,
    sendable,
)
from makespan.rollout.environment import Action, ActionTiming, EnvironmentFailure, Observation, StepResult
from makespan.rollout.errors import ConfigError
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.trajectory import Progress, Task

__all__ = ["EnvClient", "EnvSession", "ServerInfo", "status"]

Value = TypeVar("Value")


class EnvClient:
    """Connects to an environment server; `async with EnvClient(address, job="name") as client`.

    Args:
        address: `tcp://host:port`.
        job: the name that slots are shared by; give every process of one training job the same one.
        lease_s: how long the server keeps this client's sessions without a sign of life, and how long this client
            waits for a silent server before its requests fail as `unreachable`.
        connect_timeout_s: how long `connect` waits for a first answer.
        request_timeout_s: the longest a request may take, waiting for its slot included.
        event_log: gets `environment_reconnected` and `environment_resent` events.

    Raises `ConfigError` for a job or a time that the server would not accept.
    """

    def __init__(
        self,
        address: str,
        *,
        job: str,
        lease_s: float = 30.0,
        connect_timeout_s: float = 5.0,
        request_timeout_s: float = 600.0,
        event_log: EventLog | None = None,
    ) -> None:
        for setting, value_s in (
            ("lease_s", lease_s),
            ("connect_timeout_s", connect_timeout_s),
            ("request_timeout_s", request_timeout_s),
        ):
            check_seconds(setting, value_s)
        if len(job) > LONGEST_JOB_NAME or sendable(job) != job:
            raise ConfigError(f"job is {job!r}; it must be a text of at most {LONGEST_JOB_NAME} characters")
        self.address = address
        self.job = job
        self._lease_s = lease_s
        self._connect_timeout_s = connect_timeout_s
        self._request_timeout_s = request_timeout_s
        self._event_log = event_log or EventLog(None, "client")
        self._connection: Connection | None = None
        self._numbers = 0
        self._open_sessions: set[str] = set()
        self._pending_of: dict[str, str] = {}  # by trajectory, the request that may wait

    async def connect(self) -> ServerInfo:
        """Say hello and start renewing the lease; gives what the server offers.

        Raises `EnvironmentUnreachable` when nobody answers within `connect_timeout_s`.
        """
        if self._connection is not None:
            raise RuntimeError("this client is connected already; use one client for all trajectories of a process")
        connection = Connection(self.address, job=self.job, lease_s=self._lease_s, event_log=self._event_log)
        info = await connection.open(self._connect_timeout_s)
        self._connection = connection
        return info

    async def close(self) -> None:
        """Close every session of this client and disconnect. Requests still pending fail as `cancelled`."""
        connection, self._connection = self._connection, None
        self._open_sessions.clear()
        self._pending_of.clear()
        if connection is not None:
            await connection.close()

    async def __aenter__(self) -> EnvClient:
        await self.connect()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def info(self) -> ServerInfo:
        """What the server offers, as of its last answer."""
        return self._connected().info

    async def open(
        self, trajectory_id: str, task: Task, *, key: float, progress: Progress
    ) -> tuple[EnvSession, Observation, ActionTiming]:
        """Start a session for a trajectory. Raises `EnvironmentFailure`."""
        request_id = self._new_id(trajectory_id)
        with _encoding():
            request = Open(
                id=request_id,
                environment=task.environment,
                task=pack(task),
                trajectory_id=trajectory_id,
                key=key,
                progress=progress,
                deadline_s=self._request_timeout_s,
            )
            frame = encode(request)
        self._open_sessions.add(request_id)
        try:
            result = await self._request(trajectory_id, request_id, frame)
            observation = _value(result, Observation)
        except BaseException:
            self.end_session(request_id)
            raise
        return EnvSession(self, request_id, trajectory_id), observation, _timing(result)

    async def act(
        self, session: EnvSession, seq: int, action: Action, *, key: float, progress: Progress
    ) -> tuple[StepResult, ActionTiming]:
        """Run action number `seq` of a session (`EnvSession.step` counts for you). Raises `EnvironmentFailure`."""
        with _encoding():
            request = Act(
                id=f"{session.id}/{seq}",
                session=session.id,
                seq=seq,
                action=pack(action),
                key=key,
                progress=progress,
                deadline_s=self._request_timeout_s,
            )
            frame = encode(request)
        result = await self._request(session.trajectory_id, request.id, frame)
        return _value(result, StepResult), _timing(result)

    def end_session(self, session_id: str) -> None:
        """Close a session without waiting for the server's word; closing twice is once."""
        if session_id in self._open_sessions and self._connection is not None:
            self._open_sessions.discard(session_id)
            request = Close(id=f"{session_id}/close", session=session_id)
            self._connection.post(request.id, encode(request))

    @contextlib.asynccontextmanager
    async def lease(
        self, slot_class: str, trajectory_id: str, *, key: float, progress: Progress, hold_s: float = 600.0
    ) -> AsyncIterator[ActionTiming]:
        """Hold a slot of `slot_class` for the time of the block, for a tool that runs in this process.

        The slot is lost after `hold_s`, whether the tool has ended or not; the server counts that. Gives how long the
        slot was waited for (`service_s` is 0: the block has yet to run). Raises `EnvironmentFailure`.
        """
        request_id = self._new_id(trajectory_id)
        with _encoding():
            request = Lease(
                id=request_id,
                slot_class=slot_class,
                trajectory_id=trajectory_id,
                key=key,
                progress=progress,
                deadline_s=self._request_timeout_s,
                hold_s=hold_s,
            )
            frame = encode(request)
        self._open_sessions.add(request_id)
        try:
            timing = _timing(await self._request(trajectory_id, request_id, frame))
        except BaseException:
            self.end_session(request_id)
            raise
        connection = self._connected()
        connection.hold(request_id, encode(msgspec.structs.replace(request, held=True)))
        try:
            yield timing
        finally:
            self._open_sessions.discard(request_id)
            connection.let_go(request_id)
            release = Release(id=f"{request_id}/release", lease=request_id)
            connection.post(release.id, encode(release))

    def rekey(self, keys: Mapping[str, float]) -> None:
        """Give the waiting actions of trajectories new keys, by trajectory id; others are ignored."""
        waiting = {self._pending_of[name]: key for name, key in keys.items() if name in self._pending_of}
        if waiting:
            request = Rekey(id=self._new_id("rekey"), keys=waiting)
            self._connected().post(request.id, encode(request))

    async def status(self, timeout_s: float = 5.0) -> StatusReply:
        """The server's state. Raises `EnvironmentUnreachable`."""
        return await status(self.address, timeout_s)

    async def _request(self, trajectory_id: str, request_id: str, frame: bytes) -> Result:
        connection = self._connected()
        self._pending_of[trajectory_id] = request_id
        try:
            return await connection.request(request_id, frame, self._request_timeout_s + self._lease_s)
        finally:
            if self._pending_of.get(trajectory_id) == request_id:
                del self._pending_of[trajectory_id]

    def _connected(self) -> Connection:
        if self._connection is None:
            raise EnvironmentFailure("unreachable", "the client is not connected: `await client.connect()` first")
        return self._connection

    def _new_id(self, trajectory_id: str) -> str:
        self._numbers += 1
        return f"{trajectory_id[:400]}/{self._numbers}"


class EnvSession:
    """A session opened through an `EnvClient`."""

    def __init__(self, client: EnvClient, session_id: str, trajectory_id: str) -> None:
        self.id = session_id
        self.trajectory_id = trajectory_id
        self._client = client
        self._seq = 0

    async def step(self, action: Action, *, key: float, progress: Progress) -> tuple[StepResult, ActionTiming]:
        """Run one action. Raises `EnvironmentFailure`. Cancelled, it withdraws the action and closes the session."""
        self._seq += 1
        try:
            return await self._client.act(self, self._seq, action, key=key, progress=progress)
        except CancelledError:
            self._client.end_session(self.id)
            raise

    async def close(self) -> None:
        """Free the session; safe to call twice, after a failure and during cancellation."""
        self._client.end_session(self.id)


@contextlib.contextmanager
def _encoding() -> Iterator[None]:
    """What no frame can carry (a number beyond 64 bits, half a surrogate pair, an object) fails its own call."""
    try:
        yield
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise EnvironmentFailure("protocol", f"the request cannot be encoded: {error}") from error


def _value(result: Result, of: type[Value]) -> Value:
    try:
        return msgspec.msgpack.decode(result.value, type=of)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EnvironmentFailure("protocol", f"the answer is not an {of.__name__}: {error}") from error


def _timing(result: Result) -> ActionTiming:
    return ActionTiming(slot_class=result.slot_class, queue_s=result.queue_s, service_s=result.service_s)
