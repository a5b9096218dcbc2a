"""Two training jobs on one environment cluster: each is to be served as if half of it were its own."""

import asyncio

import pytest

from makespan.rollout.replay.environments import GatedSlots
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.simulation.batch import Hardware, Job, Policies, simulate_jobs
from makespan.rollout.simulation.loop import run_virtual
from makespan.rollout.simulation.regimes import SYNTHETIC, generate
from makespan.rollout.telemetry.analysis import analyse
from makespan.rollout.telemetry.merge import merge

AMPLE = ReplicaHardware(kv_tokens=1 << 40)
CAAS = Policies(scheduling="caas", order="forecast")


def makespans(tmp_path, jobs, slots):
    paths = [tmp_path / f"{number}.jsonl" for number in range(len(jobs))]
    made = [
        Job(trace=trace, policies=policies, log_path=path) for (trace, policies), path in zip(jobs, paths, strict=True)
    ]
    simulate_jobs(made, Hardware(slots=slots, replica=AMPLE))
    return [analyse(merge([path])).makespan_s for path in paths]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("one", "other"),
    [("lognormal-1", "lognormal-1"), ("lognormal-1", "bfcl"), ("search", "lognormal-1.5-cap100")],
)
def test_neither_job_takes_more_than_a_fifth_longer_than_alone_on_half_the_slots(tmp_path, one, other, seed):
    jobs = [
        (generate(SYNTHETIC[one], 50 + seed, chains=64), CAAS),
        (generate(SYNTHETIC[other], 90 + seed, chains=64), Policies() if seed == 1 else CAAS),
    ]
    together = makespans(tmp_path, jobs, slots=16)
    alone = [makespans(tmp_path, [job], slots=8)[0] for job in jobs]
    for shared_s, half_s in zip(together, alone, strict=True):
        assert shared_s <= 1.2 * half_s


def test_without_sharing_by_job_a_big_one_would_starve_a_small_one():
    """The control: 200 actions of one job are there before 10 of another; in one queue these wait for all of them."""

    async def last_of_the_small_job(jobs):
        slots = GatedSlots(4)
        ended = []

        async def act(number, job):
            await slots.hold(str(number), 0.0, 1.0, job)
            if number >= 200:
                ended.append(asyncio.get_running_loop().time())

        async with asyncio.TaskGroup() as group:
            for number in range(210):
                group.create_task(act(number, jobs[number >= 200]))
        return max(ended)

    assert run_virtual(last_of_the_small_job(["one", "one"])) == pytest.approx(53.0, abs=1.0)
    assert run_virtual(last_of_the_small_job(["big", "small"])) == pytest.approx(6.0, abs=1.0)


def test_new_keys_reach_only_the_actions_of_their_own_job():
    async def order():
        slots = GatedSlots(1)
        ended = []

        async def act(name, job):
            await slots.hold(name, 0.0, 1.0, job)
            ended.append((job, name))

        async with asyncio.TaskGroup() as group:
            for name in ("a", "b", "c"):
                for job in ("one", "two"):
                    group.create_task(act(name, job))
            await asyncio.sleep(0.5)
            slots.rekey({"c": -1.0}, "two")
        return ended

    ended = run_virtual(order())
    assert [name for job, name in ended if job == "one"] == ["a", "b", "c"]
    assert next(name for job, name in ended if job == "two") == "c"
