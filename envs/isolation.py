"""Process execution: an environment in a process of its own, so that nothing it does can reach the others.

A step that computes for minutes does not slow the worker's other sessions down, a step that takes too long is killed,
and one that wants more memory than it may have fails with `MemoryError`. The price is a Python process for each
session: about 0.1 s and 30 MB to start, plus what the environment imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec

from makespan.envs import child
from makespan.rollout.environment import Action, Observation, StepResult, TaskRefused
from makespan.rollout.errors import MakespanError
from makespan.rollout.trajectory import Task


class EnvironmentDied(MakespanError):
    """The process of an environment ended in the middle of a call."""


class EnvironmentRaised(MakespanError):
    """An environment went wrong, and the message says all of it: its error's, when it raised in its process."""


class InProcess:
    """Runs an environment in a child process; the child is killed when a call is cancelled.

    Args:
        factory: a bundled name or `module:attribute`; resolved in the child.
        memory_bytes: how much data the child may hold.
    """

    abandoned = False

    def __init__(self, factory: str, memory_bytes: int | None) -> None:
        self._make = child.Make(factory, memory_bytes)
        self._process: asyncio.subprocess.Process | None = None

    async def reset(self, task: Task) -> Observation:
        command = (sys.executable, "-m", "makespan.envs.child")
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        await self._call(self._make)
        return msgspec.msgpack.decode(await self._call(child.Reset(task)), type=Observation)

    async def step(self, action: Action) -> StepResult:
        return msgspec.msgpack.decode(await self._call(child.Step(action)), type=StepResult)

    async def close(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            try:
                await self._call(child.Close())
            finally:
                await asyncio.shield(self._kill())

    async def _call(self, call: child.Call) -> msgspec.Raw:
        """Run one call in the child. Raises what the child says it raised."""
        process = self._process
        assert process is not None, "an environment is reset first"
        assert process.stdin is not None
        assert process.stdout is not None
        body = msgspec.msgpack.encode(call)
        try:
            process.stdin.write(len(body).to_bytes(child.LENGTH_BYTES, "big") + body)
            await process.stdin.drain()
            length = int.from_bytes(await process.stdout.readexactly(child.LENGTH_BYTES), "big")
            answer = msgspec.msgpack.decode(await process.stdout.readexactly(length), type=child.Answer)
        except (OSError, asyncio.IncompleteReadError) as error:
            code = await process.wait()
            reason = f"signal {-code}" if code < 0 else f"code {code}"
            raise EnvironmentDied(f"the environment's process ended with {reason} in the middle of a call") from error
        except asyncio.CancelledError:
            await asyncio.shield(self._kill())
            raise
        if answer.refused is not None:
            raise TaskRefused(answer.refused)
        if answer.raised is not None:
            raise EnvironmentRaised(answer.raised)
        return answer.value

    async def _kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
