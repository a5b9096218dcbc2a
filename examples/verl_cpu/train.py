"""A real verl training run on the CPU, in one command: `python train.py [--out DIRECTORY] [verl's overrides ...]`.

Builds the model and the dataset, starts an environment server with BFCL tasks, runs `verl.trainer.main_ppo` with
`grpo.yaml` under a time limit, prints the makespan figures of each step, and leaves no process behind. The output
directory then holds `metrics.jsonl` (each step's log), `verl.log`, `wandb/` (offline), `environment.jsonl` (the
environment server's event log), and checkpoints if asked for.

    python train.py trainer.total_training_steps=3
    python train.py trainer.n_gpus_per_node=2                  # two training ranks and two vLLM replicas
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import prepare

from makespan.envs.config import EnvironmentConfig, ServerConfig
from makespan.envs.spawn import spawn_server
from makespan.integrations.verl import router_config

HERE = Path(__file__).resolve().parent

RUN_MARK = "MAKESPAN_VERL_CPU_RUN"
"""An environment variable that all processes of a run inherit, by which those that outlive it are found."""

LOOK_EVERY_S = 3.0
"""How often a running verl is looked at: whether it ended, and what shared memory it uses."""

SHOWN = (
    ("timing_s/step", "step, s"),
    ("makespan/makespan_s", "makespan, s"),
    ("makespan/completion_s/p50", "completion p50, s"),
    ("makespan/slowest/generate_s", "slowest: generate, s"),
    ("makespan/slowest/slot_queue_s", "slowest: slot queue, s"),
    ("makespan/slowest/environment_s", "slowest: environment, s"),
    ("makespan/slowest/other_s", "slowest: other, s"),
    ("makespan/trajectories/total", "trajectories"),
    ("makespan/trajectories/failed", "failed"),
    ("makespan/tokens/prompt", "prompt tokens"),
    ("makespan/tokens/cached", "cached"),
    ("makespan/tokens/recomputed", "recomputed"),
    ("critic/score/mean", "score"),
    ("training/rollout_actor_probs_pearson_corr", "rollout/actor correlation"),
)
"""Metrics of verl's log that are printed, and what they are called there."""


async def train(out: Path, overrides: list[str], *, environment: str, loops: Path, limit_s: float) -> int:
    """One run; verl's exit code, or 124 when it took longer than `limit_s`."""
    prepare.write(out / "data")
    server = ServerConfig(
        slots={"bfcl.start": 4, "bfcl.step": 4},
        environments={"bfcl": EnvironmentConfig(factory=environment)},
        event_log=str(out / "environment.jsonl"),
    )
    async with spawn_server(server, log_path=out / "environment.log") as address:
        with tempfile.TemporaryDirectory(prefix="vc-") as ray_directory:  # a short path: Ray puts sockets below it
            variables = {
                **os.environ,
                RUN_MARK: uuid.uuid4().hex,
                "MAKESPAN_ENVIRONMENT": address,
                "VERL_CPU_OUT": str(out),
                "VERL_CPU_HERE": str(HERE),
                "VERL_CPU_ROUTER": str(router_config()),
                "VERL_CPU_AGENT_LOOPS": str(loops),
                "VERL_PLATFORM": "cpu",
                "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
                "VERL_FILE_LOGGER_PATH": str(out / "metrics.jsonl"),
                "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
                "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
                "RAY_TMPDIR": ray_directory,
                "RAY_USAGE_STATS_ENABLED": "0",
                "WANDB_MODE": os.environ.get("WANDB_MODE", "offline"),
                "WANDB_DIR": str(out),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "MAKESPAN_VLLM_SPIN_S": "0.002",  # replica and trainer share the cores
            }
            return await asyncio.to_thread(_run_verl, out, overrides, variables, limit_s)


def _run_verl(out: Path, overrides: list[str], variables: dict[str, str], limit_s: float) -> int:
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(HERE), "--config-name", "grpo"]
    with (out / "verl.log").open("wb") as log:
        verl = subprocess.Popen(
            command + overrides, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        segments: set[Path] = set()
        deadline_s = time.monotonic() + limit_s
        try:
            while time.monotonic() < deadline_s:
                try:
                    return verl.wait(LOOK_EVERY_S)
                except subprocess.TimeoutExpired:
                    segments |= _shared_memory_of(variables[RUN_MARK])
            return 124
        finally:
            _kill_group(verl)
            for pid in _processes_of(variables[RUN_MARK]):
                _kill(pid)
            for segment in segments:
                segment.unlink(missing_ok=True)


def _shared_memory_of(mark: str) -> set[Path]:
    """Named segments that processes of this run have open: Ray kills vLLM, which then does not remove its own."""
    found = set()
    for pid in _processes_of(mark):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {Path(line.split()[-1]) for line in lines if "/dev/shm/" in line and line.split()[-1] != "(deleted)"}
    return found


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _processes_of(mark: str) -> Iterator[int]:
    """Processes whose environment holds this run's mark: Ray's and vLLM's make sessions of their own."""
    expected = f"{RUN_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if expected in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue


def _print_steps(metrics: Path) -> None:
    """A table of the steps: a metric a line, a step a column."""
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if steps:
        print(" " * 26 + "".join(f"{'step ' + format(step['training/global_step'], '.0f'):>11}" for step in steps))
    for name, label in SHOWN:
        if any(name in step for step in steps):
            values = (_number(step[name]) if name in step else "-" for step in steps)
            print(f"{label:26}" + "".join(f"{value:>11}" for value in values))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/verl_cpu"), help="where the run is written")
    parser.add_argument("--environment", default="bfcl", help="a bundled environment's name, or module:attribute")
    parser.add_argument("--agent-loops", type=Path, default=HERE / "agent_loops.yaml", help="the agent-loop YAML")
    parser.add_argument("--limit-s", type=float, default=600.0, help="kill the run after this time")
    arguments, overrides = parser.parse_known_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for left_over in ("metrics.jsonl", "environment.jsonl"):
        (out / left_over).unlink(missing_ok=True)
    shutil.rmtree(out / "checkpoints", ignore_errors=True)
    code = asyncio.run(
        train(
            out,
            overrides,
            environment=arguments.environment,
            loops=arguments.agent_loops.resolve(),
            limit_s=arguments.limit_s,
        )
    )
    _print_steps(out / "metrics.jsonl")
    if code:
        print(f"verl ended with code {code}; see {out / 'verl.log'}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
