"""How an environment's calls run: in the event loop, in threads, or in a process (`makespan.envs.isolation`).

An `Execution` makes an environment and runs its methods, one at a time, always behind coroutines. Asynchronous
environments run in the worker's loop. Blocking ones run in threads of a shared pool; a thread cannot be stopped from
outside, so a call that is given up is *abandoned*: the thread goes on, is counted until it returns, and only then is
its environment closed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Protocol, cast

from makespan.envs.config import EnvironmentConfig
from makespan.envs.isolation import InProcess
from makespan.envs.registry import Factory
from makespan.rollout.environment import Action, Environment, Observation, StepResult, SyncEnvironment
from makespan.rollout.trajectory import Task

log = logging.getLogger(__name__)


class Execution(Protocol):
    """One environment of one session: an `Environment` that can also say what it left running."""

    async def reset(self, task: Task) -> Observation: ...

    async def step(self, action: Action) -> StepResult: ...

    async def close(self) -> None: ...

    @property
    def abandoned(self) -> bool:
        """Whether a call that was given up is still running."""
        ...


class InLoop:
    """Runs an asynchronous environment in the running loop."""

    abandoned = False

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    async def reset(self, task: Task) -> Observation:
        return await self._environment.reset(task)

    async def step(self, action: Action) -> StepResult:
        return await self._environment.step(action)

    async def close(self) -> None:
        await self._environment.close()


class InThread:
    """Runs a blocking environment in threads of `pool`."""

    def __init__(self, environment: SyncEnvironment, pool: Executor) -> None:
        self._environment = environment
        self._pool = pool
        self._call: Future[Any] | None = None

    @property
    def abandoned(self) -> bool:
        return self._call is not None and not self._call.done()

    async def reset(self, task: Task) -> Observation:
        return cast(Observation, await self._run(self._environment.reset, task))

    async def step(self, action: Action) -> StepResult:
        return cast(StepResult, await self._run(self._environment.step, action))

    async def close(self) -> None:
        """Close the environment; while an abandoned call still runs in it, see to it that it is closed after that."""
        if self._call is not None and not self._call.done():
            self._call.add_done_callback(lambda _: self._close_late())
            return
        await self._run(self._environment.close)

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._call = self._pool.submit(_without_stop_iteration, function, *arguments)
        return await asyncio.wrap_future(self._call)

    def _close_late(self) -> None:
        try:
            self._environment.close()
        except BaseException:  # runs in the environment's own thread, where nobody waits for it
            log.exception("an environment failed to close after an abandoned call")


def _without_stop_iteration(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function as a coroutine would be: no future can carry a `StopIteration`, so it is a `RuntimeError`."""
    try:
        return function(*arguments)
    except StopIteration as error:
        raise RuntimeError("the environment raised StopIteration") from error


def execute(config: EnvironmentConfig, name: str, factory: Factory, pool: Executor) -> Execution:
    """An execution of a new environment: in a process if so configured, else of the kind that its `step` asks for."""
    if config.execution == "process":
        return InProcess(config.factory or name, config.memory_bytes)
    environment = factory()
    if inspect.iscoroutinefunction(environment.step):
        return InLoop(cast(Environment, environment))
    return InThread(cast(SyncEnvironment, environment), pool)
