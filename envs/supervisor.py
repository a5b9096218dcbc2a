"""The supervisor: keeps one broker and the local workers running.

It is the parent of both and does nothing else, so that nothing it does can fail with them. A broker that dies is
started again on the same ports and is told how many workers to wait for: their sessions go on. A worker that dies is
replaced under a new name, and the broker is told at once, rather than when the dead one's silence becomes long.

A child that cannot even start the first time ends the server; later it is tried again, after longer and longer pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from makespan.envs.broker_process import BrokerProcessConfig, WorkerLost
from makespan.envs.config import EnvironmentConfig, ServerConfig, WorkerConfig
from makespan.rollout.errors import ConfigError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""How long a child may take to say that it is ready."""

STOP_GRACE_S = 3.0
"""How long a child may take to end before it is killed."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""Between a child's death and its next start; doubles while it keeps dying young."""

SETTLED_S = 30.0
"""A child that lived for so long did not die young."""


RunChild = Callable[[Callable[[], None]], Awaitable[int]]
"""Runs a child once, calls its argument when the child is ready, and gives the child's exit code."""


class Ready(msgspec.Struct, frozen=True):
    """What a child says when it is ready."""

    address: str = ""
    worker_address: str = ""
    metrics: str = ""


class Supervisor:
    """Runs a server: `await run(on_ready)`."""

    def __init__(self, config: ServerConfig, hosted: dict[str, EnvironmentConfig]) -> None:
        self._config = config
        self._hosted = hosted
        self._broker: asyncio.subprocess.Process | None = None
        self._broker_is_up = asyncio.Event()
        self._brokers_started = 0
        self._ready = Ready()
        self._live_workers: set[str] = set()

    async def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Serve until cancelled; `on_ready` gets the addresses. Raises `ConfigError` if it cannot start."""
        children = [("broker", self._run_broker)] + [("worker", self._run_worker)] * self._config.workers
        first_starts: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in children]
        try:
            async with asyncio.TaskGroup() as tasks:
                for (name, run), started in zip(children, first_starts, strict=True):
                    tasks.create_task(self._keep(name, run, started))
                await asyncio.gather(*first_starts)
                on_ready(self._ready)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _keep(self, name: str, run: RunChild, started: asyncio.Future[None]) -> None:
        """Run a child again and again."""
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S

        def on_start() -> None:
            if not started.done():
                started.set_result(None)

        while True:
            born_s = loop.time()
            code = await run(on_start)
            if not started.done():
                raise ConfigError(f"the {name} ended with code {code} before it was ready (its log says why)")
            pause_s = FIRST_PAUSE_S if loop.time() - born_s > SETTLED_S else min(2 * pause_s, LONGEST_PAUSE_S)
            log.warning("the %s ended with code %d: starting another in %.1f s", name, code, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_broker(self, on_start: Callable[[], None]) -> int:
        server = self._config
        if server.event_log and self._brokers_started:  # an earlier broker's log stays as it is
            path = Path(server.event_log)
            again = path.with_name(f"{path.stem}-{self._brokers_started}{path.suffix}")
            server = msgspec.structs.replace(server, event_log=str(again))
        self._brokers_started += 1
        config = BrokerProcessConfig(server=server, expected_workers=len(self._live_workers))
        async with _child("makespan.envs.broker_process", config) as process:
            ready = await _ready(process)
            if ready is not None:
                # A broker that is started again listens where the first one did: everybody reconnects by themselves.
                self._config = msgspec.structs.replace(
                    self._config,
                    port=_port(ready.address),
                    worker_port=_port(ready.worker_address),
                    metrics_port=_port(ready.metrics.removesuffix("/metrics")) if ready.metrics else None,
                )
                self._ready = ready
                self._broker = process
                self._broker_is_up.set()
                on_start()
            return await process.wait()

    async def _run_worker(self, on_start: Callable[[], None]) -> int:
        await self._broker_is_up.wait()
        worker_id = f"worker-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        config = WorkerConfig(
            worker_id=worker_id,
            broker=self._ready.worker_address,
            environments=self._hosted,
            max_frame_bytes=self._config.max_frame_bytes,
        )
        async with _child("makespan.envs.worker_process", config) as process:
            try:
                if await _ready(process) is not None:
                    self._live_workers.add(worker_id)
                    on_start()
                code = await process.wait()
            finally:
                self._live_workers.discard(worker_id)
            self._tell_broker(WorkerLost(worker_lost=worker_id, why=f"its process ended with code {code}"))
            return code

    def _tell_broker(self, message: WorkerLost) -> None:
        """Best effort: a broker that is down hears of it from the worker's silence."""
        if self._broker is not None and self._broker.returncode is None and self._broker.stdin is not None:
            self._broker.stdin.write(msgspec.json.encode(message) + b"\n")


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@contextlib.asynccontextmanager
async def _child(module: str, config: msgspec.Struct) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child process for the time of the block: it is ended, and waited for, however the block ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        yield process
    finally:
        await asyncio.shield(_end(process))


async def _ready(process: asyncio.subprocess.Process) -> Ready | None:
    """What the child says when it is ready; None when it ends, or stays silent, instead."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await process.stdout.readline()
    except TimeoutError:
        log.error("a child was not ready within %.0f s", START_TIMEOUT_S)
        process.kill()
        return None
    return msgspec.json.decode(line, type=Ready) if line else None


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    if process.returncode is None:
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
