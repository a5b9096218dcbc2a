"""Real server processes for the tests of the environment plane."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from makespan.envs.client import status
from makespan.envs.config import ServerConfig
from makespan.envs.protocol import StatusReply
from makespan.envs.spawn import spawn_server
from makespan.rollout.trajectory import Task


class Serve(Protocol):
    """Starts a server for the time of an `async with` block and gives its address."""

    def __call__(self, **settings: Any) -> contextlib.AbstractAsyncContextManager[str]: ...


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @contextlib.asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[str]:
        settings.setdefault("slots", {"counting.start": 4, "counting.step": 4})
        config = ServerConfig(event_log=str(tmp_path / "broker.jsonl"), **settings)
        async with spawn_server(config, log_path=tmp_path / "server.log") as address:
            yield address

    return start


@pytest.fixture
def counting_task(tmp_path: Path) -> Callable[..., Task]:
    """A task of the counting environment that notes every execution in `tmp_path / "ledger"`."""

    def make(task_id: str, *, environment: str = "counting", **payload: Any) -> Task:
        payload.setdefault("ledger", str(tmp_path / "ledger"))
        return Task(task_id=task_id, environment=environment, payload=payload)

    return make


@pytest.fixture
def executions(tmp_path: Path) -> Callable[[], dict[str, int]]:
    """How often each `task_id action-number` ran, read from the ledger."""

    def read() -> dict[str, int]:
        ledger = tmp_path / "ledger"
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        return {line: lines.count(line) for line in set(lines)}

    return read


@pytest.fixture
def until() -> Callable[..., Awaitable[StatusReply]]:
    """Waits until a server's status satisfies a condition; fails the test after `within_s`."""

    async def wait(address: str, condition: Callable[[StatusReply], bool], *, within_s: float = 10.0) -> StatusReply:
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            report = await status(address)
            if condition(report):
                return report
            assert asyncio.get_running_loop().time() < deadline, f"not so within {within_s} s: {report}"
            await asyncio.sleep(0.05)

    return wait


@pytest.fixture
def unused_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
