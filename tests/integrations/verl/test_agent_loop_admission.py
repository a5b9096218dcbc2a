"""Admission under verl: a trajectory waits for its place before it begins, and says what it holds before each turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from makespan.integrations.verl.reporter import Unreported
from makespan.rollout.admission_policy import ReturningTurn
from makespan.rollout.environment import EnvironmentFailure
from tests.integrations.verl.loop_fakes import (
    ROW,
    FakeClient,
    FakeEnvironment,
    ReportedTo,
    assert_failed,
    make_loop,
    run,
)


class Door(Unreported):
    """Admission that takes `wait_s` each time, and what was asked of it and of the environment, in order."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        self.log: list[Any] = []
        self.waited_at = asyncio.Event()
        self.parks = True
        self.caches: list[ReturningTurn] = []
        self.replicas: list[int] = []

    def resized(self, replicas: int) -> None:
        self.replicas.append(replicas)

    def served(self, turn: ReturningTurn) -> None:
        self.caches.append(turn)

    async def admit(self, trajectory_id: str) -> None:
        self.log.append("admit")
        self.waited_at.set()
        await asyncio.sleep(self.wait_s)

    async def reach(self, trajectory_id: str, context_tokens: int, parked: Callable[[], None]) -> None:
        self.log.append(context_tokens)
        if self.parks:
            parked()
        self.waited_at.set()
        await asyncio.sleep(self.wait_s)

    def end(self, trajectory_id: str, *, counts: bool) -> None:
        self.log.append("counted" if counts else "given up")


class Watched(FakeEnvironment):
    def __init__(self, door: Door, **more: Any) -> None:
        super().__init__(**more)
        self._door = door

    async def open(self, *args: Any, **more: Any) -> Any:
        self._door.log.append("open")
        return await super().open(*args, **more)


def _behind(door: Door, client: FakeClient, environment: FakeEnvironment, **settings: Any) -> Any:
    loop = make_loop(client, environment, **settings)
    loop._reporter = lambda *_: door
    return loop


def test_a_trajectory_is_admitted_before_its_session_opens_and_asks_before_each_inference() -> None:
    door, client = Door(), FakeClient("one <end>", "done <end>")
    paused: list[str] = []
    client.pause_trajectory = SimpleNamespace(remote=paused.append)  # type: ignore[attr-defined]
    run(lambda: _behind(door, client, Watched(door)))
    assert door.log == ["admit", "open", 6, 6 + 2 + 6, "counted"]
    assert paused == ["g_1", "g_1"]


@pytest.mark.parametrize("parks", [True, False])
def test_admission_hears_what_a_returning_turn_found_unless_it_was_parked(parks: bool) -> None:
    door, client = Door(), ReportedTo("one <end>", "done <end>")
    door.parks = parks
    admission = {"policy": "parking", "replicas": 1, "memory": {"num_blocks": 9, "block_tokens": 16}}
    run(lambda: _behind(door, client, FakeEnvironment(), admission=admission))
    # The first turn had 6 tokens and computed 6 + 2 - 1, of which the second found 3.
    assert door.caches == ([] if parks else [(6, 7, 3, 0)])
    assert door.replicas == [9, 8]  # as the router says


def test_waiting_for_admission_is_on_its_own_account_and_not_on_the_deadlines() -> None:
    door, client = Door(wait_s=0.7), FakeClient("one <end>", "done <end>")
    output = run(lambda: _behind(door, client, FakeEnvironment(), trajectory_deadline_s=0.5))
    figures = output.extra_fields["makespan"]
    assert figures["state"] == "finished"  # after more than 2.1 s
    assert figures["admission_s"] >= 3 * 0.7
    assert figures["generate_s"] < 0.7
    client.hang = True  # the control: the deadline is still there once it has been admitted
    assert_failed(
        run(lambda: _behind(Door(wait_s=0.7), client, FakeEnvironment(), trajectory_deadline_s=0.1)), "timeout"
    )


@pytest.mark.parametrize("when", ["admit", "reach"])
def test_a_trajectory_cancelled_while_it_waits_is_given_up_everywhere(when: str) -> None:
    door, client = Door(wait_s=60.0), FakeClient()
    environment = Watched(door)
    if when == "reach":
        door.admit = Unreported().admit  # type: ignore[method-assign]

    async def play() -> None:
        task = asyncio.create_task(_behind(door, client, environment).run({}, **ROW))
        await door.waited_at.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(play())
    assert door.log == (["admit", "given up"] if when == "admit" else ["open", 6, "given up"])
    assert (environment.closed, client.over, client.requests) == (int(when == "reach"), ["g_1"], [])


def test_a_trajectory_that_fails_gives_its_place_back() -> None:
    door = Door()
    run(lambda: _behind(door, FakeClient(), Watched(door, fail_open=EnvironmentFailure("refused", "no such task"))))
    assert door.log == ["admit", "open", "given up"]


@pytest.mark.parametrize(
    ("admission", "named"),
    [
        ({"policy": "parking", "concurrency": 4}, "needs admission.memory"),
        ({"policy": "fixed"}, "needs admission.concurrency"),
        ({"policy": "everything", "concurrency": 4}, "must be null, not 4"),
        ({"policy": "fixed", "concurrency": 4, "reference": 8}, "only 'parking' goes by it"),
        ({"polcy": "fixed"}, "`polcy`"),
    ],
)
def test_an_admission_that_cannot_be_is_a_mistake_of_the_user_and_named(
    admission: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    output = run(lambda: make_loop(FakeClient(), FakeEnvironment(), admission=OmegaConf.create(admission)))
    assert named in caplog.text
    assert_failed(output, "configuration")


def test_admission_as_verl_hands_it_over_is_understood() -> None:
    written = {"policy": "parking", "concurrency": None, "replicas": 2, "memory": {"num_blocks": 9, "block_tokens": 16}}
    loop = make_loop(FakeClient(), FakeEnvironment(), admission=OmegaConf.create(written))
    assert loop._settings.admission.memory.memory().capacity == 8
