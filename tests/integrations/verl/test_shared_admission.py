"""Admission for all agent-loop workers together: nobody is let in twice, and nobody waits for a dead one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import ray

from makespan.integrations.verl import reporter as reporter_module
from makespan.integrations.verl.coordinator import (
    SETTLE_S,
    Exchange,
    JobSettings,
    Report,
    SharedCoordinator,
    connect,
)
from makespan.integrations.verl.reporter import ChainReporter
from makespan.integrations.verl.settings import AdmissionSettings, MemorySettings
from makespan.rollout.admission_policy import ReturningTurn
from makespan.rollout.chains import ChainState
from tests.integrations.verl.local_ray import local_ray
from tests.integrations.verl.reports import SLOTS, Clock, tell

BLOCKS = MemorySettings(num_blocks=101, block_tokens=10)
"""A memory of 1,000 tokens, of which 95% may be booked."""


def job(policy: Any = "fixed", concurrency: int | None = 2, **more: Any) -> JobSettings:
    admission = AdmissionSettings(policy=policy, concurrency=concurrency, order="arrival", **more)
    return JobSettings(max_turns=50, max_tokens=None, history=None, admission=admission)


PARKING = job("parking", None, memory=BLOCKS, replicas=1)


def shared(settings: JobSettings) -> tuple[SharedCoordinator, Clock]:
    clock = Clock()
    return SharedCoordinator(settings, clock), clock


def chain(name: str, **more: Any) -> ChainState:
    return ChainState(trajectory_id=name, group=name, environment="env", **more)


def over(name: str) -> ChainState:
    return chain(name, over=True)


def going(coordinator: SharedCoordinator, worker: str, states: list[ChainState], *asks: Any, **more: Any) -> list[str]:
    """Who may go by a worker's report."""
    return tell(coordinator, worker, states, *asks, **more).going


def enter(coordinator: SharedCoordinator, worker: str, names: str) -> list[str]:
    """New trajectories ask to start."""
    return going(coordinator, worker, [chain(name) for name in names], dict.fromkeys(names, 0))


# --- the actor, without Ray -----------------------------------------------------------------------------------------


def test_the_limit_is_that_of_all_workers_together() -> None:
    coordinator, _ = shared(job(concurrency=3))
    assert enter(coordinator, "one", "ab") == ["a", "b"]
    assert enter(coordinator, "two", "cde") == ["c"]
    assert enter(coordinator, "one", "f") == []
    assert (coordinator.status()["admitted"], coordinator.status()["waiting"]) == (3, 3)
    assert going(coordinator, "one", [over("a"), over("b")]) == []  # the next ones are the other worker's
    assert going(coordinator, "two", []) == ["d", "e"]
    assert going(coordinator, "two", [over("d")]) == []
    assert going(coordinator, "one", []) == ["f"]


def test_by_default_everybody_starts_at_once_and_is_counted() -> None:
    coordinator, _ = shared(JobSettings(max_turns=50, max_tokens=None, history=None))
    going(coordinator, "one", [chain(str(n), running=True) for n in range(100)])
    assert (coordinator.status()["admitted"], coordinator.status()["waiting"]) == (100, 0)


def test_who_was_let_in_and_did_not_hear_of_it_hears_when_it_asks_again() -> None:
    coordinator, _ = shared(job())
    assert enter(coordinator, "one", "abc") == ["a", "b"]  # and the answer is lost
    assert going(coordinator, "one", [], {"a": 0, "b": 0, "c": 0}) == ["a", "b"]
    assert coordinator.status()["admitted"] == 2


def test_one_that_was_cancelled_while_it_waited_takes_nobodys_place() -> None:
    coordinator, _ = shared(job(concurrency=1))
    enter(coordinator, "one", "abc")
    going(coordinator, "one", [over("b")])
    assert going(coordinator, "one", [over("a")]) == ["c"]
    assert (coordinator.status()["admitted"], coordinator.status()["waiting"]) == (1, 0)


def test_the_places_of_a_worker_that_fell_silent_pass_on() -> None:
    coordinator, clock = shared(job())
    assert enter(coordinator, "dead", "abc") == ["a", "b"]
    assert enter(coordinator, "alive", "xy") == []
    clock.now_s = 59.0
    assert going(coordinator, "alive", []) == []
    clock.now_s = 61.0
    assert going(coordinator, "alive", []) == ["x", "y"]
    assert (coordinator.status()["admitted"], coordinator.status()["waiting"]) == (2, 0)


