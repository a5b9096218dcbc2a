"""The trajectories of one agent-loop worker, as the job's coordinator is told of them.

A `ChainReporter` keeps a `ChainState` for each trajectory of its process and, every `EXCHANGE_S`, tells the actor
(`coordinator.py`) what has changed and learns new keys of its waiting actions, which it passes on to the environment
server. Nothing waits for an exchange: an action is submitted with the last key that its trajectory got. If the actor is
silent or dead, keys stand and trajectories go on; what could not be told is told with the next exchange, and an actor
that was started anew (it says so by its `incarnation`) is told everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol
from uuid import uuid4

import msgspec

from makespan.integrations.verl.coordinator import SILENT_S, Actor, Exchange, JobSettings, connect
from makespan.rollout.chains import ChainState
from makespan.rollout.trajectory import Progress

logger = logging.getLogger(__name__)

EXCHANGE_S = 0.1
"""Between two exchanges of a worker: a tenth of the shortest actions that are worth ordering."""
EXCHANGE_TIMEOUT_S = 5.0


class Chains(Protocol):
    """What an agent loop tells of its trajectory."""

    def join(self, trajectory_id: str, group: str, environment: str) -> None:
        """A trajectory starts here; those of the same `group` have the same prompt."""
        ...

    def inferred(self, trajectory_id: str, seconds: float | None, context_tokens: int) -> None:
        """A turn was generated after `seconds` (None: it was perhaps parked during a weight sync, which says nothing of
        the chain); the context has so many tokens with it."""
        ...

    def key(self, trajectory_id: str, progress: Progress) -> float:
        """An action begins to wait for a slot: what it is to be ordered by."""
        ...

    def acted(self, trajectory_id: str, seconds: float) -> None:
        """The action is over; it ran for `seconds`."""
        ...

    def end(self, trajectory_id: str, *, counts: bool) -> None:
        """The trajectory is over; `counts`: its length says how long chains are. Nothing happens if it never joined."""
        ...


class Unreported:
    """Nobody is told, and actions go first come, first served."""

    def join(self, trajectory_id: str, group: str, environment: str) -> None: ...

    def inferred(self, trajectory_id: str, seconds: float | None, context_tokens: int) -> None: ...

    def key(self, trajectory_id: str, progress: Progress) -> float:
        return 0.0

    def acted(self, trajectory_id: str, seconds: float) -> None: ...

    def end(self, trajectory_id: str, *, counts: bool) -> None: ...


class ChainReporter:
    """A process's trajectories, as the coordinator is told of them. One a process and job.

    Args:
        connect: gives the actor; called again after it died. It may raise whatever Ray raises.
        slots: step slots by environment.
        rekey: passes new keys on to the environment server.
    """

    def __init__(
        self,
        connect: Callable[[], Actor],
        slots: Mapping[str, int],
        rekey: Callable[[Mapping[str, float]], None],
        worker: str | None = None,
    ) -> None:
        self._connect = connect
        self._slots = dict(slots)
        self._rekey = rekey
        self._worker = worker or uuid4().hex
        self._actor: Actor | None = None
        self._incarnation = ""
        self._live: dict[str, ChainState] = {}
        self._changed: dict[str, ChainState] = {}
        self._last_key: dict[str, float] = {}
        self._complained = False

    def join(self, trajectory_id: str, group: str, environment: str) -> None:
        state = ChainState(trajectory_id=trajectory_id, group=group, environment=environment, running=True)
        self._live[trajectory_id] = state
        self._changed[trajectory_id] = state

    def inferred(self, trajectory_id: str, seconds: float | None, context_tokens: int) -> None:
        state = self._touch(trajectory_id)
        usual_s = state.inference_s / max(1, state.turns)
        state.inference_s += usual_s if seconds is None else seconds
        state.first_tokens = state.first_tokens or context_tokens
        state.tokens = context_tokens

    def key(self, trajectory_id: str, progress: Progress) -> float:
        """The last key that came for the trajectory, and 0 before the first."""
        state = self._touch(trajectory_id)
        state.turns, state.waiting = progress.turns, True
        return self._last_key.get(trajectory_id, 0.0)

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
        self._last_key.pop(trajectory_id, None)

    def _touch(self, trajectory_id: str) -> ChainState:
        state = self._live[trajectory_id]
        self._changed[trajectory_id] = state
        return state

    async def run(self) -> None:
        """Exchange for ever; to be cancelled. Nothing that goes wrong with the actor ends it."""
        idle_s = 0.0
        while True:
            if self._changed or idle_s >= SILENT_S / 10:
                idle_s = 0.0
                await self.exchange()
            await asyncio.sleep(EXCHANGE_S)
            idle_s += EXCHANGE_S

    async def exchange(self) -> None:
        """Tell what has changed and take new keys; a failure leaves everything to be told the next time."""
        told, self._changed = self._changed, {}
        snapshot = [msgspec.structs.replace(state) for state in told.values()]
        try:
            answer = await asyncio.wait_for(self._ask(snapshot), EXCHANGE_TIMEOUT_S)
        except Exception as error:  # whatever Ray raises for an actor that is dead, slow or cannot be made
            self._changed = told | self._changed
            self._actor = None
            if not self._complained:
                logger.warning("makespan: no answer of the coordinator (%r): the last keys stand until there is", error)
            self._complained = True
            return
        self._complained = False
        if answer.incarnation != self._incarnation:
            if self._incarnation:  # it was started anew: it has to hear of everyone, and this time in full
                self._changed = self._live | self._changed
            self._incarnation = answer.incarnation
        keys = {name: key for name, key in answer.keys.items() if name in self._live}
        self._last_key.update(keys)
        if keys:
            self._rekey(keys)

    async def _ask(self, states: list[ChainState]) -> Exchange:
        if self._actor is None:
            self._actor = await asyncio.to_thread(self._connect)
        return await self._actor.exchange(self._worker, self._slots, states)


_reporters: dict[tuple[asyncio.AbstractEventLoop, str], tuple[ChainReporter, asyncio.Task[None]]] = {}


def chain_reporter(
    job: str, settings: JobSettings, slots: Mapping[str, int], rekey: Callable[[Mapping[str, float]], None]
) -> ChainReporter:
    """The reporter of this process, running; it ends with the process, as verl's workers do."""
    key = (asyncio.get_running_loop(), job)
    if key not in _reporters:
        reporter = ChainReporter(lambda: connect(job, settings), slots, rekey)
        _reporters[key] = reporter, asyncio.create_task(reporter.run())
    return _reporters[key][0]
