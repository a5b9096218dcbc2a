"""The client against a real server process: results, typed failures, cancellation, leases."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from makespan.envs.client import EnvClient, status
from makespan.envs.sync_client import SyncEnvClient
from makespan.rollout.environment import ActionTiming, EnvironmentFailure
from makespan.rollout.errors import ConfigError, EnvironmentUnreachable
from makespan.rollout.trajectory import Progress, Task
from tests.envs.plane import open_session, step

Tasks = Callable[..., Task]


def slot_taken(client: EnvClient) -> contextlib.AbstractAsyncContextManager[ActionTiming]:
    """Takes the only `counting.step` slot for the time of a block, so that what comes must queue."""
    return client.lease("counting.step", "blocker", key=0.0, progress=Progress())


@pytest.mark.parametrize("environment", ["counting", "counting_sync"])
def test_a_session_runs_its_task_to_the_end(
    serve: Any, counting_task: Tasks, executions: Any, environment: str
) -> None:
    async def main() -> None:
        async with (
            serve(slots={f"{environment}.start": 1, f"{environment}.step": 1}) as address,
            EnvClient(address, job="test") as client,
        ):
            session, observation, timing = await open_session(client, counting_task("a", environment=environment))
            assert observation.messages[0].content == "count, please: a"
            assert timing.slot_class == f"{environment}.start"
            results = [await step(session, text) for text in ("one", "two", "three")]
            assert [result.observation.messages[0].content for result, _ in results] == ["1: one", "2: two", "3: three"]
            assert [result.reward for result, _ in results] == [0.0, 0.0, 1.0]
            assert [result.terminated for result, _ in results] == [False, False, True]
            await session.close()
            await session.close()

    asyncio.run(main())
    assert executions() == {"a 0": 1, "a 1": 1, "a 2": 1, "a 3": 1}


def test_timing_separates_waiting_from_holding(serve: Any, counting_task: Tasks) -> None:
    async def main() -> None:
        slots = {"counting.start": 2, "counting.step": 1}
        async with serve(slots=slots) as address, EnvClient(address, job="test") as client:
            sessions = [(await open_session(client, counting_task(name, step_s=0.5)))[0] for name in "ab"]
            (_, first), (_, second) = await asyncio.gather(*(step(session) for session in sessions))
            assert first.slot_class == second.slot_class == "counting.step"
            assert first.service_s >= 0.5
            assert second.service_s >= 0.5
            assert second.queue_s > 0.4  # it came a moment after the first, which held the only slot
            assert second.queue_s > first.queue_s + 0.3

    asyncio.run(main())


async def order_of_service(
    serve: Any, until: Any, counting_task: Tasks, keys: dict[str, float], new_keys: dict[str, float]
) -> list[str]:
    """Which of several actions run first when they wait with `keys`, changed to `new_keys`, for one taken slot."""
    slots = {"counting.start": 5, "counting.step": 1}
    async with serve(slots=slots) as address, EnvClient(address, job="test") as client:
        sessions = {name: (await open_session(client, counting_task(name)))[0] for name in keys}
        order: list[str] = []

        async def run(name: str, key: float) -> None:
            await step(sessions[name], key=key)
            order.append(name)

        async with asyncio.TaskGroup() as tasks, slot_taken(client):
            for name, key in keys.items():
                tasks.create_task(run(name, key))
            await until(address, lambda report: report.slots["counting.step"].waiting == len(keys))
            if new_keys:
                client.rekey(new_keys)
        return order


def test_waiting_actions_go_by_key(serve: Any, until: Any, counting_task: Tasks) -> None:
    keys = {"b": 3.0, "c": 1.0, "d": 2.0}
    assert asyncio.run(order_of_service(serve, until, counting_task, keys, {})) == ["c", "d", "b"]


@pytest.mark.parametrize(
    ("payload", "kind", "message"),
    [
        ({"refuse": "no such task"}, "refused", "no such task"),
        ({"raise_in": 0}, "raised", "RuntimeError: told to raise in action 0"),
        ({"raise_in": 1}, "raised", "RuntimeError: told to raise in action 1"),
    ],
)
@pytest.mark.parametrize("environment", ["counting", "counting_sync"])
def test_a_failing_environment_is_a_typed_failure_and_costs_only_its_session(
    serve: Any, until: Any, counting_task: Tasks, environment: str, payload: dict[str, Any], kind: str, message: str
) -> None:
    async def main() -> None:
        slots = {f"{environment}.start": 1, f"{environment}.step": 1}
        async with serve(slots=slots) as address, EnvClient(address, job="test") as client:
            good, _, _ = await open_session(client, counting_task("good", environment=environment))

            async def fail() -> None:
                bad, _, _ = await open_session(client, counting_task("bad", environment=environment, **payload))
                await step(bad)

            with pytest.raises(EnvironmentFailure) as failure:
                await fail()
            assert (failure.value.kind, failure.value.retryable, str(failure.value)) == (kind, False, message)
            await step(good)
            await good.close()
            await until(address, lambda report: not any(slot.running for slot in report.slots.values()))

    asyncio.run(main())


def test_a_step_after_a_failure_says_that_the_session_is_gone(serve: Any, counting_task: Tasks) -> None:
    async def main() -> None:
        async with serve() as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, counting_task("a", raise_in=1))
            for kind in ("raised", "unknown_session"):
                with pytest.raises(EnvironmentFailure) as failure:
                    await step(session)
                assert failure.value.kind == kind

    asyncio.run(main())


def test_an_unknown_environment_is_refused_with_the_nearest_name(serve: Any) -> None:
    async def main() -> None:
        async with serve() as address, EnvClient(address, job="test") as client:
            with pytest.raises(EnvironmentFailure, match="did you mean 'counting'") as failure:
                await open_session(client, Task(task_id="a", environment="countin"))
            assert failure.value.kind == "refused"

    asyncio.run(main())


def test_nobody_at_the_address_is_an_error_after_the_stated_time() -> None:
    async def main() -> None:
        client = EnvClient("tcp://127.0.0.1:9", job="test", connect_timeout_s=0.5)
        started = time.monotonic()
        with pytest.raises(EnvironmentUnreachable, match=r"tcp://127\.0\.0\.1:9 within 0\.5 s"):
            await client.connect()
        assert 0.5 <= time.monotonic() - started < 3.0
        with pytest.raises(EnvironmentUnreachable, match="use tcp://host:port"):
            await EnvClient("nonsense", job="test").connect()
        with pytest.raises(EnvironmentUnreachable):
            await status("tcp://127.0.0.1:9", timeout_s=0.3)

    asyncio.run(main())


def test_a_server_that_is_gone_is_unreachable_after_a_lease(serve: Any, counting_task: Tasks) -> None:
    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with serve() as address:
                client = await stack.enter_async_context(EnvClient(address, job="test", lease_s=2.0))
                session, _, _ = await open_session(client, counting_task("a", step_s=60.0))
                running = asyncio.create_task(step(session))
                await asyncio.sleep(0.5)
            for lost in (running, asyncio.create_task(step(session))):
                with pytest.raises(EnvironmentFailure) as failure:
                    await asyncio.wait_for(lost, 8.0)
                # A server that ends in order may still say that the step was cut short.
                assert failure.value.kind in {"unreachable", "unknown_outcome", "unknown_session"}
            assert failure.value.kind == "unreachable"

    asyncio.run(main())


def test_one_client_object_works_in_several_loops_in_sequence(serve: Any, counting_task: Tasks) -> None:
    async def use(client: EnvClient, name: str) -> str:
        async with client:
            session, observation, _ = await open_session(client, counting_task(name))
            await session.close()
            return observation.messages[0].content

    async def main() -> list[str]:
        async with serve() as address:
            client = EnvClient(address, job="test")
            return [await asyncio.to_thread(lambda name=name: asyncio.run(use(client, name))) for name in "ab"]

    assert asyncio.run(main()) == ["count, please: a", "count, please: b"]


@pytest.mark.parametrize(("environment", "step_s"), [("counting", 60.0), ("counting_sync", 1.0)])
def test_cancelling_a_running_step_frees_slot_and_session(
    serve: Any, until: Any, counting_task: Tasks, environment: str, step_s: float
) -> None:
    async def main() -> None:
        slots = {f"{environment}.start": 1, f"{environment}.step": 1}
        async with serve(slots=slots) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, counting_task("a", environment=environment, step_s=step_s))
            running = asyncio.create_task(step(session))
            await until(address, lambda report: report.slots[f"{environment}.step"].running == 1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await until(
                address,
                lambda report: report.slots[f"{environment}.step"].running == 0 and report.sessions == 0,
            )

    asyncio.run(main())


def test_cancelling_a_waiting_step_means_that_it_never_runs(
    serve: Any, until: Any, counting_task: Tasks, executions: Any
) -> None:
    async def main() -> None:
        slots = {"counting.start": 2, "counting.step": 1}
        async with serve(slots=slots) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, counting_task("a"))
            other, _, _ = await open_session(client, counting_task("b"))
            async with slot_taken(client):
                waiting = asyncio.create_task(step(session))
                await until(address, lambda report: report.slots["counting.step"].waiting == 1)
                waiting.cancel()
                await asyncio.wait([waiting])
                await until(address, lambda report: report.sessions == 1)
            await step(other)

    asyncio.run(main())
    assert executions() == {"a 0": 1, "b 0": 1, "b 1": 1}


def test_cancelling_an_open_leaves_no_session(serve: Any, until: Any, counting_task: Tasks) -> None:
    async def main() -> None:
        slots = {"counting.start": 1, "counting.step": 1}
        async with serve(slots=slots) as address, EnvClient(address, job="test") as client:
            tasks = [asyncio.create_task(open_session(client, counting_task(name, reset_s=5.0))) for name in "ab"]
            await until(address, lambda r: r.slots["counting.start"].running == r.slots["counting.start"].waiting == 1)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await until(
                address,
                lambda r: r.sessions == r.slots["counting.start"].running == r.slots["counting.start"].waiting == 0,
                within_s=8.0,
            )

    asyncio.run(main())


def test_closing_the_client_ends_its_sessions_and_pending_requests(
    serve: Any, until: Any, counting_task: Tasks
) -> None:
    async def main() -> None:
        async with serve() as address:
            async with EnvClient(address, job="test") as client:
                session, _, _ = await open_session(client, counting_task("a", step_s=30.0))
                running = asyncio.create_task(step(session))
                await until(address, lambda report: report.slots["counting.step"].running == 1)
            with pytest.raises(EnvironmentFailure) as failure:
                await running
            assert failure.value.kind == "cancelled"
            await until(
                address,
                lambda r: r.sessions == r.clients == r.slots["counting.step"].running == 0,
                within_s=8.0,
            )

    asyncio.run(main())


def test_a_request_that_takes_too_long_fails_as_timeout_and_frees_its_slot(
    serve: Any, until: Any, counting_task: Tasks
) -> None:
    async def main() -> None:
        slots = {"counting.start": 2, "counting.step": 1}
        # The one that waits has the earlier deadline: were both the same, the first's end would free its slot in time.
        async with (
            serve(slots=slots) as address,
            EnvClient(address, job="test", request_timeout_s=4.0) as client,
            EnvClient(address, job="test", request_timeout_s=1.0) as hurried,
        ):
            session, _, _ = await open_session(client, counting_task("a", step_s=30.0))
            other, _, _ = await open_session(hurried, counting_task("b", step_s=0.0))
            running = asyncio.create_task(step(session))
            await until(address, lambda report: report.slots["counting.step"].running == 1)
            with pytest.raises(EnvironmentFailure) as waited:
                await asyncio.gather(step(other))
            assert (waited.value.kind, waited.value.retryable) == ("timeout", True)
            with pytest.raises(EnvironmentFailure) as ran:
                await running
            assert (ran.value.kind, ran.value.retryable) == ("timeout", False)
            await until(address, lambda report: report.slots["counting.step"].running == 0, within_s=8.0)

    asyncio.run(main())


def test_a_step_longer_than_the_environments_limit_fails_as_timeout(serve: Any, counting_task: Tasks) -> None:
    async def main() -> None:
        environments = {"counting": {"step_timeout_s": 0.3}}
        async with serve(environments=as_config(environments)) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, counting_task("a", step_s=30.0))
            with pytest.raises(EnvironmentFailure, match=r"did not answer within 0\.\d s") as failure:
                await step(session)
            assert failure.value.kind == "timeout"

    asyncio.run(main())


def test_injected_latency_counts_as_holding_the_slot(serve: Any, counting_task: Tasks) -> None:
    async def main() -> None:
        latency = {"median_s": 0.4, "sigma": 0.0, "cap_s": 1.0, "seed": 1}
        environments = as_config({"counting": {"latency": latency}})
        async with serve(environments=environments) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, counting_task("a"))
            _, timing = await step(session)
            assert 0.4 <= timing.service_s < 1.2

    asyncio.run(main())


def test_a_full_queue_is_waited_for(serve: Any, counting_task: Tasks, executions: Any) -> None:
    async def main() -> None:
        slots = {"counting.start": 8, "counting.step": 1}
        async with serve(slots=slots, max_queued=2) as address, EnvClient(address, job="test") as client:
            sessions = [(await open_session(client, counting_task(f"t{n}", step_s=0.2)))[0] for n in range(6)]
            await asyncio.gather(*(step(session) for session in sessions))
            assert (await client.status()).counters["busy"] > 0

    asyncio.run(main())
    assert set(executions().values()) == {1}


def test_too_large_a_request_fails_before_it_is_sent(serve: Any, counting_task: Tasks) -> None:
    async def main() -> None:
        async with serve(max_frame_bytes=10_000) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, counting_task("a"))
            with pytest.raises(EnvironmentFailure, match="10000") as failure:
                await step(session, "x" * 20_000)
            assert failure.value.kind == "protocol"

    asyncio.run(main())


@pytest.mark.parametrize("value_s", [0.0, -1.0, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("setting", ["lease_s", "connect_timeout_s", "request_timeout_s"])
def test_a_time_that_no_server_accepts_is_refused_at_once(setting: str, value_s: float) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is {re.escape(str(value_s))}; it must be above 0"):
        EnvClient("tcp://127.0.0.1:1", job="test", **{setting: value_s})  # type: ignore[arg-type]
    EnvClient("tcp://127.0.0.1:1", job="test", **{setting: 1e9})  # type: ignore[arg-type]


@pytest.mark.parametrize("job", ["j" * 513, "\ud800"])
def test_a_job_name_that_no_server_accepts_is_refused_at_once(job: str) -> None:
    with pytest.raises(ConfigError, match="job is"):
        EnvClient("tcp://127.0.0.1:1", job=job)
    EnvClient("tcp://127.0.0.1:1", job="j" * 512)


def test_a_request_that_cannot_be_encoded_or_understood_fails_alone(serve: Any, counting_task: Tasks) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)

    async def main() -> None:
        slots = {"counting.start": 1, "counting.step": 1, "a.tool": 1}
        async with serve(slots=slots) as address, EnvClient(address, job="test") as client, asyncio.timeout(20):
            session, _, _ = await open_session(client, counting_task("good"))

            async def lease(hold_s: float) -> None:
                async with client.lease("a.tool", "t", key=0.0, progress=Progress(), hold_s=hold_s):
                    pass

            for work, message in (
                (open_session(client, counting_task("a", number=2**64)), "cannot be encoded: "),
                (open_session(client, counting_task("a", thing=object())), "cannot be encoded: "),
                (open_session(client, counting_task("a", cyclic=cyclic)), "cannot be encoded: "),
                (open_session(client, counting_task("\ud800")), "cannot be encoded: "),
                (step(session, "\ud800"), "cannot be encoded: "),
                (lease(float("inf")), r"not a request of version 1: Expected `float` <= 1000000000\.0"),
            ):
                with pytest.raises(EnvironmentFailure, match=message) as failure:
                    await work
                assert failure.value.kind == "protocol"
            await step(session)
            await lease(1e9)

    asyncio.run(main())


DEAD_CLIENT = """
import asyncio, sys
from makespan.envs.client import EnvClient
from makespan.rollout.environment import Action
from makespan.rollout.trajectory import Progress, Task

