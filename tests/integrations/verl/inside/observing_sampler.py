"""Samplers of the test runs: they write down each training batch and ask the replicas what they compute.

Everything goes to the directory in `OBSERVED`: `batch-<step>.json` with the rows as the trainer gets them,
`probe-<step>.json` with each replica's log-probabilities of a fixed prompt, `segments-<step>.json` with the names of
vLLM's shared memory, `router-<step>.json` and `coordinator-<step>.json` with what these say of themselves.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import ray
import transfer_queue as tq

from makespan.integrations.verl.sampler import MakespanReplayBuffer

PROBE_IDS = [random.Random(7).randrange(4, 1024) for _ in range(200)]
"""A fixed prompt, longer than a chunk of the Mamba layers."""


class ObservingReplayBuffer(MakespanReplayBuffer):
    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        directory = Path(os.environ["OBSERVED"])
        (directory / f"batch-{global_steps}.json").write_text(json.dumps(_rows(batch)))
        (directory / f"probe-{global_steps}.json").write_text(json.dumps(_probe()))
        (directory / f"segments-{global_steps}.json").write_text(json.dumps(_shared_memory_of_vllm()))
        (directory / f"coordinator-{global_steps}.json").write_text(json.dumps(_coordinator_status(wait_s=10.0)))
        return batch, metrics


class CoordinatorKillingReplayBuffer(ObservingReplayBuffer):
    """In step 2 the coordinator dies while trajectories run."""

    killed = False

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        second_step = any(self.prompt_global_steps["train"][group] == 2 for group in self.running_keys[partition_id])
        if second_step and not self.killed:
            status = _coordinator_status()
            if status is not None and status["running"]:
                self.killed = True
                (Path(os.environ["OBSERVED"]) / "coordinator-killed.json").write_text(json.dumps(status))
                ray.kill(_coordinator())
        return super()._wait_for_next_poll(partition_id, last_debug_time)


class WorkerKillingReplayBuffer(ObservingReplayBuffer):
    """In step 2 one agent-loop worker dies while turns of its trajectories are at the replicas."""

    killed = ""

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        second_step = any(self._step_of(group) == 2 for group in self.running_keys[partition_id])
        # Each of the two workers has four trajectories, so that of five turns in flight one is the victim's.
        if second_step and not self.killed and self._router_status()["total_inflight"] >= 5:
            self.killed = next(name for name in ray.util.list_named_actors() if name.startswith("agent_loop_worker_1"))
            ray.kill(ray.get_actor(self.killed))
            self._settings = msgspec.structs.replace(self._settings, deadline_s=15.0)
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def _step_of(self, group: str) -> int:
        return int(self.prompt_global_steps["train"][group])

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if self.killed:
            time.sleep(6)  # longer than the router's SWEEP_INTERVAL_S
        (Path(os.environ["OBSERVED"]) / f"router-{global_steps}.json").write_text(json.dumps(self._router_status()))
        return batch, metrics

    def _router_status(self) -> dict[str, Any]:
        trainer = self.refill_fn.__self__
        status: dict[str, Any] = ray.get(trainer.llm_server_manager.global_load_balancer.get_status.remote())
        return status


def _coordinator() -> Any:
    names = [name for name in ray.util.list_named_actors() if name.startswith("makespan-coordinator/")]
    return ray.get_actor(names[0])


def _coordinator_status(wait_s: float = 0.0) -> dict[str, Any] | None:
    """What the coordinator says of itself; None while there is none."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            status: dict[str, Any] = ray.get(_coordinator().status.remote(), timeout=10)
            return status
        except (IndexError, ValueError, ray.exceptions.RayError):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.2)


def _rows(batch: Any) -> list[dict[str, Any]]:
    fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "extra_fields"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    rows = []
    for i, key in enumerate(batch.keys):
        extra = data["extra_fields"][i]
        rows.append(
            {
                "key": key,
                **{name: data[name][i].tolist() for name in fields[:-1]},
                "makespan": getattr(extra, "data", extra)["makespan"],
            }
        )
    return rows


def _shared_memory_of_vllm() -> list[str]:
    """Named segments that this run's vLLM processes have open."""
    mark = f"VERL_CPU_OUT={os.environ['VERL_CPU_OUT']}".encode()
    segments = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                lines = (process / "maps").read_text().splitlines()
                segments |= {line.split()[-1] for line in lines if "/dev/shm/psm_" in line}
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return sorted(segments)


def _probe() -> dict[str, list[float]]:
    """Log-probabilities of `PROBE_IDS[1:]`, by replica."""
    answers = {}
    for name in sorted(name for name in ray.util.list_named_actors() if name.startswith("vllm_server_")):
        output = ray.get(
            ray.get_actor(name).generate.remote(
                prompt_ids=PROBE_IDS,
                sampling_params={"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0},
                request_id=f"probe-{time.monotonic_ns()}",
            )
        )
        answers[name] = [entry[0] for entry in output.extra_fields["prompt_logprobs"][:-1]]
    return answers
