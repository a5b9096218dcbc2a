"""Recorded environments on the real gates: actions take as long as they took, and wait for slots as they would.

`ReplayEnvironments` is an `EnvironmentBackend` whose slot classes are the same `ActionGate`s that the broker owns, on
the running loop's clock: real time beside real replicas, virtual time in a simulation. It owns no processes and no
sockets; what an action costs is in the recording.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from makespan.rollout.environment import Action, ActionTiming, Message, Observation, StepResult
from makespan.rollout.gate import ActionGate, GateStatistics, Grant
from makespan.rollout.replay.agent import length_message
from makespan.rollout.replay.plan import ENVIRONMENT, Plays
from makespan.rollout.replay.trace import TraceTrajectory
from makespan.rollout.trajectory import Progress, Task

START = f"{ENVIRONMENT}.start"
STEP = f"{ENVIRONMENT}.step"

NO_ACTION = ActionTiming(slot_class="", queue_s=0.0, service_s=0.0)
"""Of a turn that led to no action: it belongs to no class of slots."""


class GatedSlots:
    """The asyncio shell around one gate: an action waits, holds a slot for its time, and gives it back.

    `slots=None` is a class without a bound. Cancelled while it waits an action leaves the queue; cancelled while it
    runs, or in the instant of its grant, it frees its slot.
    """

    def __init__(self, slots: int | None) -> None:
        self._gate: ActionGate[asyncio.Future[None]] | None = None if slots is None else ActionGate(slots)
        self._waiting: dict[tuple[str, str], asyncio.Future[None]] = {}  # by job and trajectory

    async def hold(self, trajectory_id: str, key: float, service_s: float, job: str = "") -> tuple[float, Grant | None]:
        """Hold a slot for `service_s` seconds; gives the seconds of waiting for it, and what it was granted by."""
        gate = self._gate
        if gate is None:
            await asyncio.sleep(service_s)
            return 0.0, None
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        ticket: asyncio.Future[None] = loop.create_future()
        gate.submit(ticket, key, job=job)
        self._grant(gate, asked_s)
        try:
            if not ticket.done():
                self._waiting[job, trajectory_id] = ticket
                await ticket
                del self._waiting[job, trajectory_id]
            queue_s = loop.time() - asked_s
            grant = gate.granted_as(ticket)
            await asyncio.sleep(service_s)
        finally:
            self._waiting.pop((job, trajectory_id), None)
            if not gate.cancel(ticket):
                gate.release(ticket)
                self._grant(gate, loop.time())
        return queue_s, grant

    def rekey(self, keys: Mapping[str, float], job: str = "") -> None:
        """New keys, by trajectory, for the actions of a job that wait here."""
        if self._gate is not None:
            waiting = self._waiting.items()
            self._gate.rekey_all((ticket, keys[name]) for (of, name), ticket in waiting if of == job and name in keys)

    def _grant(self, gate: ActionGate[asyncio.Future[None]], now_s: float) -> None:
        for ticket in gate.grant(now_s):
            if not ticket.done():
                ticket.set_result(None)

    def statistics(self) -> GateStatistics | None:
        return None if self._gate is None else self._gate.statistics()


class ReplaySession:
    """A recorded environment, at the turn that comes next."""

    def __init__(self, trajectory_id: str, recorded: TraceTrajectory, slots: GatedSlots, job: str) -> None:
        self._trajectory_id = trajectory_id
        self._job = job
        self._recorded = recorded
        self._slots = slots
        self._turn = 0

    async def step(self, action: Action, *, key: float, progress: Progress) -> tuple[StepResult, ActionTiming]:
        """Play the next recorded action. A turn that led to no action takes no slot."""
        turns = self._recorded.turns
        turn = turns[self._turn]
        self._turn += 1
        timing = NO_ACTION
        if turn.environment_s is not None:
            queue_s, grant = await self._slots.hold(self._trajectory_id, key, turn.environment_s, self._job)
            timing = ActionTiming(STEP, queue_s, turn.environment_s, grant)
        if self._turn < len(turns):
            return StepResult(Observation((length_message("tool", turn.observation_tokens),))), timing
        return StepResult(Observation(()), reward=self._recorded.reward or 0.0, terminated=True), timing

    async def close(self) -> None:
        """Nothing is held between actions."""


class ReplayEnvironments:
    """The environment back end of a replay.

    Args:
        plays: what each trajectory plays.
        slots: slots of the classes `replay.start` and `replay.step`; a class that is not named has no bound.
        job: whose trajectories these are.
        shares_with: another job's environments, whose slots are also this one's; `slots` must be the same.
    """

    def __init__(
        self,
        plays: Plays,
        slots: Mapping[str, int],
        *,
        job: str = "",
        shares_with: ReplayEnvironments | None = None,
    ) -> None:
        self._plays = plays
        self.slots = dict(slots)
        self._job = job
        self._start: GatedSlots = GatedSlots(slots.get(START)) if shares_with is None else shares_with._start
        self._step: GatedSlots = GatedSlots(slots.get(STEP)) if shares_with is None else shares_with._step

    async def open(
        self, trajectory_id: str, task: Task, *, key: float, progress: Progress
    ) -> tuple[ReplaySession, Observation, ActionTiming]:
        """Start the recorded environment of a trajectory."""
        recorded = self._plays[trajectory_id]
        queue_s, grant = 0.0, None
        if recorded.reset_s:
            queue_s, grant = await self._start.hold(trajectory_id, key, recorded.reset_s, self._job)
        first: tuple[Message, ...] = (length_message("user", recorded.turns[0].prompt_tokens),)
        timing = ActionTiming(START, queue_s, recorded.reset_s, grant)
        return ReplaySession(trajectory_id, recorded, self._step, self._job), Observation(first), timing

    def rekey(self, keys: Mapping[str, float]) -> None:
        """New keys for the waiting actions of these trajectories; others are ignored."""
        self._start.rekey(keys, self._job)
        self._step.rekey(keys, self._job)

    def statistics(self) -> dict[str, GateStatistics]:
        """The gates as they stand, by slot class."""
        classes = {START: self._start.statistics(), STEP: self._step.statistics()}
        return {name: figures for name, figures in classes.items() if figures is not None}
