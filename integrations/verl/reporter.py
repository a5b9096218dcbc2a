"""The trajectories of one agent-loop worker, as the job's coordinator is told of them.

A `ChainReporter` keeps a `ChainState` for each trajectory of its process and, every `EXCHANGE_S`, tells the actor
(`coordinator.py`) what has changed and learns new keys of its waiting actions, which it passes on to the environment
server. No action waits for an exchange: it is submitted with the last key that its trajectory got. What does wait is a
trajectory for its admission, where that is limited (`waiting_room.py`); then an exchange follows at once.

If the actor is silent or dead, keys stand and trajectories go on; what could not be told is told with the next
exchange, and an actor that was started anew (it says so by its `incarnation`) is told everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol
from uuid import uuid4

import msgspec

from makespan.integrations.verl.coordinator import SILENT_S, Actor, Exchange, JobSettings, Report, connect
from makespan.integrations.verl.waiting_room import WaitingRoom
from makespan.rollout.admission_policy import ReturningTurn
from makespan.rollout.chains import ChainState
from makespan.rollout.trajectory import Progress

logger = logging.getLogger(__name__)

EXCHANGE_S = 0.1
"""Between two exchanges of a worker: a tenth of the shortest actions that are worth ordering."""
EXCHANGE_TIMEOUT_S = 5.0
ASK_S = 0.01
"""Where somebody waits to be let in or to go on, the next exchange comes so soon, with all who ask meanwhile."""
PATIENCE_S = 60.0
"""A worker that was never answered lets its trajectories in by itself after this time. Making the actor's process takes
seconds, on a busy node many."""


class Chains(Protocol):
    """What an agent loop tells of its trajectory."""

    def join(self, trajectory_id: str, group: str, environment: str) -> None:
        """A trajectory is here; those of the same `group` have the same prompt."""
        ...

    async def admit(self, trajectory_id: str) -> None:
        """Wait until the trajectory may start."""
        ...

    async def reach(self, trajectory_id: str, context_tokens: int, parked: Callable[[], None]) -> None:
        """Before an inference with so long a prompt: wait until it may go on; `parked` is called if that is not now."""
        ...

    def inferred(self, trajectory_id: str, seconds: float | None, context_tokens: int) -> None:
        """A turn was generated after `seconds` (None: it was perhaps parked during a weight sync, which says nothing of
        the chain); the context has so many tokens with it."""
        ...

    def served(self, turn: ReturningTurn) -> None:
        """A turn was served that was not the first; see `AdmissionPolicy.served`."""
        ...

    def resized(self, replicas: int) -> None:
        """There are so many replicas now."""
        ...

    def key(self, trajectory_id: str, progress: Progress) -> float:
        """An action begins to wait for a slot: what it is to be ordered by."""
        ...

    def threatens(self, trajectory_id: str) -> bool:
        """Whether the trajectory is expected to outlast the batch's horizon, as far as the coordinator said."""
        ...

    def acted(self, trajectory_id: str, seconds: float) -> None:
        """The action is over; it ran for `seconds`."""
        ...

    def end(self, trajectory_id: str, *, counts: bool) -> None:
        """The trajectory is over; `counts`: its length says how long chains are. Nothing happens if it never joined."""
        ...


class Unreported:
    """Nobody is told, everybody starts at once, and actions go first come, first served."""

    def join(self, trajectory_id: str, group: str, environment: str) -> None: ...

    async def admit(self, trajectory_id: str) -> None: ...

    async def reach(self, trajectory_id: str, context_tokens: int, parked: Callable[[], None]) -> None: ...

    def inferred(self, trajectory_id: str, seconds: float | None, context_tokens: int) -> None: ...

    def served(self, turn: ReturningTurn) -> None: ...

    def resized(self, replicas: int) -> None: ...

    def key(self, trajectory_id: str, progress: Progress) -> float:
        return 0.0

    def threatens(self, trajectory_id: str) -> bool:
        return False

    def acted(self, trajectory_id: str, seconds: float) -> None: ...

    def end(self, trajectory_id: str, *, counts: bool) -> None: ...


