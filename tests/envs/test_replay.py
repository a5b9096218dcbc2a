"""The replay environment on a real server: it takes the recorded time and no more, and what it answers adds up."""

from __future__ import annotations

import asyncio

import pytest

from makespan.envs.client import EnvClient
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.replay.plan import plan
from makespan.rollout.replay.playback import Stretch, stretch, with_playbacks
from makespan.rollout.trajectory import Task

from ..rollout.replay.recordings import recording
from .plane import open_session, step

SLOTS = {"replay.start": 2, "replay.step": 1}

RECORDED = recording("a", "g", 100, (10, 30, 0.4), (20, 0, 0.2), reset_s=0.3, reward=0.5)

LATE_S = 0.15
"""A busy machine may wake a sleeper so much too late."""


def test_resets_and_actions_take_the_recorded_time_with_a_slot_held(serve):
    tasks, plays = plan([RECORDED, RECORDED])
    tasks = with_playbacks(tasks, plays)

    async def play(client, task):
        session, observation, reset = await open_session(client, task)
        first, action = await step(session, "")
        last, final = await step(session, "")
        return observation, reset, first, action, last, final

    async def main():
        async with serve(slots=SLOTS) as address, EnvClient(address, job="test") as client:
            return await asyncio.gather(*(play(client, task) for task in tasks))

    both = asyncio.run(main())
    observation, _, first, _, last, _ = both[0]
    assert stretch(observation.messages[0]).tokens == 100
    assert stretch(first.observation.messages[0]) == Stretch(trajectory_id="g#0", turn=0, tokens=30)
    assert (first.reward, first.terminated) == (0.0, False)
    assert (last.reward, last.terminated, last.observation.messages) == (0.5, True, ())
    for _, reset, _, action, _, final in both:
        for measured, recorded_s in ((reset, 0.3), (action, 0.4), (final, 0.2)):
            assert recorded_s <= measured.service_s + 0.002 <= recorded_s + LATE_S
    # One step slot for both: four actions of 1.2 s in all, so somebody waited.
    assert max(timings[3].queue_s for timings in both) > 0.1


def test_an_action_beyond_the_recording_fails(serve):
    tasks, plays = plan([recording("a", "g", 10, (1, 0, 0.0))])

    async def main():
        async with serve(slots=SLOTS) as address, EnvClient(address, job="test") as client:
            session, _, _ = await open_session(client, with_playbacks(tasks, plays)[0])
            await step(session, "")
            with pytest.raises(EnvironmentFailure, match="has 1 actions, and one more") as failure:
                await step(session, "")
            return failure.value.kind

    assert asyncio.run(main()) == "raised"


def test_a_task_without_a_playback_is_refused(serve):
    async def main():
        async with serve(slots=SLOTS) as address, EnvClient(address, job="test") as client:
            with pytest.raises(EnvironmentFailure, match="playback of version None") as failure:
                await open_session(client, Task(task_id="a", environment="replay"))
            return failure.value.kind

    assert asyncio.run(main()) == "refused"
