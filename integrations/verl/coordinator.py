"""The coordinator under verl: one actor a training job, which all agent-loop workers report to.

Every agent-loop worker runs some of the batch's trajectories; only together do they say how long chains are, which of
them threatens to end the batch, and how much of the replicas' memory they fill. Each worker reports what its chains
have come to and which of them wait for admission; in return it gets new keys for its own waiting actions, and the names
of those that may go (`reporter.py`). No call waits here, so none can keep out another.

`SharedCoordinator` is the actor without Ray: it says when a batch turns over, forgets the chains of workers that fell
silent, and keeps the history in a file. Reports are states and not events: one may be told twice, and a new actor that
is told all of them knows what the old one knew. Who runs by then counts as admitted (`AdmissionPolicy.adopt`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import msgspec
import ray

from makespan.integrations.verl.settings import AdmissionSettings
from makespan.rollout.admission import make_policy
from makespan.rollout.admission_policy import AdmissionPolicy, ReturningTurn
from makespan.rollout.chains import ChainState
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.errors import MakespanError
from makespan.rollout.history import History, read_history, write_history
from makespan.rollout.order import make_order, smaller_limit

logger = logging.getLogger(__name__)

SILENT_S = 60.0
"""A worker that has said nothing for so long is gone, and its chains with it. Idle workers say hello ten times as
often."""
SETTLE_S = SILENT_S / 10 + 1.0
"""An actor that takes the place of a dead one lets nobody in for so long: by then it has heard who runs already."""
TURN_OVER_CHAINS = 64
"""Where batches overlap, what is over is learnt from once it is so many chains and twice those that still run."""


class JobSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker says of the job; the first one decides."""

    max_turns: int | None
    max_tokens: int | None
    history: str | None
    """A file that the actor's host can write; None: what was learnt ends with the actor."""
    admission: AdmissionSettings = AdmissionSettings()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of its trajectories."""

    worker: str
    number: int
    """Counts the worker's reports: one that was overtaken by a later one is void."""
    answered: bool
    """Whether any report of the worker was ever answered, by this actor or by one before it."""
    slots: dict[str, int]
    """Step slots by environment."""
    states: list[ChainState]
    """Those that changed."""
    asks: dict[str, int]
    """Who began to wait for admission: to start (0), or for an inference with a prompt of so many tokens."""
    served: list[ReturningTurn] = []
    """Turns after a first one, for `AdmissionPolicy.served`; a report that is lost takes them with it."""
    replicas: int | None = None
    """How many there were when a turn of the worker last ended; None: it was not told."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's answer."""

    incarnation: str
    """Another one than last time: the actor knows nothing of what this worker told before."""
    keys: dict[str, float]
    """New keys of the worker's waiting actions, by trajectory."""
    going: list[str]
    """Who of its waiting trajectories may start or go on."""
    threatening: list[str] = []
    """Those of the reported chains that are expected to outlast the batch's horizon."""


