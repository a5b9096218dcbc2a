"""Starts an environment server for the time of a block, and leaves nothing behind.

The server runs in a session of its own, so that a terminal's Ctrl-C reaches only the process that owns the block, which
then ends the server in order. It also holds one end of a pipe to its owner: if the owner is killed, the server sees the
pipe end and ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import msgspec

from makespan.envs.config import ServerConfig, hosted_environments
from makespan.rollout.errors import EnvironmentUnreachable

STDERR_TAIL_BYTES = 4_000


@contextlib.asynccontextmanager
async def spawn_server(
    config: ServerConfig, *, ready_timeout_s: float = 60.0, grace_s: float = 5.0, log_path: Path
) -> AsyncIterator[str]:
    """Run a server process and give its address.

    Args:
        ready_timeout_s: how long it may take to start.
        grace_s: how long it may take to end after SIGTERM before it is killed.
        log_path: where its log (standard error) goes.

    Raises `ConfigError` for a configuration that cannot work and `EnvironmentUnreachable`, with the end of its log, for
    a server that does not come up.
    """
    hosted_environments(config)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log_file:
        process = await _start(config, log_file)
        try:
            yield await _address(process, ready_timeout_s, log_path)
        finally:
            await asyncio.shield(_end(process, grace_s))


async def _start(config: ServerConfig, log_file: IO[bytes]) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "makespan.envs.server",
        "-",
        "--with-parent",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log_file,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    return process


async def _address(process: asyncio.subprocess.Process, timeout_s: float, log_path: Path) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_s):
            line = await process.stdout.readline()
    except TimeoutError:
        raise EnvironmentUnreachable(
            f"the environment server was not ready within {timeout_s:.0f} s; its log ends: {_tail(log_path)}"
        ) from None
    if not line:
        code = await process.wait()
        raise EnvironmentUnreachable(
            f"the environment server ended with code {code} before it was ready; its log ends: {_tail(log_path)}"
        )
    return str(json.loads(line)["address"])


async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _tail(path: Path) -> str:
    data = path.read_bytes()[-STDERR_TAIL_BYTES:]
    return data.decode(errors="replace").strip() or "(nothing was written)"