async def main():
    client = EnvClient(sys.argv[1], job="dead", lease_s=2.0)
    await client.connect()
    task = Task(task_id="a", environment="counting", payload={"step_s": 60.0})
    session, _, _ = await client.open("a", task, key=0.0, progress=Progress())
    await session.step(Action("go"), key=0.0, progress=Progress())

asyncio.run(main())
"""


def test_a_killed_clients_slots_and_sessions_come_back_within_its_lease(serve: Any, until: Any) -> None:
    async def main() -> None:
        async with serve() as address:
            client = await asyncio.create_subprocess_exec(sys.executable, "-c", DEAD_CLIENT, address)
            try:
                await until(address, lambda report: report.slots["counting.step"].running == 1, within_s=20.0)
                await asyncio.sleep(3.0)  # it renews: after more than its lease everything is still there
                report = await status(address)
                assert (report.sessions, report.clients) == (1, 1)
            finally:
                client.kill()
                await client.wait()
            report = await until(address, lambda r: r.sessions == 0, within_s=6.0)  # the lease is 2 s
            assert report.slots["counting.step"].running == report.clients == 0
            assert report.counters["clients_expired"] == 1

    asyncio.run(main())


def as_config(environments: dict[str, Any]) -> Any:
    import msgspec

    from makespan.envs.config import EnvironmentConfig

    return msgspec.convert(environments, dict[str, EnvironmentConfig])


def test_a_lease_gates_a_tool_that_runs_here(serve: Any, until: Any) -> None:
    async def main() -> None:
        async with serve(slots={"search.tool": 1}) as address, EnvClient(address, job="test") as client:
            order = []
            go_on = asyncio.Event()

            async def search(name: str, key: float) -> None:
                async with client.lease("search.tool", name, key=key, progress=Progress()) as timing:
                    order.append(name)
                    assert timing.slot_class == "search.tool"
                    await go_on.wait()

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(search("first", 0.0))
                await until(address, lambda report: report.slots["search.tool"].running == 1)
                for name, key in (("late", 2.0), ("soon", 1.0)):
                    tasks.create_task(search(name, key))
                await until(address, lambda report: report.slots["search.tool"].waiting == 2)
                go_on.set()
            assert order == ["first", "soon", "late"]
            await until(address, lambda report: report.slots["search.tool"].running == 0)
            with pytest.raises(EnvironmentFailure, match="did you mean 'search"):
                async with client.lease("serch.tool", "x", key=0.0, progress=Progress()):
                    pass

    asyncio.run(main())


def test_an_expired_lease_is_counted_for_its_tool_may_still_run(serve: Any, until: Any) -> None:
    async def main() -> None:
        async with serve(slots={"search.tool": 1}) as address, EnvClient(address, job="test") as client:
            async with client.lease("search.tool", "a", key=0.0, progress=Progress(), hold_s=0.3):
                await until(address, lambda report: report.slots["search.tool"].running == 0)
                assert (await client.status()).counters["leases_expired"] == 1

    asyncio.run(main())


def test_new_keys_reorder_what_waits(serve: Any, until: Any, counting_task: Tasks) -> None:
    order = order_of_service(serve, until, counting_task, {"b": 1.0, "c": 2.0}, {"c": 0.5, "nobody": 0.0})
    assert asyncio.run(order) == ["c", "b"]


def test_the_synchronous_face_runs_a_task_and_leaves_no_thread(serve: Any, counting_task: Tasks) -> None:
    def use(address: str) -> list[str]:
        with SyncEnvClient(address, job="test") as client:
            session, observation = client.open("t", counting_task("t"))
            said = [observation.messages[0].content]
            said += [session.step(text).observation.messages[0].content for text in ("one", "two")]
            assert client.status().sessions == 1
            session.close()
            with pytest.raises(EnvironmentFailure, match="no thanks"):
                client.open("u", counting_task("u", refuse="no thanks"))
        assert not [thread for thread in threading.enumerate() if thread.name == "environment client"]
        return said

    async def main() -> list[str]:
        async with serve() as address:
            return await asyncio.to_thread(use, address)

    assert asyncio.run(main()) == ["count, please: t", "1: one", "2: two"]