def test_a_trajectory_that_begins_again_at_another_worker_can_start_there() -> None:
    coordinator, clock = shared(job(concurrency=1))
    enter(coordinator, "dead", "a")
    assert enter(coordinator, "alive", "a") == ["a"]
    clock.now_s = 30.0
    going(coordinator, "alive", [])
    clock.now_s = 61.0
    assert going(coordinator, "alive", []) == []
    assert coordinator.status()["workers"] == 1
    assert coordinator.status()["admitted"] == 1  # the first worker's death does not take it


def test_a_report_that_a_later_one_overtook_is_void() -> None:
    for number, admitted in ((1, 0), (3, 1)):  # the second is the control: in its turn it counts
        coordinator, _ = shared(job())
        going(coordinator, "one", [over("a")], number=2)
        going(coordinator, "one", [chain("a", running=True)], number=number)
        assert coordinator.status()["admitted"] == admitted


def test_an_actor_that_replaces_a_dead_one_hears_who_runs_before_it_lets_anybody_in() -> None:
    coordinator, clock = shared(job())
    waiting = [chain(name) for name in "xyz"]
    assert going(coordinator, "one", waiting, dict.fromkeys("xyz", 0), answered=True) == []
    clock.now_s = SETTLE_S - 0.1
    assert going(coordinator, "two", [chain("a", running=True), chain("b", running=True)], answered=True) == []
    assert going(coordinator, "one", []) == []
    clock.now_s = SETTLE_S
    assert going(coordinator, "one", []) == []  # two run
    going(coordinator, "two", [over("a")])
    assert going(coordinator, "one", []) == ["x"]
    assert enter(shared(job())[0], "one", "xyz") == ["x", "y"]  # the control: the job's first actor does not wait


def test_contexts_of_all_workers_decide_who_is_parked_and_goes_on() -> None:
    coordinator, _ = shared(PARKING)
    assert enter(coordinator, "one", "a") == ["a"]
    assert enter(coordinator, "two", "b") == ["b"]
    assert going(coordinator, "one", [], {"a": 600}) == ["a"]
    assert going(coordinator, "two", [], {"b": 300}) == ["b"]
    assert going(coordinator, "two", [], {"b": 400}) == []  # 1,000 of 950
    assert coordinator.status()["parked"] == 1
    assert going(coordinator, "two", [], {"b": 400}) == []  # told again: the same
    going(coordinator, "one", [over("a")])
    assert going(coordinator, "two", []) == ["b"]
    assert coordinator.status()["parked"] == 0


def test_replicas_that_leave_and_come_back_take_their_memory_with_them() -> None:
    coordinator, _ = shared(job("parking", None, memory=BLOCKS, replicas=2))
    assert enter(coordinator, "one", "abc") == ["a", "b", "c"]
    for name in "abc":
        assert going(coordinator, "one", [], {name: 600}, replicas=2) == [name]  # 1,800 of 1,900
    going(coordinator, "one", [], replicas=1)
    assert coordinator.status()["admitted"] == 3
    assert going(coordinator, "one", [], {"c": 600}, replicas=1) == []
    assert going(coordinator, "one", [], {"a": 600}, replicas=1) == ["a"]  # one goes on with 600 of 950
    going(coordinator, "two", [], replicas=2)  # the other worker hears first that one is back
    assert going(coordinator, "one", [], replicas=1) == ["c"]  # 1,800 of 1,800; an old number is no news
    assert coordinator.status()["parked"] == 0
    assert going(coordinator, "one", [], {"a": 750}, replicas=2) == ["a"]


def test_a_new_actor_counts_the_contexts_of_who_runs() -> None:
    coordinator, clock = shared(PARKING)
    going(coordinator, "one", [chain("a", running=True, tokens=920)], answered=True)
    clock.now_s = SETTLE_S
    assert enter(coordinator, "two", "b") == []
    going(coordinator, "one", [over("a")])
    assert going(coordinator, "two", []) == ["b"]


