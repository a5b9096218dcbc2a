"""The broker's state machine, message by message, on a clock that the test moves."""

from __future__ import annotations

import math
import time

import msgspec
import pytest

from makespan.envs import worker_protocol as wp
from makespan.envs.protocol import (
    Busy,
    Bye,
    Cancel,
    Close,
    Failure,
    HelloRequired,
    Lease,
    Rekey,
    Release,
    Reply,
    Result,
    Welcome,
    encode,
)
from makespan.rollout.gate import RateLimit
from tests.envs.bench_broker import BenchBroker

A, B = b"client-a", b"client-b"
ONE = {"e.start": 1, "e.step": 1}


def bench(slots: dict[str, int] | None = None, **bounds: object) -> BenchBroker:
    broker = BenchBroker(slots or {"e.start": 9, "e.step": 1}, **bounds)  # type: ignore[arg-type]
    broker.join()
    broker.hello(A, job="a")
    broker.hello(B, job="b")
    return broker


def opened(broker: BenchBroker, client: bytes, *sessions: str) -> None:
    for session in sessions:
        broker.open(client, session)
        broker.finish(client, session, 0)
    broker.take_orders()


def kinds(replies: list[Reply]) -> list[str]:
    return [reply.kind if isinstance(reply, Failure) else type(reply).__name__ for reply in replies]


def steps(orders: list[wp.ToWorker]) -> list[str]:
    return [f"{order.sid.rpartition(':')[2]}/{order.seq}" for order in orders if isinstance(order, wp.Step)]


def test_nothing_is_served_before_hello() -> None:
    broker = BenchBroker(ONE)
    broker.join()
    (reply,) = broker.open(b"stranger", "s")
    assert isinstance(reply, HelloRequired)
    assert broker.orders == []
    broker.hello(b"stranger", job="x", lease_s=7.0)
    welcome = broker.replies[-1][1]
    assert isinstance(welcome, Welcome)
    assert (welcome.environments, welcome.slots, welcome.lease_s) == (("e",), ONE, 7.0)


def test_a_repeated_request_is_answered_and_never_executed_again() -> None:
    broker = bench()
    broker.open(A, "s")
    assert broker.open(A, "s") == []  # pending: nothing to say yet
    assert len(broker.take_orders()) == 1
    broker.finish(A, "s", 0)
    broker.act(A, "s", 1)
    assert broker.act(A, "s", 1) == []
    assert steps(broker.take_orders()) == ["s/1"]
    broker.finish(A, "s", 1)
    first = broker.replies[-1]
    assert [(A, reply) for reply in broker.act(A, "s", 1)] == [first]
    assert broker.open(A, "s") == []  # older than the last answer: its client has that answer
    broker.act(A, "s", 2)
    assert broker.act(A, "s", 1) == []
    assert steps(broker.take_orders()) == ["s/2"]


def test_requests_of_a_closed_session_are_not_executed_in_whatever_order_they_come() -> None:
    broker = bench()
    assert kinds(broker.say(A, Close(id="c", session="late"))) == ["Result"]
    assert broker.open(A, "late") == []
    opened(broker, A, "s")
    broker.say(A, Close(id="c2", session="s"))
    broker.report(wp.Stopped(sid=broker.sid(A, "s")))
    broker.take_orders()
    assert broker.open(A, "s") == []
    assert kinds(broker.act(A, "s", 1)) == ["unknown_session"]
    assert broker.take_orders() == []


def test_a_session_runs_one_action_at_a_time_under_one_id_each() -> None:
    broker = bench({"e.start": 9, "e.step": 9})
    opened(broker, A, "s", "t")
    broker.act(A, "s", 1)
    assert kinds(broker.act(A, "s", 2)) == ["protocol"]
    assert kinds(broker.act(A, "s", 1, "another id")) == ["protocol"]
    assert kinds(broker.act(A, "t", 1, "s/1")) == ["protocol"]  # the id of another session's action
    assert steps(broker.take_orders()) == ["s/1"]


def test_clients_cannot_reach_each_others_sessions() -> None:
    broker = bench()
    opened(broker, A, "s")
    assert kinds(broker.act(B, "s", 1)) == ["unknown_session"]
    broker.say(B, Close(id="c", session="s"))
    broker.say(B, Cancel(id="x", request="s"))
    broker.open(B, "s")  # the same name is another session
    broker.finish(B, "s", 0)
    broker.act(A, "s", 1)
    broker.finish(A, "s", 1)
    assert [identity for identity, _ in broker.replies[-1:]] == [A]


