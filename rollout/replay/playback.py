"""Playing a recorded trajectory on real replicas and a real environment server.

A replay keeps what was the work's (lengths, and how long the environment took) and does again what is the system's:
inference, caching, waiting for slots. The engine knows nothing of it. A task carries its `Playback`, the seconds and
lengths of one trajectory, so that the server needs no trace; an environment that gets one sleeps and answers with
*stretches*, messages that name the tokens they stand for; and the conversation of a replay (`content.py`) turns a
stretch into ids.

A turn that led to no action needs no slot, and a server gives none without one. `PlayedEnvironments` answers such a
turn on the spot and passes everything else on.

An action also costs its way to the worker and back, and sleepers wake late where inference takes all cores. What the
server measured says how much (`Overhead`), and each action is told to sleep that much less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from makespan.rollout.environment import (
    Action,
    ActionTiming,
    EnvironmentBackend,
    Message,
    Observation,
    Session,
    StepResult,
)
from makespan.rollout.errors import FormatError
from makespan.rollout.replay.environments import NO_ACTION
from makespan.rollout.replay.plan import Plays
from makespan.rollout.replay.trace import TraceTrajectory
from makespan.rollout.trajectory import Progress, Task

PLAYBACK_VERSION = 1

FIRST_PROMPT = -1
"""The turn of the stretch that comes before all turns."""


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a trajectory's context that its environment gave, by name and number."""

    trajectory_id: str
    """As the engine names it (`task#sample`)."""
    turn: int
    """The turn that they follow, or `FIRST_PROMPT`."""
    tokens: int

    def message(self) -> Message:
        """The message that stands for them."""
        return Message("user" if self.turn == FIRST_PROMPT else "tool", msgspec.json.encode(self).decode())


def stretch(message: Message) -> Stretch:
    """What a message of a replay stands for. Raises `FormatError` for any other message."""
    try:
        return msgspec.json.decode(message.content, type=Stretch)
    except msgspec.MsgspecError as error:
        raise FormatError(f"a message that stands for no stretch of a replay: {message.content!r} ({error})") from error


class PlayedAction(msgspec.Struct, frozen=True, kw_only=True):
    """One action: it takes `seconds`, and then there is something to see, or the trajectory is over (None)."""

    seconds: float
    observation: Stretch | None


class Playback(msgspec.Struct, frozen=True, kw_only=True):
    """What the environment of one trajectory does: the payload of its task."""

    version: int = PLAYBACK_VERSION
    reset_s: float
    first: Stretch
    actions: tuple[PlayedAction, ...]
    """Turns that led to no action are left out."""
    reward: float
    """Of the last action, if the trajectory ends with one."""


def playback(trajectory_id: str, recorded: TraceTrajectory) -> Playback:
    """What the environment of the trajectory that the engine calls `trajectory_id` plays."""
    actions = [
        PlayedAction(seconds=turn.environment_s, observation=_observation(trajectory_id, recorded, number))
        for number, turn in enumerate(recorded.turns)
        if turn.environment_s is not None
    ]
    first = Stretch(trajectory_id=trajectory_id, turn=FIRST_PROMPT, tokens=recorded.turns[0].prompt_tokens)
    return Playback(reset_s=recorded.reset_s, first=first, actions=tuple(actions), reward=recorded.reward or 0.0)


def read_playback(payload: Mapping[str, object]) -> Playback:
    """The playback in a task's payload. Raises `FormatError`."""
    if payload.get("version") != PLAYBACK_VERSION:
        seen = payload.get("version")
        raise FormatError(f"a playback of version {seen!r}; this makespan plays {PLAYBACK_VERSION}")
    try:
        return msgspec.convert(payload, Playback)
    except msgspec.ValidationError as error:
        raise FormatError(f"not a playback: {error}") from error


def with_playbacks(tasks: Sequence[Task], plays: Plays) -> list[Task]:
    """The tasks and plays of `plan`, each task with the playback of its sample."""
    return [
        msgspec.structs.replace(task, payload=msgspec.to_builtins(playback(trajectory_id, recorded)))
        for task, (trajectory_id, recorded) in zip(tasks, plays.items(), strict=True)
    ]