class _Worker(msgspec.Struct):
    """What is known of a reporting process."""

    incarnation: str
    """Of the acquaintance with it."""
    heard_s: float = 0.0
    number: int = 0
    replicas: int | None = None
    """As it said last: only another number is news, as who has no turns goes on telling an old one."""
    chains: set[str] = msgspec.field(default_factory=set)
    """Those that are not over."""
    keys: dict[str, float] = {}
    going: list[str] = []
    """What it has not been told yet."""


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
        self._workers: dict[str, _Worker] = {}
        self._worker_of: dict[str, str] = {}
        self._policy = _admission(settings.admission, self._coordinator)
        self._submitted: set[str] = set()  # to the policy: they wait to start
        self._admitted: set[str] = set()
        self._settled_s: float | None = None

    def exchange(self, report: Report) -> Exchange:
        """A worker says what has changed with its chains, and hears what has changed for them since last time."""
        now_s = self._clock()
        if self._settled_s is None:
            self._settled_s = now_s + SETTLE_S if report.answered else now_s
        worker = self._workers.get(report.worker)
        if worker is None:
            worker = self._workers[report.worker] = _Worker(uuid4().hex)
        worker.heard_s = now_s
        if report.number <= worker.number:
            return Exchange(incarnation=worker.incarnation, keys={}, going=[])
        worker.number = report.number
        if report.replicas not in (None, worker.replicas):
            worker.replicas = report.replicas
            self._policy.resize(report.replicas)
        self._coordinator.slots.update(report.slots)
        for state in report.states:
            self._observe(report.worker, state)
        self._forget_the_silent(now_s)
        for turn in report.served:
            self._policy.served(turn)
        worker.going += [name for name, tokens in report.asks.items() if self._ask(report.worker, name, tokens)]
        self._let_in(now_s)
        self._renew_keys(now_s)
        fresh, worker.keys = worker.keys, {}
        threatening = []
        for state in report.states:
            if not state.over:
                outlook = self._coordinator.outlook(state.trajectory_id)
                fresh[state.trajectory_id] = outlook.key
                if outlook.slack_s < 0:
                    threatening.append(state.trajectory_id)
        going, worker.going = worker.going, []
        return Exchange(incarnation=worker.incarnation, keys=fresh, going=going, threatening=threatening)

    # Chains

    def _observe(self, worker: str, state: ChainState) -> None:
        name = state.trajectory_id
        if name not in self._worker_of:
            if state.over:
                return  # it came and went while nobody listened
            running, over = self._coordinator.counts()
            if over and (not running or over >= max(TURN_OVER_CHAINS, 2 * running)):
                self._turn_over()
        owner = self._worker_of.get(name, worker)
        if owner != worker:  # started again elsewhere, before the first worker's death was noticed
            self._workers[owner].chains.discard(name)
        self._worker_of[name] = worker
        self._workers[worker].chains.add(name)
        self._coordinator.observe(state)
        if state.running and name not in self._admitted:  # its worker let it in while nobody was here
            self._adopt(name, state.tokens)
        if state.over:
            self._workers[worker].chains.discard(name)
            self._leave(name)

    def _renew_keys(self, now_s: float) -> None:
        keys = self._coordinator.rekeys(now_s)
        if keys:
            self._coordinator.pass_took(self._clock() - now_s)
        for name, key in keys.items():
            owner = self._worker_of.get(name)
            if owner is not None:
                self._workers[owner].keys[name] = key

    # Admission

    def _ask(self, worker: str, name: str, context_tokens: int) -> bool:
        """A trajectory waits to start, or to go on: whether it may at once."""
        if self._worker_of.get(name) != worker:
            return False  # it is over
        if name in self._admitted:  # or it has not heard so far that it may start
            return not context_tokens or self._policy.reach(name, context_tokens)
        if name not in self._submitted:
            self._submitted.add(name)
            self._policy.submit(name)
        return False

    def _let_in(self, now_s: float) -> None:
        if self._settled_s is None or now_s < self._settled_s:
            return
        for name in self._policy.start():
            self._submitted.discard(name)
            self._admitted.add(name)
            self._workers[self._worker_of[name]].going.append(name)

    def _adopt(self, name: str, context_tokens: int) -> None:
        self._submitted.discard(name)
        self._admitted.add(name)
        self._policy.adopt(name)
        if context_tokens:
            self._policy.reach(name, context_tokens)

    def _leave(self, name: str) -> None:
        """The trajectory is over, or its worker is gone."""
        del self._worker_of[name]
        self._submitted.discard(name)
        self._admitted.discard(name)
        self._policy.finish(name)

    def _turn_over(self) -> None:
        self._coordinator.turn_over()
        if self._settings.history is not None:
            try:
                write_history(Path(self._settings.history), self._coordinator.history)
            except OSError as error:
                logger.warning("makespan: the history %s cannot be written: %s", self._settings.history, error)

    def _forget_the_silent(self, now_s: float) -> None:
        for silent in [name for name, worker in self._workers.items() if now_s - worker.heard_s > SILENT_S]:
            for name in self._workers.pop(silent).chains:
                self._coordinator.end(name, counts=False)
                self._leave(name)

    def status(self) -> dict[str, Any]:
        """For people: chains, workers, admission, and what the forecast stands on."""
        running, over = self._coordinator.counts()
        admission = self._policy.statistics()
        return {
            "incarnation": self._incarnation,
            "workers": len(self._workers),
            "running": running,
            "over": over,
            "admitted": admission.admitted,
            "waiting": admission.waiting,
            "parked": admission.parked,
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


def _admission(settings: AdmissionSettings, coordinator: Coordinator) -> AdmissionPolicy:
    return make_policy(
        settings.policy,
        settings.concurrency,
        make_order(settings.order, coordinator, smaller_limit(settings.concurrency, settings.reference)),
        memory=None if settings.memory is None else settings.memory.memory(),
        replicas=settings.replicas or 1,
        reference=settings.reference,
    )


class Actor(Protocol):
    """What a reporter needs of the actor's handle."""

    async def exchange(self, report: Report) -> Exchange: ...


class _Handle:
    """A Ray actor handle as an `Actor`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def exchange(self, report: Report) -> Exchange:
        answer: Exchange = await self._handle.exchange.remote(report)
        return answer


def actor_name(job: str) -> str:
    """The name under which the job's coordinator is found."""
    return f"makespan-coordinator/{job}"


def connect(job: str, settings: JobSettings) -> Actor:
    """The job's coordinator, made if there is none. It lives as long as the worker that made it: if that dies, another
    worker makes the next one."""
    actor: Any = ray.remote(num_cpus=0)(SharedCoordinator)
    return _Handle(actor.options(name=actor_name(job), get_if_exists=True).remote(settings))