def test_smallest_key_first_and_a_rekey_moves_waiting_actions() -> None:
    broker = bench()
    opened(broker, A, "s", "t", "u", "v")
    for session, key in (("s", 0.0), ("t", 5.0), ("u", 4.0), ("v", 3.0)):
        broker.act(A, session, 1, key=key)
    assert kinds(broker.say(A, Rekey(id="r", keys={"t/1": 1.0, "s/1": 9.0, "nobody": 0.0}))) == ["Result"]
    for session in "stvu":
        assert steps(broker.take_orders()) == [f"{session}/1"]
        broker.finish(A, session, 1)
    assert kinds(broker.say(A, Rekey(id="r2", keys={"t/1": math.nan}))) == ["protocol"]
    assert kinds(broker.act(A, "s", 2, key=math.nan)) == ["protocol"]


def test_two_jobs_share_the_slots_of_a_class() -> None:
    broker = bench({"e.start": 99, "e.step": 2})
    many = [f"s{number}" for number in range(6)]
    opened(broker, A, *many)
    opened(broker, B, "t0", "t1")
    for session in many:
        broker.act(A, session, 1)
    for session in ("t0", "t1"):
        broker.act(B, session, 1, key=1e9)  # a key orders a job's own actions, not other jobs'
    assert steps(broker.take_orders()) == ["s0/1", "s1/1"]
    broker.finish(A, "s0", 1)
    assert steps(broker.take_orders()) == ["t0/1"]
    broker.finish(A, "s1", 1)
    assert steps(broker.take_orders()) == ["s2/1"]
    broker.finish(B, "t0", 1)
    assert steps(broker.take_orders()) == ["t1/1"]


def test_a_waiting_action_that_is_cancelled_never_runs_and_its_session_goes_on() -> None:
    broker = bench()
    opened(broker, A, "s", "t")
    broker.act(A, "s", 1)
    broker.act(A, "t", 1)
    assert kinds(broker.say(A, Cancel(id="c", request="t/1"))) == ["cancelled", "Result"]
    broker.finish(A, "s", 1)
    assert steps(broker.take_orders()) == ["s/1"]
    assert kinds(broker.act(A, "t", 1)) == ["cancelled"]  # the same id gets the same answer
    broker.act(A, "t", 2)
    assert steps(broker.take_orders()) == ["t/2"]


def test_a_running_action_that_is_cancelled_keeps_its_slot_until_the_worker_confirms() -> None:
    broker = bench()
    opened(broker, A, "s", "t")
    broker.act(A, "s", 1)
    broker.act(A, "t", 1)
    broker.take_orders()
    assert kinds(broker.say(A, Cancel(id="c", request="s/1"))) == ["cancelled", "Result"]
    assert broker.take_orders() == [wp.Stop(sid=broker.sid(A, "s"))]
    assert kinds(broker.act(A, "s", 2)) == ["unknown_session"]
    broker.report(wp.Stopped(sid=broker.sid(A, "s")))
    assert steps(broker.take_orders()) == ["t/1"]


def test_a_slot_is_freed_without_the_workers_word_after_the_grace() -> None:
    broker = bench(stop_grace_s=10.0)
    opened(broker, A, "s", "t")
    broker.act(A, "s", 1)
    broker.act(A, "t", 1)
    broker.say(A, Close(id="c", session="s"))
    broker.take_orders()
    broker.wait(9.0)
    assert steps(broker.take_orders()) == []
    broker.wait(1.1)
    assert steps(broker.take_orders()) == ["t/1"]
    broker.finish(A, "s", 1)  # late: it is nobody's any more
    assert wp.Stop(sid=broker.sid(A, "s")) in broker.take_orders()
    assert broker.broker.counters["late_outcomes"] == 1


def test_deadlines_answer_waiting_and_running_actions() -> None:
    broker = bench()
    opened(broker, A, "s", "t")
    broker.act(A, "s", 1, deadline_s=5.0)
    broker.act(A, "t", 1, deadline_s=2.0)
    before = len(broker.replies)
    broker.wait(2.1)
    broker.wait(3.0)
    answers = [reply for _, reply in broker.replies[before:]]
    assert [(a.id, a.kind, a.retryable) for a in answers if isinstance(a, Failure)] == [
        ("t/1", "timeout", True),  # it never ran
        ("s/1", "timeout", False),
    ]
    assert wp.Stop(sid=broker.sid(A, "s")) in broker.take_orders()