def _observation(trajectory_id: str, recorded: TraceTrajectory, turn: int) -> Stretch | None:
    """What follows a turn; None after the last one."""
    if turn + 1 == len(recorded.turns):
        return None
    return Stretch(trajectory_id=trajectory_id, turn=turn, tokens=recorded.turns[turn].observation_tokens)


def answer(observation: Stretch | None, reward: float) -> StepResult:
    """What an environment answers with: an observation, or the end and the reward."""
    if observation is not None:
        return StepResult(Observation((observation.message(),)))
    return StepResult(Observation(()), reward=reward, terminated=True)


class Overhead:
    """What actions take beyond the seconds that they are asked to sleep.

    A running mean is taken off every action beforehand, and of what has added up all the same at most `REPAID` of an
    action's own seconds: no action is moved further than that to make up for others.
    """

    WEIGHT = 0.1
    REPAID = 0.01

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._debt_s = 0.0
        """Measured minus recorded seconds so far."""

    def lead_s(self, recorded_s: float) -> float:
        """By how much less than recorded the next action is to sleep."""
        repaid_s = self.REPAID * recorded_s
        lead_s = (self._mean_s or 0.0) + min(repaid_s, max(-repaid_s, self._debt_s))
        return min(recorded_s, max(0.0, lead_s))

    def observe(self, recorded_s: float, lead_s: float, measured_s: float) -> None:
        """An action that was asked to sleep `recorded_s - lead_s` took `measured_s`."""
        over_s = measured_s - (recorded_s - lead_s)
        self._mean_s = over_s if self._mean_s is None else self._mean_s + self.WEIGHT * (over_s - self._mean_s)
        self._debt_s += measured_s - recorded_s


def led_action(lead_s: float) -> Action:
    """An action of a replay: it says by how much less the environment is to sleep."""
    return Action(text=f"{lead_s:.6f}" if lead_s else "")


def lead_of(action: Action) -> float:
    """What `led_action` said. Raises `ValueError` for another text."""
    return float(action.text) if action.text else 0.0


class PlayedSession:
    """A session of a replay: actions go to the server, turns without one do not."""

    def __init__(self, session: Session, trajectory_id: str, recorded: TraceTrajectory, overhead: Overhead) -> None:
        self._session = session
        self._overhead = overhead
        self._trajectory_id = trajectory_id
        self._recorded = recorded
        self._turn = 0

    async def step(self, action: Action, *, key: float, progress: Progress) -> tuple[StepResult, ActionTiming]:
        number, self._turn = self._turn, self._turn + 1
        recorded_s = self._recorded.turns[number].environment_s
        if recorded_s is not None:
            lead_s = self._overhead.lead_s(recorded_s)
            result, timing = await self._session.step(led_action(lead_s), key=key, progress=progress)
            self._overhead.observe(recorded_s, lead_s, timing.service_s)
            return result, timing
        observation = _observation(self._trajectory_id, self._recorded, number)
        return answer(observation, self._recorded.reward or 0.0), NO_ACTION

    async def close(self) -> None:
        await self._session.close()


class PlayedEnvironments:
    """The environment back end of a replay on a server whose environments play the tasks of `with_playbacks`."""

    def __init__(self, server: EnvironmentBackend, plays: Plays) -> None:
        self._server = server
        self._plays = plays
        self._overhead = Overhead()

    async def open(
        self, trajectory_id: str, task: Task, *, key: float, progress: Progress
    ) -> tuple[Session, Observation, ActionTiming]:
        session, observation, timing = await self._server.open(trajectory_id, task, key=key, progress=progress)
        played = PlayedSession(session, trajectory_id, self._plays[trajectory_id], self._overhead)
        return played, observation, timing

    def rekey(self, keys: Mapping[str, float]) -> None:
        self._server.rekey(keys)
