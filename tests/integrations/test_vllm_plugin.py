"""Engines that sleep while they wait: the setting, and what an engine core does meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from makespan.integrations.vllm_plugin import RECHECK_MS, register, sleeping, spin_seconds
from makespan.rollout.errors import ConfigError
from makespan.rollout.replicas.base import Request, Sampling

TICKS = os.sysconf("SC_CLK_TCK")


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


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


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
    """Spinning, it would take as much processor time as its worker; seen to fail with a spin of a second."""
    replica = engines["uncached"]
    host = replica._process.pid
    (core,), (worker,) = processes(host, "VLLM::Engine"), processes(host, "VLLM::Worker")
    before = cpu_seconds(core), cpu_seconds(worker)
    until_s = time.monotonic() + 3.0
    turn = 0
    while time.monotonic() < until_s:
        prompt = [3 + (7 * i + turn) % 300 for i in range(1_500)]
        sampling = Sampling(max_tokens=1, min_tokens=1)
        name = f"long-{turn}"
        request = Request(request_id=name, trajectory_id=name, turn=0, prompt_ids=prompt, sampling=sampling)
        on_loop(replica.generate(request))
        turn += 1
    core_s, worker_s = cpu_seconds(core) - before[0], cpu_seconds(worker) - before[1]
    assert worker_s > 1.0
    assert core_s < worker_s / 2
