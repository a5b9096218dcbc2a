"""The client for code that is not asynchronous: a small synchronous face of `EnvClient`.

It runs an event loop in a thread of its own, which also renews the lease while the caller is busy.

    with SyncEnvClient("tcp://127.0.0.1:5555", job="eval") as client:
        session, observation = client.open("trajectory-1", Task(task_id="1", environment="counting"))
        result = session.step("count")
        session.close()
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from makespan.envs.client import EnvClient, EnvSession, ServerInfo
from makespan.envs.protocol import StatusReply
from makespan.rollout.environment import Action, Observation, StepResult
from makespan.rollout.trajectory import Progress, Task

Value = TypeVar("Value")


class SyncEnvClient:
    """See the module's text. The arguments are `EnvClient`'s; methods raise what its methods raise."""

    def __init__(self, address: str, *, job: str, **settings: Any) -> None:
        self._client = EnvClient(address, job=job, **settings)

    def connect(self) -> ServerInfo:
        """Start the loop's thread and connect."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environment client", daemon=True)
        self._thread.start()
        try:
            return self._run(self._client.connect())
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """Close every session, disconnect and end the thread."""
        try:
            self._run(self._client.close())
        finally:
            self._stop()

    def __enter__(self) -> SyncEnvClient:
        self.connect()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def open(self, trajectory_id: str, task: Task, *, key: float = 0.0) -> tuple[SyncEnvSession, Observation]:
        """Start a session and reset it to a task. Raises `EnvironmentFailure`."""
        opening = self._client.open(trajectory_id, task, key=key, progress=Progress())
        session, observation, _ = self._run(opening)
        return SyncEnvSession(self, session), observation

    def status(self, timeout_s: float = 5.0) -> StatusReply:
        """The server's state. Raises `EnvironmentUnreachable`."""
        return self._run(self._client.status(timeout_s))

    def _run(self, work: Coroutine[Any, Any, Value]) -> Value:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # a KeyboardInterrupt while waiting withdraws the request
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class SyncEnvSession:
    """A session opened through a `SyncEnvClient`."""

    def __init__(self, client: SyncEnvClient, session: EnvSession) -> None:
        self._client = client
        self._session = session

    def step(self, text: str, *, key: float = 0.0) -> StepResult:
        """Run one action. Raises `EnvironmentFailure`."""
        result, _ = self._client._run(self._session.step(Action(text), key=key, progress=Progress()))
        return result

    def close(self) -> None:
        """Free the session; closing twice is once."""
        self._client._run(self._session.close())
