"""Engines that sleep while they wait: the setting, and what an engine core does meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from makespan.integrations.vllm_plugin import RECHECK_MS, register, sleeping, spin_seconds
from makespan.rollout.errors import ConfigError
from makespan.rollout.replicas.base import Request, Sampling


class Condition:
    busy_loop_s = 1.0


def test_it_spins_as_long_as_it_is_told_and_sleeps_no_longer_than_until_the_next_look():
    calls = []
    wait = sleeping(lambda condition, timeout_ms: calls.append((condition.busy_loop_s, timeout_ms)), 0.25)
    for timeout_ms in (None, 1, 60_000):
        wait(Condition(), timeout_ms)
    assert calls == [(0.25, RECHECK_MS), (0.25, 1), (0.25, RECHECK_MS)]


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ConfigError, match="MAKESPAN_VLLM_SPIN_S must be seconds"):
        spin_seconds(text)


def test_without_the_variable_vllm_is_left_alone(monkeypatch):
    monkeypatch.delenv("MAKESPAN_VLLM_SPIN_S", raising=False)
    import vllm.distributed.device_communicators.shm_broadcast as shm

    before = shm.SpinCondition.wait
    register()
    assert shm.SpinCondition.wait is before


def wants_a_core(pid: int) -> bool:
    """Whether a process computes, or would if it had a core."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


def processes(parent: int, name: str) -> list[int]:
    """Descendants of a process with a name that begins so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = path.read_text().rpartition(")")
        except OSError:  # ended meanwhile
            continue
        if int(tail.split()[1]) == parent:
            pid = int(path.parent.name)
            if head.partition("(")[2].startswith(name):
                found.append(pid)
            found += processes(pid, name)
    return found


@pytest.mark.vllm
def test_an_engine_core_sleeps_while_its_worker_computes(engines, on_loop):
    """Spinning, it would want a core all the time; seen to fail with a spin of a second."""
    replica = engines["uncached"]
    host = replica._process.pid
    (core,), (worker,) = processes(host, "VLLM::Engine"), processes(host, "VLLM::Worker")
    looks: list[tuple[bool, bool]] = []

    async def generate() -> None:
        for turn in range(8):
            prompt = [3 + (7 * i + turn) % 300 for i in range(1_500)]
            name, sampling = f"long-{turn}", Sampling(max_tokens=1, min_tokens=1)
            await replica.generate(
                Request(request_id=name, trajectory_id=name, turn=0, prompt_ids=prompt, sampling=sampling)
            )

    async def look() -> None:
        generating = asyncio.create_task(generate())
        while not generating.done():
            looks.append((wants_a_core(core), wants_a_core(worker)))
            await asyncio.sleep(0.01)
        await generating

    on_loop(look())
    computing = [core_too for core_too, worker_too in looks if worker_too]
    assert len(computing) > 30
    assert sum(computing) < len(computing) / 2
