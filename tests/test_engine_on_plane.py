"""The engine on a real environment server whose processes are killed under it; replicas are stand-ins.

The environment's own ledger counts what ran: no action runs twice, whatever is killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from pathlib import Path

from makespan.envs.client import EnvClient
from makespan.envs.server import ServerConfig
from makespan.envs.spawn import spawn_server
from makespan.rollout.admission import make_admission
from makespan.rollout.agent import ModelAgent
from makespan.rollout.conversation import Conversation
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.engine import RolloutEngine
from makespan.rollout.routing import StickyLeastInflight
from makespan.rollout.runner import Limits
from makespan.rollout.scheduling import action_policy
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.telemetry.merge import read_log
from makespan.rollout.trajectory import Task, TrajectoryResult

from .processes import descendants
from .rollout.fakes import END, CharacterTokenizer, RuleReplica

CHAINS, LENGTH, STEP_S = 6, 4, 0.3


def process_of(module: str) -> int:
    """A process of the environment server that this test process started."""
    for pid in descendants(os.getpid()):
        if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"no process runs {module}")


async def batch(tmp_path: Path, restarts: int, victim: str) -> list[TrajectoryResult]:
    """A batch in whose middle a process of the server is killed."""
    conversation = Conversation(CharacterTokenizer())
    replica = RuleReplica("replica-0", lambda _: [ord("x"), END], seconds=0.02)
    server = ServerConfig(slots={"counting.start": 4, "counting.step": 4})
    ledger = str(tmp_path / "ledger")
    payload = {"length": LENGTH, "step_s": STEP_S, "ledger": ledger}
    tasks = [Task(task_id=f"t{i}", environment="counting", payload=payload) for i in range(CHAINS)]
    with EventLog(tmp_path / "engine.jsonl", "engine", clock=asyncio.get_running_loop().time) as events:
        async with (
            spawn_server(server, log_path=tmp_path / "server.log") as address,
            EnvClient(address, job="test", request_timeout_s=60.0) as client,
        ):
            engine = RolloutEngine(
                replicas={"replica-0": replica},
                router=StickyLeastInflight(["replica-0"], rng=random.Random(0)),
                admission=make_admission("fixed", None),
                environments=client,
                agent=ModelAgent(conversation, max_tokens=8, temperature=0.0, top_p=1.0, seed=0),
                conversation=conversation,
                coordinator=Coordinator(),
                scheduling=action_policy("fifo", Coordinator()),
                limits=Limits(max_turns=50, max_context_tokens=10_000, trajectory_timeout_s=120.0, restarts=restarts),
                events=events,
            )
            running = asyncio.create_task(engine.run(tasks))
            while engine.status().turns < CHAINS:  # noqa: ASYNC110  # the engine tells nobody but those who ask
                await asyncio.sleep(0.01)
            os.kill(process_of(victim), signal.SIGKILL)
            return await running


def ledger_counts(tmp_path: Path) -> Counter[str]:
    """How often each action of each task ran, by the environment's own record (`t0 2`: action 2 of t0)."""
    return Counter((tmp_path / "ledger").read_text().split("\n")[:-1])


def test_with_restarts_a_killed_worker_costs_time_and_no_trajectory(tmp_path):
    results = asyncio.run(batch(tmp_path, 2, "makespan.envs.worker_process"))
    assert [(r.state, r.reward, len(r.turns)) for r in results] == [("finished", 1.0, LENGTH)] * CHAINS
    restarts = Counter(e.trajectory_id for e in read_log(tmp_path / "engine.jsonl").events if e.kind == "restarted")
    assert restarts  # else nothing was lost, and this tested nothing
    for action, times in ledger_counts(tmp_path).items():
        assert times <= 1 + restarts[f"{action.split()[0]}#0"]  # once an attempt, never twice


def test_without_restarts_the_chains_of_a_killed_worker_fail_and_say_so(tmp_path):
    results = asyncio.run(batch(tmp_path, 0, "makespan.envs.worker_process"))
    failed = [r for r in results if r.state == "failed"]
    assert failed
    assert {r.failure.kind for r in failed} <= {"unknown_outcome", "unknown_session"}
    assert all(r.reward is None for r in failed)
    assert max(ledger_counts(tmp_path).values()) == 1


def test_a_killed_broker_costs_no_trajectory_and_repeats_no_action(tmp_path):
    results = asyncio.run(batch(tmp_path, 0, "makespan.envs.broker_process"))
    assert [(r.state, r.reward, len(r.turns)) for r in results] == [("finished", 1.0, LENGTH)] * CHAINS
    expected = {f"t{i} {action}": 1 for i in range(CHAINS) for action in range(LENGTH + 1)}
    assert ledger_counts(tmp_path) == expected
