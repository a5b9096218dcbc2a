"""The coordinator under verl: one actor a training job, which all agent-loop workers report to.

Every agent-loop worker runs some of the batch's trajectories; only together do they say how long chains are and which
of them threatens to end the batch. Each worker reports what its chains have come to and gets new keys for its own
waiting actions in return (`reporter.py`).

`SharedCoordinator` is the actor without Ray: it says when a batch turns over, forgets the chains of workers that fell
silent, and keeps the history in a file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import msgspec
import ray

from makespan.rollout.chains import ChainState
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.errors import MakespanError
from makespan.rollout.history import History, read_history, write_history

logger = logging.getLogger(__name__)

SILENT_S = 60.0
"""A worker that has said nothing for so long is gone, and its chains with it. Idle workers say hello ten times as
often."""
TURN_OVER_CHAINS = 64
"""Where batches overlap, what is over is learnt from once it is so many chains and twice those that still run."""


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker says of the job; the first one decides."""

    max_turns: int | None
    max_tokens: int | None
    history: str | None
    """A file that the actor's host can write; None: what was learnt ends with the actor."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's answer."""

    incarnation: str
    """Another one than last time: it knows nothing of what it was told before."""
    keys: dict[str, float]
    """New keys of the worker's waiting actions, by trajectory."""


class SharedCoordinator:
    """One coordinator for several reporting processes.

    Args:
        clock: seconds, steady.
    """

    def __init__(self, settings: JobSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._incarnation = uuid4().hex
        self._coordinator = Coordinator(_remembered(settings))
        self._coordinator.begin(max_turns=settings.max_turns, max_tokens=settings.max_tokens)
        self._chains: dict[str, set[str]] = {}  # by worker: its chains that are not over
        self._heard_s: dict[str, float] = {}
        self._worker_of: dict[str, str] = {}
        self._keys: dict[str, dict[str, float]] = {}

    def exchange(self, worker: str, slots: Mapping[str, int], states: list[ChainState]) -> Exchange:
        """A worker says what has changed with its chains, and gets the keys that are new since last time."""
        now_s = self._clock()
        self._heard_s[worker] = now_s
        self._coordinator.slots.update(slots)
        mine = self._chains.setdefault(worker, set())
        for state in states:
            self._observe(worker, mine, state)
        self._forget_the_silent(now_s)
        keys = self._coordinator.rekeys(now_s)
        if keys:
            self._coordinator.pass_took(self._clock() - now_s)
        for name, key in keys.items():
            owner = self._worker_of.get(name)
            if owner is not None:
                self._keys.setdefault(owner, {})[name] = key
        fresh = self._keys.pop(worker, {})
        for state in states:
            if not state.over:
                fresh[state.trajectory_id] = self._coordinator.key_of(state.trajectory_id)
        return Exchange(incarnation=self._incarnation, keys=fresh)

    def _observe(self, worker: str, mine: set[str], state: ChainState) -> None:
        name = state.trajectory_id
        if name not in self._worker_of:
            if state.over:
                return  # it came and went while nobody listened
            running, over = self._coordinator.counts()
            if over and (not running or over >= max(TURN_OVER_CHAINS, 2 * running)):
                self._turn_over()
            self._worker_of[name] = worker
            mine.add(name)
        self._coordinator.observe(state)
        if state.over:
            del self._worker_of[name]
            mine.discard(name)

    def _turn_over(self) -> None:
        self._coordinator.turn_over()
        if self._settings.history is not None:
            try:
                write_history(Path(self._settings.history), self._coordinator.history)
            except OSError as error:
                logger.warning("makespan: the history %s cannot be written: %s", self._settings.history, error)

    def _forget_the_silent(self, now_s: float) -> None:
        for worker in [name for name, heard_s in self._heard_s.items() if now_s - heard_s > SILENT_S]:
            for name in self._chains.pop(worker, set()):
                self._coordinator.end(name, counts=False)
                del self._worker_of[name]
            del self._heard_s[worker]
            self._keys.pop(worker, None)

    def status(self) -> dict[str, Any]:
        """For people: chains, workers, and what the forecast stands on."""
        running, over = self._coordinator.counts()
        return {
            "incarnation": self._incarnation,
            "workers": len(self._heard_s),
            "running": running,
            "over": over,
            "steps_learnt": len(self._coordinator.history.steps),
            "prompt_correlation": self._coordinator.history.prompt_correlation,
        }


def _remembered(settings: JobSettings) -> History:
    if settings.history is None:
        return History()
    try:
        return read_history(Path(settings.history))
    except MakespanError as error:  # an actor that cannot start would silence every worker for ever
        logger.error("makespan: %s; starting without it", error)
        return History()


class Actor(Protocol):
    """What a reporter needs of the actor's handle."""

    async def exchange(self, worker: str, slots: dict[str, int], states: list[ChainState]) -> Exchange: ...


class _Handle:
    """A Ray actor handle as an `Actor`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def exchange(self, worker: str, slots: dict[str, int], states: list[ChainState]) -> Exchange:
        answer: Exchange = await self._handle.exchange.remote(worker, slots, states)
        return answer


def actor_name(job: str) -> str:
    """The name under which the job's coordinator is found."""
    return f"makespan-coordinator/{job}"


def connect(job: str, settings: JobSettings) -> Actor:
    """The job's coordinator, made if there is none. It lives as long as the worker that made it: if that dies, another
    worker makes the next one."""
    actor: Any = ray.remote(num_cpus=0)(SharedCoordinator)
    return _Handle(actor.options(name=actor_name(job), get_if_exists=True).remote(settings))
