"""What an environment does wrong costs its own session, and nothing else on the worker."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from makespan.envs.client import EnvClient
from makespan.envs.config import EnvironmentConfig, WorkerConfig, check_worker
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.errors import ConfigError
from makespan.rollout.trajectory import Task
from tests.envs.plane import open_session, step

HOSTED = {
    "loop": EnvironmentConfig(factory="tests.envs.troublemakers:AsyncRaiser"),
    "thread": EnvironmentConfig(factory="tests.envs.troublemakers:Raiser"),
    "process": EnvironmentConfig(factory="tests.envs.troublemakers:Raiser", execution="process"),
}
UNENCODABLE = "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800' in position 0: surrogates not allowed"
NOT_FINITE = "the environment's reward is {}, it must be a finite number"
EXPECTED = {
    "surrogate": "ValueError: half a pair: \\ud800",
    "mute": "Mute: (its text cannot be shown: LookupError)",
    "interrupt": "KeyboardInterrupt: now",
    "panic": "Panic: poisoned",
    "cancelled": "CancelledError: by itself",
    "content": UNENCODABLE,
    "info": UNENCODABLE,
    "nan": NOT_FINITE.format("nan"),
    "inf": NOT_FINITE.format("inf"),
    "-inf": NOT_FINITE.format("-inf"),
}
EXHAUSTED = {
    "loop": "RuntimeError: coroutine raised StopIteration",  # Python's own words
    "thread": "RuntimeError: the environment raised StopIteration",
    "process": "StopIteration: over",
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server processes find the tests' modules."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.mark.parametrize("kind", list(HOSTED))
def test_whatever_an_environment_raises_or_gives_costs_only_its_session(serve: Any, until: Any, kind: str) -> None:
    task = Task(task_id="t", environment=kind)

    async def main() -> None:
        settings: dict[str, Any] = {
            "slots": {f"{kind}.start": 1, f"{kind}.step": 1},
            "environments": {kind: HOSTED[kind]},
        }
        async with serve(**settings) as address, EnvClient(address, job="test") as client, asyncio.timeout(60):
            bystander, _, _ = await open_session(client, task)
            pid = (await client.status()).workers[0].pid
            for action, message in (EXPECTED | {"exhausted": EXHAUSTED[kind]}).items():
                session, _, _ = await open_session(client, task)
                with pytest.raises(EnvironmentFailure) as failure:
                    await step(session, action)
                assert (failure.value.kind, str(failure.value)) == ("raised", message)
                with pytest.raises(EnvironmentFailure) as failure:
                    await step(session, "0")
                assert failure.value.kind == "unknown_session"
                await session.close()
            with pytest.raises(EnvironmentFailure) as failure:
                await open_session(client, Task(task_id="t", environment=kind, payload={"refuse": True}))
            assert (failure.value.kind, str(failure.value)) == ("refused", "no task \\ud800")
            for raised in ("interrupt", "panic", "cancelled", "exhausted"):
                closing = Task(task_id="t", environment=kind, payload={"close": raised})
                session, _, _ = await open_session(client, closing)
                await session.close()
            report = await until(address, lambda report: report.workers[0].sessions == 1)
            result, _ = await step(bystander, "0.5")
            assert (result.reward, report.workers[0].pid) == (0.5, pid)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"broker": "nonsense"}, "broker is 'nonsense'; it must be tcp://host:port"),
        ({"broker": "tcp://127.0.0.1:65536"}, "it must be tcp://host:port"),
        ({"environments": {}}, "environments is empty"),
        (
            {"environments": {"counting": EnvironmentConfig(step_timeout_s=float("nan"))}},
            "step_timeout_s is nan; it must",
        ),
        ({"environments": {"counting": EnvironmentConfig(memory_bytes=1 << 30)}}, "memory_bytes needs"),
        ({"environments": {"countign": EnvironmentConfig()}}, "did you mean 'counting'"),
        ({"beat_s": 0.0}, "beat_s is 0.0; it must be above 0"),
        ({"drain_timeout_s": float("inf")}, "drain_timeout_s is inf; it must be above 0 and at most 1e.09 seconds"),
        ({"max_frame_bytes": 1}, "max_frame_bytes is 1; it must be at least 1024"),
    ],
)
def test_a_worker_s_configuration_that_cannot_work_is_one_clear_error(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"broker": "tcp://127.0.0.1:65535", "environments": {"counting": EnvironmentConfig()}}
    check_worker(WorkerConfig(**good))
    with pytest.raises(ConfigError, match=message):
        check_worker(WorkerConfig(**(good | change)))


def test_a_broker_address_that_only_zeromq_refuses_is_one_clear_error_too() -> None:
    settings = '{"broker": "tcp://!:5", "environments": {"counting": {}}, "worker_id": "w"}'
    command = [sys.executable, "-m", "makespan.envs.worker_process", settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: worker 'w' cannot connect to broker 'tcp://!:5': Invalid argument")
