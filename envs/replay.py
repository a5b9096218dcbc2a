"""`replay`: an environment that takes as long as a recorded one did, and answers with as many tokens.

What it plays is the payload of its task (`makespan.rollout.replay.playback`), so a server needs no trace file. It does
nothing but sleep, by as much less as the action says that actions cost besides.
"""

from __future__ import annotations

import asyncio

from makespan.rollout.environment import Action, Observation, StepResult, TaskRefused
from makespan.rollout.errors import FormatError
from makespan.rollout.replay.playback import Playback, answer, lead_of, read_playback
from makespan.rollout.trajectory import Task


class ReplayEnvironment:
    """Plays one recorded trajectory. An action beyond the recording raises `RuntimeError`."""

    def __init__(self) -> None:
        self._playback: Playback | None = None
        self._played = 0

    async def reset(self, task: Task) -> Observation:
        try:
            played = read_playback(task.payload)
        except FormatError as error:
            raise TaskRefused(f"task {task.task_id!r}: {error}") from error
        self._playback, self._played = played, 0
        await asyncio.sleep(played.reset_s)
        return Observation((played.first.message(),))

    async def step(self, action: Action) -> StepResult:
        assert self._playback is not None, "a session begins with its reset"
        actions = self._playback.actions
        if self._played == len(actions):
            raise RuntimeError(f"the recording has {len(actions)} actions, and one more was asked for")
        played = actions[self._played]
        self._played += 1
        await asyncio.sleep(max(0.0, played.seconds - lead_of(action)))
        return answer(played.observation, self._playback.reward)

    async def close(self) -> None:
        return None
