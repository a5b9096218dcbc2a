"""Parking and routing by cost inside the engine: everybody ends, nothing is kept, and waits are not charged."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from makespan.rollout.admission import make_admission
from makespan.rollout.memory import LinearMemory
from makespan.rollout.replay.trace import Trace
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.simulation.batch import Hardware, Policies
from makespan.rollout.simulation.ladder import measured
from makespan.rollout.simulation.loop import run_virtual
from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.trajectory import TrajectoryResult
from tests.rollout.fakes import RuleReplica, task
from tests.rollout.simulation.test_batch import random_trace
from tests.rollout.test_engine import LIMITS, Rig, say

PARKED = Policies(admission="parking", concurrency=None, routing="cost", scheduling="caas", order="forecast")


def scarce(seed: int) -> tuple[Trace, MergedLog, MergedLog]:
    """The same batch, parked and all at once, on memory for a few of it."""
    work = random_trace(seed, 40)
    hardware = Hardware(slots=40, replicas=2, replica=ReplicaHardware(kv_tokens=5000))
    parked, _ = measured(work, hardware, PARKED, seed)
    everything, _ = measured(work, hardware, Policies(routing="cost"), seed)
    return work, parked, everything


@pytest.mark.parametrize("seed", range(3))
def test_every_trajectory_ends_with_all_its_turns_and_less_is_recomputed(seed):
    work, parked, everything = scarce(seed)
    turns = {chain.trajectory_id: len(chain.turns) for chain in work.trajectories}
    for log in (parked, everything):
        ended = list(log.of("ended"))
        assert {event.data["state"] for event in ended} == {"finished"}
        assert sorted(event.data["turns"] for event in ended) == sorted(turns.values())
    assert list(parked.of("parked"))
    assert not list(everything.of("parked"))
    assert _recomputed(parked) < _recomputed(everything)


def _recomputed(log: MergedLog) -> int:
    return sum(event.data["recomputed_tokens"] for event in log.of("generate"))


def test_time_parked_is_not_the_trajectorys_own():
    """Two trajectories of four turns of 1 s on memory for one: the second waits 4 s, and both keep a limit of 5 s."""
    rig = Rig(
        replicas=[RuleReplica("r", lambda _: say("ok"), seconds=1.0)],
        limits=msgspec.structs.replace(LIMITS, trajectory_timeout_s=5.0),
    )
    rig.admission = make_admission("parking", None, memory=LinearMemory(capacity=1), replicas=1)

    async def go() -> tuple[list[TrajectoryResult], float]:
        results = await rig.build().run([task("a", 4), task("b", 4)])
        return results, asyncio.get_running_loop().time()

    results, end_s = run_virtual(go())
    assert [result.state for result in results] == ["finished", "finished"]
    assert end_s > 7.5
    assert rig.nothing_is_held()


def test_a_replica_that_dies_takes_its_memory_out_of_the_limit():
    dead, alive = (RuleReplica(f"replica-{i}", lambda _: say("ok")) for i in range(2))
    dead.dead = True
    rig = Rig(replicas=[dead, alive])
    resized: list[int] = []
    rig.admission.resize = resized.append
    results = rig.run([task(f"t{number}", 3) for number in range(6)])
    assert {result.state for result in results} == {"finished"}
    assert set(resized) == {1}
