"""Two real verl runs, made once and looked at by many tests.

`one_rank`: four GRPO steps with one training rank and one replica, and of each step's eight trajectories five at once,
under parking and with a router that knows the replica's memory. The weight sync after step 3 is lost on purpose, so the
fourth step is the negative control of the weight checks; in its second step the coordinator is killed.
`two_ranks`: two steps with two ranks, two replicas and two agent-loop workers, of which one is killed in the second
step. Each run has an outer time limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from makespan.integrations.verl import router_config

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[2] / "examples" / "verl_cpu"
LIMIT_S = 480.0
AT_ONCE = 5
MEMORY = {"num_blocks": 4_000, "block_tokens": 128}
"""More than the trajectories fill: nobody is parked, but everybody asks."""


@dataclass(frozen=True)
class TrainerRun:
    """What a run left behind."""

    directory: Path
    exit_code: int
    output: str

    def steps(self) -> dict[int, dict[str, float]]:
        """verl's own log, by step."""
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return {entry["step"]: entry["data"] for entry in map(json.loads, lines)}

    def observed(self, what: str, step: int | str) -> Any:
        return json.loads((self.directory / "observed" / f"{what}-{step}.json").read_text())

    def environment_records(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.directory / "record").glob("*.json"))]

    def weights_of_rollout(self, step: int) -> Path:
        """The trainer's own weights that step `step` generates with: what it saved after the step before."""
        if step == 1:
            return self.directory / "data" / "model"
        return self.directory / "checkpoints" / f"global_step_{step - 1}" / "actor" / "huggingface"


def _run(directory: Path, sampler: str, *overrides: str, **variables: str) -> TrainerRun:
    for name in ("observed", "record"):
        (directory / name).mkdir()
    inside = HERE / "inside"
    completed = subprocess.run(
        [
            sys.executable,
            str(EXAMPLE / "train.py"),
            f"--out={directory}",
            "--environment=recording_environment:RecordingBfcl",
            f"--limit-s={LIMIT_S}",
            f"trainer.v1.sampler.custom_sampler.path={inside / 'observing_sampler.py'}",
            f"trainer.v1.sampler.custom_sampler.name={sampler}",
            "actor_rollout_ref.actor.optim.lr=4e-3",  # so large that one lost weight sync is far above the noise
            *overrides,
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(inside), os.environ.get("PYTHONPATH")))),
            "OBSERVED": str(directory / "observed"),
            "ENVIRONMENT_RECORD": str(directory / "record"),
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S + 60,
    )
    return TrainerRun(directory, completed.returncode, completed.stdout)


def _with_admission(directory: Path) -> list[str]:
    """Copies of the example's agent loop and of our router's YAML with admission and a memory."""
    (loop,) = yaml.safe_load((EXAMPLE / "agent_loops.yaml").read_text())
    loop["admission"] = {"policy": "parking", "concurrency": AT_ONCE, "memory": MEMORY, "replicas": 1}
    router = yaml.safe_load(router_config().read_text()) | {"memory": MEMORY}
    (directory / "loops.yaml").write_text(yaml.safe_dump([loop]))
    (directory / "router.yaml").write_text(yaml.safe_dump(router))
    return [
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={directory / 'loops.yaml'}",
        f"actor_rollout_ref.rollout.router_config_path={directory / 'router.yaml'}",
    ]


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> TrainerRun:
    return _run(
        tmp_path_factory.mktemp("one-rank"),
        "CoordinatorKillingReplayBuffer",
        *_with_admission(tmp_path_factory.mktemp("settings")),
        "trainer.total_training_steps=4",
        "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05",
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=losing_worker.LosingWeightSync",
        LOSE_SYNC="3",
    )


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> TrainerRun:
    return _run(
        tmp_path_factory.mktemp("two-ranks"),
        "WorkerKillingReplayBuffer",
        "trainer.total_training_steps=2",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "+trainer.v1.sampler.sampler_kwargs.poll_interval_s=0.05",
        "trainer.save_freq=1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
    )
