"""What the environment of a replay is told, and which turns reach it."""

import asyncio
import math

import pytest

from makespan.rollout.environment import Action, ActionTiming, Message, Observation
from makespan.rollout.errors import ConfigError, FormatError
from makespan.rollout.replay.plan import plan
from makespan.rollout.replay.playback import (
    FIRST_PROMPT,
    Overhead,
    PlayedEnvironments,
    Stretch,
    answer,
    lead_of,
    led_action,
    read_playback,
    stretch,
    with_playbacks,
)
from makespan.rollout.replay.scaling import scaled_times
from makespan.rollout.trajectory import Progress

from .recordings import recording

TWO = (
    recording("a", "g", 100, (10, 30, 0.5), (20, 0, 1.5), reset_s=2.0, reward=0.75),
    recording("b", "g", 100, (11, 31, 0.25), (5, 7, None), (21, 0, None), reset_s=4.0, reward=1.0),
)


def test_each_sample_of_a_group_carries_its_own_playback():
    tasks, plays = plan(TWO)
    first, second = (read_playback(task.payload) for task in with_playbacks(tasks, plays))
    assert [task.task_id for task in with_playbacks(tasks, plays)] == ["g", "g"]
    assert (first.reset_s, first.reward) == (2.0, 0.75)
    assert first.first == Stretch(trajectory_id="g#0", turn=FIRST_PROMPT, tokens=100)
    assert [(action.seconds, action.observation) for action in first.actions] == [
        (0.5, Stretch(trajectory_id="g#0", turn=0, tokens=30)),
        (1.5, None),
    ]
    # Turns without an action are not the server's: its last one does not end the trajectory.
    assert [(action.seconds, action.observation) for action in second.actions] == [
        (0.25, Stretch(trajectory_id="g#1", turn=0, tokens=31))
    ]


def test_another_version_and_another_payload_are_refused():
    with pytest.raises(FormatError, match="version 9"):
        read_playback({"version": 9})
    with pytest.raises(FormatError, match="reset_s"):
        read_playback({"version": 1})
    with pytest.raises(FormatError, match="stands for no stretch"):
        stretch(Message("user", "hello"))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_time_scale_must_be_above_zero(scale):
    with pytest.raises(ConfigError, match="--time-scale"):
        scaled_times(TWO, scale)


def test_scaling_multiplies_times_and_leaves_lengths():
    half = scaled_times(TWO, 0.5)
    assert [(t.reset_s, [turn.environment_s for turn in t.turns]) for t in half] == [
        (1.0, [0.25, 0.75]),
        (2.0, [0.125, None, None]),
    ]
    assert [t.turns[0].prompt_tokens for t in half] == [100, 100]
    assert scaled_times(TWO, 1.0) == TWO


class Server:
    """Plays playbacks without waiting, and counts what reaches it."""

    def __init__(self):
        self.steps = []

    async def open(self, trajectory_id, task, *, key, progress):
        played = read_playback(task.payload)
        return Played(self, trajectory_id, played), Observation((played.first.message(),)), ActionTiming("s", 0.0, 0.0)

    def rekey(self, keys):
        self.keys = keys


class Played:
    def __init__(self, server, trajectory_id, playback):
        self._server, self._id, self._actions = server, trajectory_id, iter(playback.actions)
        self._reward = playback.reward

    async def step(self, action, *, key, progress):
        self._server.steps.append(self._id)
        played = next(self._actions)
        return answer(played.observation, self._reward), ActionTiming("replay.step", 0.0, played.seconds)

    async def close(self):
        self._server.closed = self._id


def deviations(overheads: list[float], recorded_s: float) -> list[float]:
    """By how much actions that cost so much besides deviate when they are told to sleep less."""
    overhead, found = Overhead(), []
    for over_s in overheads:
        lead_s = overhead.lead_s(recorded_s)
        measured_s = recorded_s - lead_s + over_s
        overhead.observe(recorded_s, lead_s, measured_s)
        found.append(measured_s - recorded_s)
    return found


def test_what_actions_cost_besides_is_taken_off_the_next_ones():
    found = deviations([0.004] * 50, 0.1)
    assert found[0] == pytest.approx(0.004)  # nothing was known yet
    assert sum(found) == pytest.approx(0.0, abs=0.001)  # and that is made up for, by at most 1% of each action
    assert min(found) >= -0.1 * Overhead.REPAID - 1e-9


def test_single_late_ones_do_not_add_up():
    late = [0.050 if number % 10 == 0 else 0.001 for number in range(200)]
    assert sum(deviations(late, 0.2)) < 0.02 * 0.2 * 200 / 2
    assert sum(late) > 0.02 * 0.2 * 200  # which is what the actions would deviate by otherwise


def test_no_action_sleeps_less_than_nothing():
    assert deviations([0.005] * 20, 0.002)[-1] == pytest.approx(0.003)


def test_an_action_says_how_much_less_it_is_to_sleep():
    assert lead_of(led_action(0.0125)) == 0.0125
    assert lead_of(led_action(0.0)) == 0.0
    with pytest.raises(ValueError, match="could not convert"):
        lead_of(Action("ls"))


def test_turns_without_an_action_never_reach_the_server():
    server = Server()
    tasks, plays = plan(TWO)
    environments = PlayedEnvironments(server, plays)

    async def play(number):
        task = with_playbacks(tasks, plays)[number]
        session, _, _ = await environments.open(f"g#{number}", task, key=0.0, progress=Progress())
        seen = []
        for _ in TWO[number].turns:
            result, timing = await session.step(Action(""), key=0.0, progress=Progress())
            messages = [stretch(message) for message in result.observation.messages]
            seen.append(([(s.turn, s.tokens) for s in messages], result.terminated, result.reward, timing.slot_class))
        await session.close()
        return seen

    assert asyncio.run(play(0)) == [([(0, 30)], False, 0.0, "replay.step"), ([], True, 0.75, "replay.step")]
    assert asyncio.run(play(1)) == [
        ([(0, 31)], False, 0.0, "replay.step"),
        ([(1, 7)], False, 0.0, ""),
        ([], True, 1.0, ""),
    ]
    assert server.steps == ["g#0", "g#0", "g#1"]
    assert server.closed == "g#1"
    environments.rekey({"g#0": 1.0})
    assert server.keys == {"g#0": 1.0}