def test_caches_that_are_lost_make_the_limit_smaller() -> None:
    """After a round of 16 returning turns that lost everything, the limit shrinks by a tenth: 855 of 1,000."""
    for cached_tokens, admitted in ((0, []), (100, ["b"])):
        coordinator, _ = shared(PARKING)
        enter(coordinator, "one", "a")
        served = [ReturningTurn(90, 100, cached_tokens, 0)] * 16
        going(coordinator, "one", [], answered=True, served=served)
        assert going(coordinator, "one", [], {"a": 850}) == ["a"]
        assert enter(coordinator, "one", "b") == admitted


# --- a worker, with an actor that can die ----------------------------------------------------------------------------


class Line:
    """An actor that can be dead, and started anew."""

    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings
        self.restart()

    def restart(self) -> None:
        self.coordinator, self.clock = shared(self.settings)
        self.alive = True

    async def exchange(self, report: Report) -> Exchange:
        if not self.alive:
            raise ConnectionError("the actor died")
        return self.coordinator.exchange(report)


class Worker:
    """A reporter, and who of its trajectories works."""

    def __init__(self, line: Line) -> None:
        self.reporter = ChainReporter(lambda: line, SLOTS, None, line.settings, worker="one")
        self.working: list[str] = []
        self.parked: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def enter(self, names: str) -> None:
        for name in names:
            self.reporter.join(name, name, "env")
            await self._begin(name, self.reporter.admit(name))

    async def reach(self, name: str, context_tokens: int) -> None:
        self.working.remove(name)
        await self._begin(name, self.reporter.reach(name, context_tokens, lambda: self.parked.append(name)))

    async def _begin(self, name: str, waiting: Any) -> None:
        async def wait() -> None:
            await waiting
            self.working.append(name)

        self._tasks[name] = asyncio.create_task(wait())
        await _rounds()

    async def end(self, name: str) -> None:
        """However it ends: also while it waits."""
        self._tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self._tasks[name]
        if name in self.working:
            self.working.remove(name)
        self.reporter.end(name, counts=False)
        await _rounds()

    async def exchange(self) -> None:
        await self.reporter.exchange()
        await _rounds()


