"""One coordinator for several workers: what it is told, what it answers, and what survives a death."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from makespan.integrations.verl import reporter as reporter_module
from makespan.integrations.verl.coordinator import Exchange, JobSettings, Report, SharedCoordinator
from makespan.integrations.verl.reporter import ChainReporter
from makespan.rollout.chains import ChainState
from makespan.rollout.history import read_history
from makespan.rollout.trajectory import Progress
from tests.integrations.verl.reports import SLOTS, Clock, tell

SETTINGS = JobSettings(max_turns=50, max_tokens=None, history=None)


def shared(settings: JobSettings = SETTINGS) -> tuple[SharedCoordinator, Clock]:
    clock = Clock()
    return SharedCoordinator(settings, clock), clock


def chain(name: str, turns: int = 0, **more: Any) -> ChainState:
    state = {"running": True, "inference_s": 1.0 * turns, "action_s": 1.0 * turns, "tokens": 100, "first_tokens": 50}
    return ChainState(trajectory_id=name, group=name.split("#")[0], environment="env", turns=turns, **(state | more))


def ended(name: str, turns: int) -> ChainState:
    return chain(name, turns, running=False, over=True, counted=True)


def test_what_one_worker_saw_decides_the_keys_of_anothers_actions() -> None:
    coordinator, clock = shared()
    tell(coordinator, "one", [chain("long#0"), chain("short#0")])
    tell(coordinator, "two", [chain("long#1", waiting=True), chain("short#1", waiting=True)])
    tell(coordinator, "one", [ended("long#0", 40), ended("short#0", 2)])
    clock.now_s = 10.0
    keys = tell(coordinator, "two", []).keys
    assert set(keys) == {"long#1", "short#1"}
    assert keys["long#1"] < keys["short#1"]


def test_telling_a_state_twice_or_only_the_last_one_comes_to_the_same() -> None:
    keys = []
    for told in ([1, 2, 3], [3], [2, 2, 3, 3]):
        coordinator, clock = shared()
        tell(coordinator, "one", [chain("a#0"), chain("b#0", 5, waiting=True)])
        for turns in told:
            tell(coordinator, "one", [chain("a#0", turns, waiting=True)])
        clock.now_s = 10.0
        tell(coordinator, "one", [ended("c#0", 1)])
        keys.append(tell(coordinator, "one", [chain("a#0", 3, waiting=True)]).keys["a#0"])
    assert keys[0] == pytest.approx(keys[1]) == pytest.approx(keys[2])


def test_a_batch_turns_over_when_a_chain_joins_after_all_have_ended(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    coordinator, _ = shared(JobSettings(max_turns=50, max_tokens=None, history=str(path)))
    tell(coordinator, "one", [chain("a#0"), chain("a#1")])
    tell(coordinator, "one", [ended("a#0", 3), ended("a#1", 5)])
    assert coordinator.status()["steps_learnt"] == 0
    assert not path.exists()
    tell(coordinator, "one", [chain("b#0")])
    assert coordinator.status()["steps_learnt"] == 1
    assert (coordinator.status()["running"], coordinator.status()["over"]) == (1, 0)
    assert read_history(path).steps[0].counts == {3: 1.0, 5: 1.0}
    # The next actor of the job begins with it.
    again, _ = shared(JobSettings(max_turns=50, max_tokens=None, history=str(path)))
    assert again.status()["steps_learnt"] == 1


def test_where_batches_overlap_enough_that_is_over_is_learnt_from_and_who_runs_stays() -> None:
    coordinator, _ = shared()
    tell(coordinator, "one", [chain(f"a#{n}") for n in range(100)])
    tell(coordinator, "one", [ended(f"a#{n}", 3) for n in range(63)])
    tell(coordinator, "one", [chain("b#0")])
    assert coordinator.status()["steps_learnt"] == 0  # 63 are over and 37 run
    tell(coordinator, "one", [ended(f"a#{n}", 3) for n in range(63, 70)])
    tell(coordinator, "one", [chain("b#1")])
    assert coordinator.status()["steps_learnt"] == 1
    assert (coordinator.status()["running"], coordinator.status()["over"]) == (32, 0)


def test_the_chains_of_a_worker_that_fell_silent_do_not_count_any_more() -> None:
    coordinator, clock = shared()
    tell(coordinator, "dead", [chain("a#0"), chain("a#1")])
    tell(coordinator, "alive", [chain("b#0")])
    clock.now_s = 50.0
    tell(coordinator, "alive", [])
    assert coordinator.status()["running"] == 3
    clock.now_s = 70.0
    tell(coordinator, "alive", [])
    assert (coordinator.status()["running"], coordinator.status()["workers"]) == (1, 1)


def test_an_unreadable_history_does_not_keep_the_actor_from_starting(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "history.json"
    path.write_text("nonsense")
    coordinator, _ = shared(JobSettings(max_turns=50, max_tokens=None, history=str(path)))
    assert coordinator.status()["steps_learnt"] == 0
    assert "not a history" in caplog.text


class Line:
    """An actor that can be dead, and started anew."""

    def __init__(self, settings: JobSettings = SETTINGS) -> None:
        self._settings = settings
        self.restart()

    def restart(self) -> None:
        self.coordinator, self.clock = shared(self._settings)
        self.alive = True

    async def exchange(self, report: Report) -> Exchange:
        if not self.alive:
            raise ConnectionError("the actor died")
        self.clock.now_s += 1.0
        return self.coordinator.exchange(report)


def reporting(line: Line) -> tuple[ChainReporter, dict[str, float]]:
    passed_on: dict[str, float] = {}

    def rekey(keys: Mapping[str, float]) -> None:
        passed_on.update(keys)

    return ChainReporter(lambda: line, SLOTS, rekey, SETTINGS, worker="one"), passed_on


def turn(reporter: ChainReporter, name: str, turns: int) -> float:
    reporter.inferred(name, 1.0, 100 + turns)
    return reporter.key(name, Progress(turns=turns))


def test_new_keys_reach_the_environment_server_and_the_next_action() -> None:
    line = Line()
    reporter, passed_on = reporting(line)
    reporter.join("a#0", "a", "env")
    assert turn(reporter, "a#0", 0) == 0.0  # nothing is known yet
    asyncio.run(reporter.exchange())
    assert passed_on["a#0"] < 0.0
    reporter.acted("a#0", 1.0)
    assert turn(reporter, "a#0", 1) == passed_on["a#0"]


def test_while_the_coordinator_is_dead_keys_stand_and_then_it_hears_of_everyone(caplog: Any) -> None:
    async def play() -> None:
        line = Line()
        reporter, passed_on = reporting(line)
        for name in ("a#0", "b#0", "idle#0"):
            reporter.join(name, name[0], "env")
        turn(reporter, "a#0", 0)
        await reporter.exchange()
        stands = passed_on["a#0"]
        line.alive = False
        for turns in range(1, 6):
            reporter.acted("a#0", 1.0)
            assert turn(reporter, "a#0", turns) == stands
            await reporter.exchange()
        reporter.end("b#0", counts=True)
        await reporter.exchange()
        assert caplog.text.count("no answer of the coordinator") == 1  # once, not at every exchange
        line.restart()
        await reporter.exchange()  # tells what had changed, and learns that the actor is another one
        await reporter.exchange()  # tells of everyone
        assert line.coordinator.status()["running"] == 2  # `idle#0` too, though nothing had changed with it
        table = line.coordinator._coordinator._chains
        assert int(table.turns[table.number["a#0"]]) == 5
        assert passed_on["a#0"] != stands

    asyncio.run(play())


def test_a_worker_hears_which_of_its_chains_will_be_late() -> None:
    """Fifteen chains that end after two turns; the sixteenth goes on beside one slot that is nearly out of work."""

    async def play() -> None:
        line = Line()
        reporter, _ = reporting(line)
        for name in map(str, range(16)):
            reporter.join(f"{name}#0", name, "env")
            for turns in range(2):
                turn(reporter, f"{name}#0", turns)
                reporter.acted(f"{name}#0", 1.0)
        await reporter.exchange()
        assert not reporter.threatens("15#0")
        for name in map(str, range(15)):
            reporter.end(f"{name}#0", counts=True)
        for turns in range(2, 12):
            turn(reporter, "15#0", turns)
            reporter.acted("15#0", 30.0)
        await reporter.exchange()
        assert reporter.threatens("15#0")
        assert not reporter.threatens("0#0")
        reporter.end("15#0", counts=True)
        assert not reporter.threatens("15#0")

    asyncio.run(play())


def test_an_exchange_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter_module, "EXCHANGE_TIMEOUT_S", 0.05)

    class Hangs:
        async def exchange(self, *_: Any) -> Exchange:
            await asyncio.sleep(60)
            raise AssertionError

    reporter = ChainReporter(lambda: Hangs(), SLOTS, lambda _: None, SETTINGS)
    reporter.join("a#0", "a", "env")
    asyncio.run(asyncio.wait_for(reporter.exchange(), 5))
    assert turn(reporter, "a#0", 0) == 0.0


def test_a_trajectory_that_never_joined_may_end() -> None:
    reporter, _ = reporting(Line())
    reporter.end("a#0", counts=False)
    asyncio.run(reporter.exchange())