class ChainReporter:
    """A process's trajectories, as the coordinator is told of them. One a process and job.

    Args:
        connect: gives the actor; called again after it died. It may raise whatever Ray raises.
        slots: step slots by environment.
        rekey: passes new keys on to the environment server; None: actions go first come, first served.
        job: what the actor is made with; the same admission is kept here when it is silent.
    """

    def __init__(
        self,
        connect: Callable[[], Actor],
        slots: Mapping[str, int],
        rekey: Callable[[Mapping[str, float]], None] | None,
        job: JobSettings,
        worker: str | None = None,
    ) -> None:
        self._connect = connect
        self._admission = job.admission
        self._room = WaitingRoom(job.admission.concurrency)
        self._served: list[ReturningTurn] = []
        self._replicas: int | None = None
        self._number = 0
        self._asked_first_s = 0.0
        self._slots = dict(slots)
        self._rekey = rekey
        self._worker = worker or uuid4().hex
        self._actor: Actor | None = None
        self._incarnation = ""
        self._live: dict[str, ChainState] = {}
        self._changed: dict[str, ChainState] = {}
        self._last_key: dict[str, float] = {}
        self._threatening: set[str] = set()
        self._complained = False

    def join(self, trajectory_id: str, group: str, environment: str) -> None:
        state = ChainState(trajectory_id=trajectory_id, group=group, environment=environment)
        state.running = not self._admission.limits
        self._live[trajectory_id] = state
        self._changed[trajectory_id] = state

    async def admit(self, trajectory_id: str) -> None:
        if self._admission.limits:
            await self._room.wait(trajectory_id)
            self._touch(trajectory_id).running = True

    async def reach(self, trajectory_id: str, context_tokens: int, parked: Callable[[], None]) -> None:
        if self._admission.policy == "parking":
            await self._room.wait(trajectory_id, context_tokens, parked)

    def inferred(self, trajectory_id: str, seconds: float | None, context_tokens: int) -> None:
        state = self._touch(trajectory_id)
        usual_s = state.inference_s / max(1, state.turns)
        state.inference_s += usual_s if seconds is None else seconds
        state.first_tokens = state.first_tokens or context_tokens
        state.tokens = context_tokens

    def served(self, turn: ReturningTurn) -> None:
        self._served.append(turn)

    def resized(self, replicas: int) -> None:
        self._replicas = replicas

    def key(self, trajectory_id: str, progress: Progress) -> float:
        """The last key that came for the trajectory, and 0 before the first."""
        state = self._touch(trajectory_id)
        state.turns, state.waiting = progress.turns, True
        return self._last_key.get(trajectory_id, 0.0)

    def threatens(self, trajectory_id: str) -> bool:
        return trajectory_id in self._threatening

    def acted(self, trajectory_id: str, seconds: float) -> None:
        state = self._touch(trajectory_id)
        state.waiting = False
        state.turns += 1
        state.action_s += seconds

    def end(self, trajectory_id: str, *, counts: bool) -> None:
        if trajectory_id not in self._live:
            return
        state = self._touch(trajectory_id)
        state.waiting = state.running = False
        state.over, state.counted = True, counts and state.turns > 0
        self._live.pop(trajectory_id)
        self._room.leave(trajectory_id)
        self._last_key.pop(trajectory_id, None)
        self._threatening.discard(trajectory_id)

    def _touch(self, trajectory_id: str) -> ChainState:
        state = self._live[trajectory_id]
        self._changed[trajectory_id] = state
        return state

    async def run(self) -> None:
        """Exchange for ever; to be cancelled. Nothing that goes wrong with the actor ends it."""
        now, last_s = asyncio.get_running_loop().time, -SILENT_S
        while True:
            if self._changed or len(self._room) or now() - last_s >= SILENT_S / 10:
                last_s = now()
                await self.exchange()
            try:
                await asyncio.wait_for(self._room.knocked.wait(), EXCHANGE_S)
                await asyncio.sleep(ASK_S)
            except TimeoutError:
                pass

    async def exchange(self) -> None:
        """Tell what has changed, let in who may, and take new keys. A failure leaves all to be told the next time."""
        told, self._changed = self._changed, {}
        served, self._served = self._served, []
        asks = self._room.asks()
        self._number += 1
        report = Report(
            worker=self._worker,
            number=self._number,
            answered=bool(self._incarnation),
            slots=self._slots,
            states=[msgspec.structs.replace(state) for state in told.values()],
            asks=asks,
            served=served,
            replicas=self._replicas,
        )
        now = asyncio.get_running_loop().time
        self._asked_first_s = self._asked_first_s or now()
        try:
            answer = await asyncio.wait_for(self._ask(report), EXCHANGE_TIMEOUT_S)
        except Exception as error:  # whatever Ray raises for an actor that is dead, slow or cannot be made
            self._changed = told | self._live | self._changed  # the next one may be another actor
            self._actor = None
            self._room.unanswered(give_up=now() - self._asked_first_s > PATIENCE_S)
            if not self._complained:
                logger.warning("makespan: no answer of the coordinator (%r): the last keys stand until there is", error)
            self._complained = True
            return
        self._complained = False
        if answer.incarnation != self._incarnation:
            if self._incarnation:  # it was started anew: it has to hear of everyone, and this time in full
                self._changed = self._live | self._changed
                self._room.retell()
            self._incarnation = answer.incarnation
        self._room.answered(asks, answer.going)
        self._threatening = (self._threatening - told.keys()) | (self._live.keys() & answer.threatening)
        if self._rekey is None:
            return
        keys = {name: key for name, key in answer.keys.items() if name in self._live}
        self._last_key.update(keys)
        if keys:
            self._rekey(keys)

    async def _ask(self, report: Report) -> Exchange:
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._connect)
        return await self._actor.exchange(report)


_reporters: dict[tuple[asyncio.AbstractEventLoop, str], tuple[ChainReporter, asyncio.Task[None]]] = {}


def chain_reporter(
    job: str, settings: JobSettings, slots: Mapping[str, int], rekey: Callable[[Mapping[str, float]], None] | None
) -> ChainReporter:
    """The reporter of this process, running; it ends with the process, as verl's workers do."""
    key = (asyncio.get_running_loop(), job)
    if key not in _reporters:
        reporter = ChainReporter(lambda: connect(job, settings), slots, rekey, settings)
        _reporters[key] = reporter, asyncio.create_task(reporter.run())
    return _reporters[key][0]
