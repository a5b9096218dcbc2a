"""No slot idles while an action that it could run waits: checked from the broker's event log of randomised runs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from makespan.envs import worker_protocol as wp
from makespan.envs.client import EnvClient
from makespan.envs.protocol import Cancel
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.trajectory import Task
from tests.envs.bench_broker import BenchBroker
from tests.envs.plane import open_session, step


def actions_in(path: Path) -> list[dict[str, Any]]:
    """The `action` events of a broker's log."""
    lines = path.read_text().splitlines()[1:]
    events = [json.loads(line) for line in lines]
    return [event["data"] for event in events if event["kind"] == "action"]


def idle_while_waiting_s(actions: list[dict[str, Any]], slots: dict[str, int]) -> float:
    """The longest time that some class had a free slot and a waiting action; fails if it ran more than it may."""
    longest = 0.0
    for slot_class, count in slots.items():
        changes: list[tuple[float, int, int]] = []  # when, change of waiting, change of running
        for action in (one for one in actions if one["slot_class"] == slot_class):
            left = action["released_s"] if action["granted_s"] is None else action["granted_s"]
            changes += [(action["submitted_s"], 1, 0), (left, -1, 0)]
            if action["granted_s"] is not None:
                changes += [(action["granted_s"], 0, 1), (action["released_s"], 0, -1)]
        waiting = running = 0
        idle_since: float | None = None
        for when, waits, runs in sorted(changes, key=lambda change: (change[0], change[2])):
            if idle_since is not None:
                longest = max(longest, when - idle_since)
            waiting, running = waiting + waits, running + runs
            assert running <= count, f"{running} actions hold the {count} slots of {slot_class}"
            idle_since = when if waiting > 0 and running < count else None
    return longest


def test_the_check_sees_an_idle_slot() -> None:
    def action(submitted: float, granted: float | None, released: float) -> dict[str, Any]:
        return {"slot_class": "c", "submitted_s": submitted, "granted_s": granted, "released_s": released}

    assert idle_while_waiting_s([action(0, 0, 4), action(1, 4, 5), action(2, None, 3)], {"c": 1}) == 0
    assert idle_while_waiting_s([action(0, 0, 4), action(1, 4, 5)], {"c": 2}) == 3


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["open", "act", "finish", "cancel", "raise", "stop", "wait", "lose"]), st.integers(0, 11)
    ),
    min_size=20,
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, starts=st.integers(1, 3), steps=st.integers(1, 3))
def test_exactly_on_a_bench(tmp_path_factory: Any, operations: list[tuple[str, int]], starts: int, steps: int) -> None:
    """On a clock that only moves between messages, not a moment may be idle."""
    path = tmp_path_factory.mktemp("log") / "broker.jsonl"
    slots = {"e.start": starts, "e.step": steps}
    broker = BenchBroker(slots, log_path=path, worker_timeout_s=1e9)
    broker.join()
    broker.hello(b"a", lease_s=300.0)
    seqs: dict[str, int] = {}
    running: list[tuple[str, int]] = []
    for what, number in operations:
        broker.now += 0.01
        names = list(seqs)
        session = names[number % len(names)] if names else ""
        if what == "open":
            name = f"s{len(seqs)}"
            seqs[name] = 0
            broker.open(b"a", name, key=float(-number))
        elif what == "act" and names:
            seqs[session] += 1
            broker.act(b"a", session, seqs[session], key=float(number))
        elif what in ("finish", "raise") and running:
            name, seq = running.pop(number % len(running))
            failed: dict[str, Any] = {"kind": "raised", "closed": True} if what == "raise" else {}
            broker.finish(b"a", name, seq, **failed)
        elif what == "cancel" and names:
            broker.say(b"a", Cancel(id="c", request=f"{session}/{seqs[session]}" if seqs[session] else session))
        elif what == "lose" and number == 0:
            broker.broker.lose_worker("w1", "test")
            broker.orders.clear()
            running.clear()
            broker.join()
        elif what == "wait":
            broker.wait(0.5)
            broker.hello(b"a", lease_s=300.0)
        for order in broker.take_orders():
            if isinstance(order, wp.Start | wp.Step):
                running.append((order.sid.rpartition(":")[2], order.seq if isinstance(order, wp.Step) else 0))
            elif isinstance(order, wp.Stop):
                broker.report(wp.Stopped(sid=order.sid))
        running = [entry for entry in running if entry[0] in seqs]
    broker.wait(1e6)  # every deadline passes
    for order in broker.take_orders():
        if isinstance(order, wp.Stop):
            broker.report(wp.Stopped(sid=order.sid))
    broker.event_log.close()
    assert idle_while_waiting_s(actions_in(path), slots) == 0.0


def test_in_a_real_run_with_failures_and_withdrawals(
    serve: Any, tmp_path: Path, counting_task: Callable[..., Task]
) -> None:
    """With processes a grant follows a release within one turn of the broker, which a busy machine may stretch."""
    slots = {"counting.start": 3, "counting.step": 5}

    async def chain(client: EnvClient, number: int, rng: random.Random) -> None:
        raise_in = rng.choice([None, None, 0, 2])
        payload = {"step_s": rng.random() * 0.03, "reset_s": rng.random() * 0.02, "length": 6}
        if raise_in is not None:
            payload["raise_in"] = raise_in
        try:
            async with asyncio.timeout(rng.choice([0.1, 60.0, 60.0])):
                session, _, _ = await open_session(client, counting_task(f"t{number}", **payload), key=rng.random())
                for _ in range(6):
                    await step(session, key=rng.random())
                await session.close()
        except (EnvironmentFailure, TimeoutError):
            pass

    async def main() -> None:
        async with serve(slots=slots) as address, EnvClient(address, job="test") as client:
            await asyncio.gather(*(chain(client, number, random.Random(number)) for number in range(80)))

    asyncio.run(main())
    actions = actions_in(tmp_path / "broker.jsonl")
    assert len(actions) > 200
    assert {action["outcome"] for action in actions} >= {"ok", "raised", "cancelled"}
    assert max(action["granted_s"] - action["submitted_s"] for action in actions if action["granted_s"]) > 0.05
    assert idle_while_waiting_s(actions, slots) < 0.25