def test_busy_past_the_bound_and_served_when_asked_again() -> None:
    broker = bench(max_queued=1)
    opened(broker, A, "s", "t", "u")
    broker.act(A, "s", 1)
    broker.act(A, "t", 1)
    (busy,) = broker.act(A, "u", 1)
    assert isinstance(busy, Busy)
    assert busy.retry_after_s > 0
    broker.finish(A, "s", 1)
    assert broker.act(A, "u", 1) == []
    broker.finish(A, "t", 1)
    assert steps(broker.take_orders()) == ["s/1", "t/1", "u/1"]


def test_a_silent_clients_sessions_end_with_its_lease_and_a_talking_ones_do_not() -> None:
    broker = BenchBroker({"e.start": 9, "e.step": 9}, worker_timeout_s=1e6)
    broker.join()
    broker.hello(A, lease_s=3.0)
    broker.hello(B, lease_s=3.0)
    opened(broker, A, "s")
    opened(broker, B, "t")
    for _ in range(4):
        broker.wait(1.0)
        broker.hello(B, lease_s=3.0)
    assert broker.take_orders() == [wp.Stop(sid=broker.sid(A, "s"))]
    assert broker.broker.status().clients == 1
    assert broker.broker.status().sessions == 1


def test_a_lost_worker_fails_its_running_actions_as_unknown_and_its_waiting_ones_as_not_run() -> None:
    broker = bench()
    opened(broker, A, "s", "t", "u")
    broker.act(A, "s", 1)
    broker.act(A, "t", 1)
    before = len(broker.replies)
    broker.broker.lose_worker("w1", "it was killed")
    answers = [reply for _, reply in broker.replies[before:] if isinstance(reply, Failure)]
    assert {answer.id: answer.kind for answer in answers} == {"s/1": "unknown_outcome", "t/1": "unknown_session"}
    assert steps(broker.take_orders()) == ["s/1"]
    assert kinds(broker.act(A, "u", 1)) == ["unknown_session"]
    assert broker.broker.status().slots["e.step"].running == 0
    assert broker.open(A, "new") == []  # it waits for a worker
    broker.join(b"w2")
    broker.finish(A, "new", 0, b"w2")
    assert kinds([reply for _, reply in broker.replies[-1:]]) == ["Result"]


def test_a_worker_given_up_too_early_is_told_to_stop_what_was_given_up() -> None:
    broker = bench(worker_timeout_s=5.0)
    opened(broker, A, "s")
    broker.act(A, "s", 1)
    broker.take_orders()
    broker.wait(5.1)
    assert kinds([reply for _, reply in broker.replies[-1:]]) == ["unknown_outcome"]
    broker.finish(A, "s", 1)
    assert [type(order) for order in broker.take_orders()] == [wp.WhoAreYou]
    hosted = wp.HostedSession(
        sid=broker.sid(A, "s"),
        client=A.decode(),
        session="s",
        environment="e",
        trajectory_id="s",
        job="a",
        seq=1,
        running=False,
    )
    broker.report(wp.Introduce(worker_id="w1", pid=1, environments=("e",), sessions=(hosted,)))
    assert wp.Stop(sid=hosted.sid) in broker.take_orders()
    assert kinds(broker.act(A, "s", 1)) == ["unknown_outcome"]  # still the answer


@pytest.mark.parametrize("finished_before_the_client_asks", [False, True])
def test_a_new_broker_goes_on_with_what_its_workers_host(finished_before_the_client_asks: bool) -> None:
    broker = BenchBroker({"e.start": 9, "e.step": 1}, expected_workers=1)
    broker.hello(A)
    hosted = {
        name: wp.HostedSession(
            sid=broker.sid(A, name),
            client=A.decode(),
            session=name,
            environment="e",
            trajectory_id=name,
            job="a",
            seq=3,
            running=name == "runs",
        )
        for name in ("runs", "done")
    }
    assert broker.act(A, "done", 3) == []  # held back: no worker has told what it hosts
    assert broker.open(A, "fresh") == []
    assert broker.orders == []
    broker.broker.receive_worker(
        b"w1", encode(wp.Introduce(worker_id="w1", pid=1, environments=("e",), sessions=tuple(hosted.values())))
    )
    orders = broker.take_orders()
    assert wp.Recall(sid=hosted["done"].sid, seq=3) in orders
    assert sum(isinstance(order, wp.Start) for order in orders) == 1
    assert broker.broker.status().slots["e.step"].running == 1  # what runs already holds a slot
    broker.finish(A, "done", 3)
    assert broker.replies[-1][1] == Result(id="done/3", slot_class="e.step")
    if finished_before_the_client_asks:
        broker.finish(A, "runs", 3)
        assert broker.act(A, "runs", 3) == []
        assert broker.take_orders() == [wp.Recall(sid=hosted["runs"].sid, seq=3)]
    else:
        assert broker.act(A, "runs", 3) == []
        assert broker.take_orders() == []  # it runs: its outcome will come
    broker.finish(A, "runs", 3)
    answer = broker.replies[-1][1]
    assert isinstance(answer, Result)
    assert answer.id == "runs/3"
    assert broker.broker.status().slots["e.step"].running == 0
    broker.act(A, "runs", 4)
    assert steps(broker.take_orders()) == ["runs/4"]


