"""What a run decides before anything is started: hosts, cores and GPUs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from makespan.commands import hosts
from makespan.rollout.config import ReplicasConfig, RunConfig
from makespan.rollout.errors import ConfigError
from makespan.rollout.replicas import vllm


def config(count: int) -> RunConfig:
    return msgspec.structs.replace(RunConfig(), replicas=ReplicasConfig(count=count))


def test_without_gpus_each_replica_has_cores(monkeypatch):
    monkeypatch.setattr(hosts, "visible_gpus", list)
    made = hosts.host_configs(config(2), Path("model"))
    assert [host.gpu for host in made.values()] == [None, None]
    assert all(host.cores for host in made.values())
    assert {host.kv_cache_bytes for host in made.values()} == {2**30}


def test_with_gpus_each_replica_has_one_of_its_own(monkeypatch):
    monkeypatch.setattr(hosts, "visible_gpus", lambda: ["2", "5", "7"])
    made = hosts.host_configs(config(2), Path("model"))
    assert [(host.gpu, host.cores) for host in made.values()] == [("2", ()), ("5", ())]
    with pytest.raises(ConfigError, match=r"replicas.count is 4, and 3 GPUs are visible: --set replicas.count=3"):
        hosts.host_configs(config(4), Path("model"))


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [(None, ["0", "1"]), ("1", ["1"]), ("GPU-ab, GPU-cd", ["GPU-ab", "GPU-cd"]), ("", []), ("-1", [])],
)
def test_gpus_are_those_that_the_environment_allows(monkeypatch, tmp_path, allowed, expected):
    for name in ("nvidia1", "nvidia0", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(vllm, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    assert vllm.visible_gpus() == expected


def test_a_machine_without_devices_has_no_gpu_whatever_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setattr(vllm, "DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert vllm.visible_gpus() == []
