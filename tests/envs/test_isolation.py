"""Process execution, with its bounds, through a real server."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from makespan.envs.client import EnvClient
from makespan.envs.config import EnvironmentConfig, ServerConfig, hosted_environments
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.errors import ConfigError
from makespan.rollout.trajectory import Task
from tests.envs.plane import descendants, gone, open_session, step

SLOTS = {"trouble.start": 4, "trouble.step": 4}
FACTORY = "tests.envs.troublemakers:Troublemaker"
TASK = Task(task_id="t", environment="trouble")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server processes find the tests' modules."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def hosted(**settings: Any) -> dict[str, EnvironmentConfig]:
    return {"trouble": EnvironmentConfig(factory=FACTORY, execution="process", **settings)}


async def failure_of(session: Any, action: str) -> tuple[str, str]:
    with pytest.raises(EnvironmentFailure) as failure:
        await step(session, action)
    return failure.value.kind, str(failure.value)


def test_each_session_has_a_process_and_takes_it_along(serve: Any, until: Any) -> None:
    async def main() -> None:
        async with serve(slots=SLOTS, environments=hosted()) as address, EnvClient(address, job="test") as client:
            before = descendants(os.getpid())
            (first, said, _), (second, also_said, _) = [await open_session(client, TASK) for _ in range(2)]
            pids = {int(said.messages[0].content.split()[1]), int(also_said.messages[0].content.split()[1])}
            assert descendants(os.getpid()) - before == pids
            result, _ = await step(first, "nothing")
            assert result.observation.messages[0].content == "did nothing"
            await first.close()
            await second.close()
            await until(address, lambda report: report.workers[0].sessions == 0)
            assert gone(pids, within_s=1.0)

    asyncio.run(main())


def test_a_killed_worker_takes_its_sessions_processes_along(serve: Any, until: Any) -> None:
    async def main() -> None:
        async with serve(slots=SLOTS, environments=hosted()) as address, EnvClient(address, job="test") as client:
            session, said, _ = await open_session(client, TASK)
            computing = asyncio.create_task(step(session, "compute 600"))
            report = await until(address, lambda report: report.slots["trouble.step"].running == 1)
            os.kill(report.workers[0].pid, signal.SIGKILL)
            with pytest.raises(EnvironmentFailure) as failure:
                await computing
            assert failure.value.kind == "unknown_outcome"
            assert gone({int(said.messages[0].content.split()[1])}, within_s=5.0)

    asyncio.run(main())


def test_a_computing_step_does_not_stall_the_others(serve: Any) -> None:
    async def main() -> None:
        async with serve(slots=SLOTS, environments=hosted()) as address, EnvClient(address, job="test") as client:
            hog, _, _ = await open_session(client, TASK)
            other, _, _ = await open_session(client, TASK)
            hogging = asyncio.create_task(step(hog, "compute 4"))
            await asyncio.sleep(0.1)
            for _ in range(20):
                await step(other, "nothing")
            assert not hogging.done()
            hogging.cancel()

    asyncio.run(main())


def test_a_step_beyond_its_time_is_killed(serve: Any, until: Any) -> None:
    async def main() -> None:
        environments = hosted(step_timeout_s=1.0)
        async with serve(slots=SLOTS, environments=environments) as address, EnvClient(address, job="test") as client:
            session, said, _ = await open_session(client, TASK)
            kind, text = await failure_of(session, "compute 600")
            assert (kind, text[:34]) == ("timeout", "the environment did not answer wit")
            assert gone({int(said.messages[0].content.split()[1])}, within_s=2.0)
            report = await until(address, lambda report: report.slots["trouble.step"].running == 0)
            assert report.workers[0].abandoned == 0

    asyncio.run(main())


def test_a_step_beyond_its_memory_fails_alone(serve: Any) -> None:
    async def main() -> None:
        environments = hosted(memory_bytes=200_000_000)
        async with serve(slots=SLOTS, environments=environments) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, TASK)
            other, _, _ = await open_session(client, TASK)
            await step(session, "hoard 50000000")  # this much it may have
            assert await failure_of(session, "hoard 400000000") == ("raised", "MemoryError: ")
            await step(other, "hoard 50000000")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("die 7", "EnvironmentDied: the environment's process ended with code 7 in the middle of a call"),
        ("exit 3", "SystemExit: 3"),
    ],
)
def test_a_process_that_ends_itself_is_a_failure(serve: Any, action: str, message: str) -> None:
    async def main() -> None:
        async with serve(slots=SLOTS, environments=hosted()) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, TASK)
            assert await failure_of(session, action) == ("raised", message)

    asyncio.run(main())


@pytest.mark.parametrize("execution", ["auto", "process"])
def test_an_environment_may_print_as_much_as_it_likes(serve: Any, execution: Any) -> None:
    async def main() -> None:
        environments = {"trouble": EnvironmentConfig(factory=FACTORY, execution=execution)}
        async with serve(slots=SLOTS, environments=environments) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, TASK)
            for _ in range(3):  # more than a pipe holds
                await step(session, "print 100000")

    asyncio.run(main())


def test_bounds_that_cannot_hold_are_refused() -> None:
    def check(**settings: Any) -> None:
        environments = {"counting": EnvironmentConfig(**settings)}
        hosted_environments(ServerConfig(slots={"counting.start": 1, "counting.step": 1}, environments=environments))

    with pytest.raises(ConfigError, match=r"memory_bytes needs environments\.counting\.execution: process"):
        check(memory_bytes=1 << 30)
    with pytest.raises(ConfigError, match="memory_bytes is 1000; it must be at least"):
        check(memory_bytes=1_000, execution="process")
    with pytest.raises(ConfigError, match=r"step_timeout_s is 0\.0; it must be above 0"):
        check(step_timeout_s=0.0)
