"""Faults against real processes: nothing is lost, nothing runs twice, nothing stays behind.

The counting environment appends a line to a ledger for every action that it runs; the ledger is the witness.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from makespan.envs.client import EnvClient, status
from makespan.envs.config import EnvironmentConfig
from makespan.envs.worker import WorkerConfig
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.trajectory import Progress, Task
from tests.envs.links import CuttableLink, ShufflingLink
from tests.envs.plane import descendants, open_session, step

Tasks = Callable[..., Task]
Executions = Callable[[], dict[str, int]]

WIDE = {"counting.start": 64, "counting.step": 64}


async def run_chain(client: EnvClient, task: Task, steps: int) -> list[str]:
    """Run a whole task; gives what the environment said."""
    session, _, _ = await open_session(client, task)
    said = []
    for number in range(1, steps + 1):
        result, _ = await step(session, f"say {number}")
        said.append(result.observation.messages[0].content)
    await session.close()
    return said


def expected_words(steps: int) -> list[str]:
    return [f"{number}: say {number}" for number in range(1, steps + 1)]


def once_each(tasks: list[Task], steps: int) -> dict[str, int]:
    return {f"{task.task_id} {number}": 1 for task in tasks for number in range(steps + 1)}


def process_named(module: str) -> int:
    """The descendant of this process that runs `module`."""
    for pid in descendants(os.getpid()):
        if module in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
            return pid
    raise AssertionError(f"no process runs {module}")


def test_a_killed_worker_in_mid_step(serve: Any, until: Any, counting_task: Tasks, executions: Executions) -> None:
    async def main() -> list[str]:
        async with serve(slots=WIDE, workers=2) as address, EnvClient(address, job="test") as client:
            tasks = [counting_task(f"t{number}", step_s=6.0) for number in range(6)]
            sessions = [(await open_session(client, task))[0] for task in tasks]
            report = await status(address)
            assert [worker.sessions for worker in report.workers] == [3, 3]  # least loaded
            running = [asyncio.create_task(step(session)) for session in sessions]
            await until(address, lambda report: report.slots["counting.step"].running == 6)
            os.kill(report.workers[0].pid, signal.SIGKILL)
            failed, _ = await asyncio.wait(running, timeout=5.0, return_when=asyncio.FIRST_EXCEPTION)
            assert failed, "the failure must not wait for the dead worker's silence"
            outcomes = await asyncio.gather(*running, return_exceptions=True)
            kinds = [outcome.kind if isinstance(outcome, EnvironmentFailure) else "ok" for outcome in outcomes]
            # The dead one is replaced, and a chain may start again from its reset.
            await until(address, lambda report: len(report.workers) == 2)
            assert await run_chain(client, counting_task("again"), 2) == expected_words(2)
            for session in sessions:
                await session.close()
            report = await until(address, lambda report: report.sessions == 0)
            assert not any(slot.running or slot.waiting for slot in report.slots.values())
            return kinds

    kinds = asyncio.run(main())
    assert sorted(kinds) == ["ok"] * 3 + ["unknown_outcome"] * 3
    assert set(executions().values()) == {1}


def test_a_broker_killed_in_mid_batch(serve: Any, counting_task: Tasks, executions: Executions) -> None:
    tasks = [counting_task(f"t{number}", step_s=0.1) for number in range(20)]

    async def main() -> list[list[str]]:
        async with serve(slots=WIDE, workers=2) as address, EnvClient(address, job="test") as client:
            chains = [asyncio.create_task(run_chain(client, task, 15)) for task in tasks]
            for _ in range(2):
                await asyncio.sleep(0.6)
                os.kill(process_named("makespan.envs.broker_process"), signal.SIGKILL)
            async with asyncio.timeout(60):
                said = await asyncio.gather(*chains)
            report = await status(address)
            assert report.counters["sessions_adopted"] == 20
            return said

    assert asyncio.run(main()) == [expected_words(15)] * 20
    assert executions() == once_each(tasks, 15)


def test_a_lease_outlives_the_broker_that_granted_it(serve: Any, until: Any) -> None:
    async def main() -> None:
        async with serve(slots={"search.tool": 1}, workers=0) as address, EnvClient(address, job="test") as client:
            async with client.lease("search.tool", "holder", key=0.0, progress=Progress()):
                before = (await status(address)).server_id
                os.kill(process_named("makespan.envs.broker_process"), signal.SIGKILL)
                report = await until(
                    address,
                    lambda report: report.server_id != before and report.slots["search.tool"].running == 1,
                    within_s=20.0,
                )
                assert report.slots["search.tool"].waiting == 0
            await until(address, lambda report: report.slots["search.tool"].running == 0)

    asyncio.run(main())


def test_a_worker_that_falls_silent_and_answers_late(
    serve: Any, until: Any, counting_task: Tasks, executions: Executions
) -> None:
    async def main() -> None:
        async with serve(slots=WIDE, worker_timeout_s=3.0) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, counting_task("silent", step_s=0.5))
            report = await status(address)
            running = asyncio.create_task(step(session))
            await until(address, lambda report: report.slots["counting.step"].running == 1)
            os.kill(report.workers[0].pid, signal.SIGSTOP)
            try:
                with pytest.raises(EnvironmentFailure) as failure:
                    await asyncio.wait_for(running, 10.0)
                assert failure.value.kind == "unknown_outcome"
                report = await status(address)
                assert report.workers == ()
                assert report.slots["counting.step"].running == 0
            finally:
                os.kill(process_named("makespan.envs.worker_process"), signal.SIGCONT)
            # It wakes, reports what it ran, and is told to stop the session that was given up.
            await until(address, lambda report: len(report.workers) == 1 and report.workers[0].sessions == 0)
            assert await run_chain(client, counting_task("after"), 2) == expected_words(2)
            with pytest.raises(EnvironmentFailure) as failure:
                await step(session)
            assert failure.value.kind == "unknown_session"

    asyncio.run(main())
    assert executions() == {"silent 0": 1, "silent 1": 1, "after 0": 1, "after 1": 1, "after 2": 1}


def test_a_drained_worker_finishes_its_sessions_and_gets_no_new_ones(
    serve: Any, until: Any, counting_task: Tasks, executions: Executions
) -> None:
    async def main() -> None:
        async with serve(slots=WIDE, workers=1) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, counting_task("old", step_s=0.2))
            (old,) = (await status(address)).workers
            os.kill(old.pid, signal.SIGTERM)
            await until(address, lambda report: report.workers[0].draining)
            opening = asyncio.create_task(open_session(client, counting_task("new")))
            await step(session)
            assert not opening.done()  # nobody takes it yet
            await session.close()
            fresh, _, _ = await asyncio.wait_for(opening, 20.0)
            (new,) = (await status(address)).workers
            assert new.pid != old.pid
            await fresh.close()

    asyncio.run(main())
    assert set(executions().values()) == {1}


def test_a_ten_second_cut_between_client_and_broker(serve: Any, counting_task: Tasks, executions: Executions) -> None:
    tasks = [counting_task(f"t{number}", step_s=0.3) for number in range(8)]

    async def main() -> list[list[str]]:
        async with serve(slots=WIDE) as address:
            link = CuttableLink(address)
            async with link.open() as through, EnvClient(through, job="test") as client:
                chains = [asyncio.create_task(run_chain(client, task, 8)) for task in tasks]
                await asyncio.sleep(1.0)
                await link.cut_for(10.0)
                assert link.dropped_bytes > 0
                async with asyncio.timeout(40):
                    return await asyncio.gather(*chains)

    assert asyncio.run(main()) == [expected_words(8)] * 8
    assert executions() == once_each(tasks, 8)


def test_a_ten_second_cut_between_broker_and_a_worker_elsewhere(
    serve: Any, until: Any, counting_task: Tasks, executions: Executions, unused_port: int
) -> None:
    tasks = [counting_task(f"t{number}", step_s=0.3) for number in range(8)]

    async def main() -> list[list[str]]:
        async with serve(slots=WIDE, workers=0, worker_port=unused_port) as address:
            link = CuttableLink(f"tcp://127.0.0.1:{unused_port}")
            async with link.open() as through, EnvClient(address, job="test") as client, worker_elsewhere(through):
                await until(address, lambda report: len(report.workers) == 1)
                chains = [asyncio.create_task(run_chain(client, task, 8)) for task in tasks]
                await asyncio.sleep(1.0)
                await link.cut_for(10.0)
                assert link.dropped_bytes > 0
                async with asyncio.timeout(40):
                    return await asyncio.gather(*chains)

    assert asyncio.run(main()) == [expected_words(8)] * 8
    assert executions() == once_each(tasks, 8)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_duplicated_and_reordered_messages_between_client_and_broker(
    serve: Any, counting_task: Tasks, executions: Executions, seed: int
) -> None:
    tasks = [counting_task(f"t{number}") for number in range(10)]

    async def main() -> list[list[str]]:
        async with serve(slots={"counting.start": 2, "counting.step": 3}) as address:
            link = ShufflingLink(address, seed)
            async with link.open() as through, EnvClient(through, job="test") as client:
                async with asyncio.timeout(60):
                    said = await asyncio.gather(*(run_chain(client, task, 6) for task in tasks))
                assert link.duplicates > 50
                assert link.reordered > 50
            return said

    assert asyncio.run(main()) == [expected_words(6)] * 10
    assert executions() == once_each(tasks, 6)


@pytest.mark.parametrize("seed", [4, 5])
def test_duplicated_and_reordered_messages_between_broker_and_worker(
    serve: Any, until: Any, counting_task: Tasks, executions: Executions, unused_port: int, seed: int
) -> None:
    tasks = [counting_task(f"t{number}") for number in range(10)]

    async def main() -> list[list[str]]:
        slots = {"counting.start": 2, "counting.step": 3}
        async with serve(slots=slots, workers=0, worker_port=unused_port) as address:
            link = ShufflingLink(f"tcp://127.0.0.1:{unused_port}", seed)
            async with link.open() as through, EnvClient(address, job="test") as client, worker_elsewhere(through):
                async with asyncio.timeout(60):
                    said = await asyncio.gather(*(run_chain(client, task, 6) for task in tasks))
                await until(address, lambda report: report.workers[0].sessions == 0)
                assert link.duplicates > 50
                assert link.reordered > 50
            return said

    assert asyncio.run(main()) == [expected_words(6)] * 10
    assert executions() == once_each(tasks, 6)


class worker_elsewhere:
    """A worker process that is nobody's child but the test's, connected to a broker's address."""

    def __init__(self, broker: str) -> None:
        self._config = WorkerConfig(
            worker_id="worker-elsewhere", broker=broker, environments={"counting": EnvironmentConfig()}
        )

    async def __aenter__(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "makespan.envs.worker_process"]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")
        await self._process.stdout.readline()
        return self._process

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 10.0)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