def test_a_new_broker_does_not_wait_for_missing_workers_for_ever() -> None:
    broker = BenchBroker(ONE, expected_workers=2, settle_s=10.0)
    broker.hello(A)
    broker.join(b"w1")
    broker.open(A, "s")
    broker.wait(9.0)
    assert broker.orders == []
    broker.hello(A)
    broker.wait(1.5)
    assert [type(order) for order in broker.take_orders() if isinstance(order, wp.Start)] == [wp.Start]


def test_a_lease_holds_a_slot_until_it_is_released() -> None:
    broker = bench({"tool.tool": 1})
    (granted,) = broker.say(A, Lease(id="l", slot_class="tool.tool"))
    assert granted == Result(id="l", slot_class="tool.tool")
    assert broker.say(B, Lease(id="l", slot_class="tool.tool")) == []  # waits; the same id is another client's
    assert broker.say(A, Lease(id="l", slot_class="tool.tool")) == [granted]
    broker.wait(2.0)
    (released,) = broker.say(A, Release(id="r", lease="l"))
    assert isinstance(released, Result)
    assert released.service_s == pytest.approx(2.0)
    identity, second = broker.replies[-2]
    assert (identity, type(second)) == (B, Result)
    assert kinds(broker.say(A, Release(id="r", lease="l"))) == ["Result"]  # a copy of the release
    assert kinds(broker.say(A, Lease(id="m", slot_class="tol.tool"))) == ["refused"]


def test_a_lease_that_expires_frees_its_slot_and_is_counted_for_its_tool_may_still_run() -> None:
    broker = bench({"tool.tool": 1})
    broker.say(A, Lease(id="l", slot_class="tool.tool", hold_s=5.0))
    broker.say(B, Lease(id="m", slot_class="tool.tool", hold_s=500.0))
    broker.wait(5.1)
    assert broker.replies[-1][0] == B
    assert broker.broker.counters["leases_expired"] == 1
    assert kinds(broker.say(A, Release(id="r", lease="l"))) == ["unknown_session"]
    broker.say(B, Bye(id="bye"))  # leaves with a lease in hand
    assert broker.broker.counters["leases_expired"] == 2
    assert broker.broker.status().slots["tool.tool"].running == 0


def test_a_lease_that_an_earlier_broker_granted_is_counted_at_once() -> None:
    broker = bench({"tool.tool": 1})
    broker.say(A, Lease(id="l", slot_class="tool.tool"))
    assert kinds(broker.say(B, Lease(id="m", slot_class="tool.tool", held=True))) == ["Result"]
    assert broker.broker.status().slots["tool.tool"].running == 2
    assert broker.say(B, Lease(id="n", slot_class="tool.tool")) == []
    broker.say(A, Release(id="r", lease="l"))
    assert broker.replies[-1][1].id == "r"  # type: ignore[union-attr]  # one slot, still taken
    broker.say(B, Release(id="r", lease="m"))
    assert [reply.id for to, reply in broker.replies[-2:]] == ["n", "r"]  # type: ignore[union-attr]


def test_a_rate_limit_spaces_grants_on_the_brokers_clock() -> None:
    broker = BenchBroker({"e.start": 9, "e.step": 9}, rates={"e.start": RateLimit(per_s=1.0, burst=2)})
    broker.join()
    broker.hello(A)
    for number in range(5):
        broker.open(A, f"s{number}")
    assert len(broker.take_orders()) == 2
    broker.wait(0.9)
    assert broker.take_orders() == []
    broker.wait(0.2)
    assert len(broker.take_orders()) == 1
    broker.wait(2.0)
    assert len(broker.take_orders()) == 2