async def _rounds() -> None:
    """Let tasks go on that can."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_trajectory_waits_until_the_actor_lets_it_in() -> None:
    async def play() -> None:
        line = Line(job())
        worker = Worker(line)
        await worker.enter("abcd")
        assert worker.working == []
        await worker.exchange()
        assert worker.working == ["a", "b"]
        await worker.end("c")  # cancelled while it waits
        await worker.end("a")
        await worker.exchange()
        assert worker.working == ["b", "d"]
        assert line.coordinator.status()["waiting"] == 0

    asyncio.run(play())


def test_one_that_is_cancelled_in_the_moment_of_its_admission_gives_its_place_back() -> None:
    async def play() -> None:
        worker = Worker(Line(job(concurrency=1)))
        await worker.enter("ab")
        await worker.reporter.exchange()  # `a` may go, and has not run since
        await worker.end("a")
        assert worker.working == []
        await worker.exchange()
        assert worker.working == ["b"]

    asyncio.run(play())


def test_a_parked_trajectory_is_no_load_and_goes_on_when_there_is_room() -> None:
    async def play() -> None:
        worker = Worker(Line(PARKING))
        await worker.enter("ab")
        await worker.exchange()
        await worker.reach("a", 600)
        await worker.reach("b", 400)
        await worker.exchange()
        assert (worker.working, worker.parked) == (["a"], ["b"])
        await worker.end("a")
        await worker.exchange()
        assert (worker.working, worker.parked) == (["b"], ["b"])

    asyncio.run(play())


def test_a_worker_passes_on_how_many_replicas_there_are() -> None:
    async def play() -> None:
        worker = Worker(Line(job("parking", None, memory=BLOCKS, replicas=2)))
        await worker.enter("ab")
        await worker.exchange()
        worker.reporter.resized(1)
        await worker.reach("a", 600)
        await worker.reach("b", 400)  # 1,000 of 950, which two replicas would hold
        await worker.exchange()
        assert (worker.working, worker.parked) == (["a"], ["b"])
        worker.reporter.resized(2)
        await worker.exchange()
        await worker.exchange()
        assert worker.working == ["a", "b"]

    asyncio.run(play())


def test_when_the_actor_dies_as_many_go_on_as_did_and_the_next_one_hears_of_them() -> None:
    async def play() -> None:
        line = Line(job())
        worker = Worker(line)
        await worker.enter("abcde")
        await worker.exchange()
        line.alive = False
        await worker.exchange()
        assert worker.working == ["a", "b"]  # nobody floods the replicas
        await worker.end("a")
        assert worker.working == ["b", "c"]
        await worker.exchange()
        await worker.end("d")  # waits, and is cancelled
        line.restart()
        await worker.exchange()
        assert line.coordinator.status()["admitted"] == 2
        assert line.coordinator.status()["waiting"] == 1
        await worker.end("b")
        await worker.exchange()
        assert worker.working == ["c"]  # the new actor has not settled
        line.clock.now_s = SETTLE_S
        await worker.exchange()
        assert worker.working == ["c", "e"]

    asyncio.run(play())


def test_when_the_actor_dies_parked_trajectories_go_on_before_anybody_starts() -> None:
    async def play() -> None:
        line = Line(PARKING)
        worker = Worker(line)
        await worker.enter("ab")
        await worker.exchange()
        await worker.reach("a", 600)
        await worker.reach("b", 400)
        await worker.exchange()
        assert worker.parked == ["b"]
        await worker.enter("n")
        line.alive = False
        await worker.exchange()
        assert worker.working == ["a"]  # one may work
        await worker.reach("a", 700)
        assert worker.working == ["b"]  # it has waited for longer
        await worker.end("b")
        assert worker.working == ["a"]
        await worker.end("a")
        assert worker.working == ["n"]

    asyncio.run(play())


def test_an_actor_that_never_answers_is_waited_for_and_then_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        line = Line(job())
        line.alive = False
        worker = Worker(line)
        await worker.enter("abc")
        await worker.exchange()
        assert worker.working == []  # its process may be starting
        monkeypatch.setattr(reporter_module, "PATIENCE_S", -1.0)
        await worker.exchange()
        assert worker.working == ["a", "b"]

    asyncio.run(play())


def test_a_worker_that_was_forgotten_tells_who_runs_and_who_waits_again() -> None:
    async def play() -> None:
        line = Line(job(concurrency=1))
        worker = Worker(line)
        await worker.enter("ab")
        await worker.exchange()
        line.clock.now_s = 61.0  # it was too busy to speak
        going(line.coordinator, "other", [])
        assert line.coordinator.status()["admitted"] == 0
        await worker.exchange()
        await worker.exchange()
        assert (line.coordinator.status()["admitted"], line.coordinator.status()["waiting"]) == (1, 1)

    asyncio.run(play())


def test_two_thousand_that_wait_keep_no_end_from_being_heard() -> None:
    async def play() -> None:
        worker = Worker(Line(job(concurrency=1)))
        for number in range(2_000):
            worker.reporter.join(str(number), "g", "env")
        waiting = [asyncio.create_task(worker.reporter.admit(str(number))) for number in range(2_000)]
        await _rounds()
        for number in range(5):
            await worker.exchange()
            assert [task.done() for task in waiting[: number + 2]] == [True] * (number + 1) + [False]
            worker.reporter.end(str(number), counts=True)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(play())


# --- with Ray --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray("admission", cpus=1):
        yield


@pytest.mark.usefixtures("cluster")
def test_two_thousand_trajectories_go_through_an_actor_that_dies_on_the_way() -> None:
    """More than the 1,000 calls that a Ray actor runs at a time; it is killed when half of them are over."""
    settings, limit, count = job(concurrency=100), 100, 2_000

    async def play() -> tuple[int, int]:
        reporter = ChainReporter(lambda: connect("j", settings), SLOTS, None, settings)
        working = most = ended = 0

        async def trajectory(name: str) -> None:
            nonlocal working, most, ended
            reporter.join(name, "g", "env")
            try:
                await reporter.admit(name)
                working += 1
                most = max(most, working)
                await asyncio.sleep(0.02)
                working -= 1
            finally:
                reporter.end(name, counts=True)
            ended += 1
            if ended == count // 2:
                ray.kill(ray.get_actor("makespan-coordinator/j"))

        exchanging = asyncio.create_task(reporter.run())
        async with asyncio.timeout(120):
            await asyncio.gather(*(trajectory(str(number)) for number in range(count)))
        exchanging.cancel()
        await asyncio.gather(exchanging, return_exceptions=True)
        return ended, most

    assert asyncio.run(play()) == (count, limit)