def test_too_large_frames_and_other_versions_are_answered_and_counted() -> None:
    broker = bench(max_frame_bytes=2_000)
    broker.broker.receive_client(A, b"\x01" + b"x" * 2_000)
    broker.broker.receive_client(A, b"\x07")
    assert kinds([reply for _, reply in broker.replies[-2:]]) == ["protocol", "protocol"]
    counters = broker.broker.counters
    assert (counters["frames_too_large"], counters["frames_malformed"]) == (1, 1)


def test_a_request_with_a_field_out_of_its_range_is_refused_under_its_id() -> None:
    broker = bench()
    for id_, expected in (("mine", "mine"), ("", ""), ("x" * 513, ""), (7, "")):
        request = {"type": "act", "id": id_, "session": "s", "seq": 0, "action": {}}
        broker.broker.receive_client(A, b"\x01" + msgspec.msgpack.encode(request))
        reply = broker.replies[-1][1]
        assert isinstance(reply, Failure)
        assert (reply.id, reply.kind) == (expected, "protocol")


def test_what_a_confused_worker_says_grants_nothing() -> None:
    broker = bench()
    opened(broker, A, "s", "t")
    broker.act(A, "s", 1)
    broker.act(A, "t", 1)
    before = len(broker.replies)
    broker.finish(A, "t", 1)  # it waits in the gate: it cannot be over
    broker.finish(A, "s", 7)
    broker.report(wp.Stopped(sid="nobody"))
    broker.broker.receive_worker(b"w1", b"\x01garbage")
    assert broker.replies[before:] == []
    broker.report(wp.Stopped(sid=broker.sid(A, "t")))  # unasked: the session is gone, its action never ran
    assert kinds([reply for _, reply in broker.replies[before:]]) == ["unknown_session"]
    broker.finish(A, "s", 1)
    assert kinds([reply for _, reply in broker.replies[-1:]]) == ["Result"]


def test_resets_go_to_the_least_loaded_worker_and_steps_stay_with_it() -> None:
    broker = BenchBroker({"e.start": 99, "e.step": 99})
    broker.join(b"w1")
    broker.join(b"w2")
    broker.hello(A)
    for number in range(6):
        broker.open(A, f"s{number}")
    placed = [(identity, order.session) for identity, order in broker.orders if isinstance(order, wp.Start)]
    assert [identity for identity, _ in placed].count(b"w1") == 3
    for identity, session in placed:
        broker.finish(A, session, 0, identity)
        broker.orders.clear()
        broker.act(A, session, 1)
        assert broker.orders[0][0] == identity


def test_a_worker_that_may_have_missed_something_is_told_again() -> None:
    broker = bench(worker_timeout_s=60.0)
    opened(broker, A, "s")
    broker.act(A, "s", 1)
    broker.take_orders()
    broker.wait(5.0)
    broker.report(wp.Beat())
    assert steps(broker.take_orders()) == ["s/1"]
    broker.wait(0.5)
    broker.report(wp.Beat())
    assert steps(broker.take_orders()) == []


def test_ten_thousand_sessions_and_fifty_thousand_queued_actions_are_held_and_decided_quickly() -> None:
    broker = BenchBroker({"e.start": 10_000, "e.step": 4, "t.tool": 1}, worker_timeout_s=1e9)
    broker.join()
    broker.hello(A, lease_s=300.0)
    for number in range(10_000):
        broker.open(A, f"s{number}")
        broker.finish(A, f"s{number}", 0)
    for number in range(10_000):
        broker.act(A, f"s{number}", 1, key=float(-number), deadline_s=1e6)
    for number in range(40_005):
        broker.say(A, Lease(id=f"l{number}", slot_class="t.tool", deadline_s=1e6))
    report = broker.broker.status()
    assert report.sessions == 10_000
    assert sum(slot.waiting for slot in report.slots.values()) == 50_000
    broker.orders.clear()
    broker.replies.clear()
    running, took = [0, 1, 2, 3], []
    for turn in range(2_000):
        started = time.perf_counter()
        broker.finish(A, f"s{running.pop(0)}", 1)
        took.append(time.perf_counter() - started)
        (order,) = broker.take_orders()
        assert isinstance(order, wp.Step)
        running.append(int(order.sid.rpartition("s")[2]))
        if turn < 20:  # the smallest key first
            assert running[-1] == 9_999 - turn
    took.sort()
    assert took[int(0.99 * len(took))] < 0.002  # seconds
