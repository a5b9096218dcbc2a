"""The action gate against an independent, slow model of who may start next."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makespan.rollout.errors import ConfigError
from makespan.rollout.gate import ActionGate, RateLimit

KEYS = st.one_of(st.integers(-3, 3).map(float), st.just(math.inf), st.just(-math.inf))
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["submit", "release", "cancel", "rekey", "rekey_all"]), st.integers(0, 30), KEYS),
    max_size=80,
)


class Model:
    """What the gate's docstring promises, by brute force over plain lists."""

    def __init__(self, slots: int, oldest_every: int) -> None:
        self.slots = slots
        self.oldest_every = oldest_every
        self.waiting: list[tuple[int, float, str]] = []  # (ticket, key, job) in order of arrival
        self.running: list[tuple[int, str]] = []
        self.grants: list[str] = []  # the job of each grant

    def grant(self) -> list[int]:
        granted = []
        while self.waiting and len(self.running) < self.slots:
            jobs = {job for _, _, job in self.waiting}

            def rank(job: str) -> tuple[int, int]:
                held = sum(1 for _, other in self.running if other == job)
                last = max((i for i, other in enumerate(self.grants) if other == job), default=-1)
                return held, last

            best = min(rank(job) for job in jobs)
            tied = [job for job in jobs if rank(job) == best]
            if len(tied) > 1:  # jobs that were never granted: the one that began to wait first
                tied.sort(key=lambda job: self.backlog_since[job])
            job = tied[0]
            mine = [entry for entry in self.waiting if entry[2] == job]
            turn = self.grants.count(job) + 1
            chosen = mine[0] if turn % self.oldest_every == 0 else min(mine, key=lambda entry: entry[1])
            self.waiting.remove(chosen)
            self.running.append((chosen[0], job))
            self.grants.append(job)
            granted.append(chosen[0])
            self.track()
        return granted

    backlog_since: dict[str, int]
    clock = 0

    def track(self) -> None:
        jobs = {job for _, _, job in self.waiting}
        self.backlog_since = {job: since for job, since in getattr(self, "backlog_since", {}).items() if job in jobs}
        for _, _, job in self.waiting:
            if job not in self.backlog_since:
                self.clock += 1
                self.backlog_since[job] = self.clock


@settings(max_examples=300, deadline=None)
@given(OPERATIONS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_the_gate_grants_whom_its_docstring_promises(
    operations: list[tuple[str, int, float]], slots: int, oldest_every: int, jobs: int
) -> None:
    gate: ActionGate[int] = ActionGate(slots, oldest_every=oldest_every)
    model = Model(slots, oldest_every)
    submitted: set[int] = set()
    for operation, ticket, key in operations:
        waiting = [entry[0] for entry in model.waiting]
        running = [entry[0] for entry in model.running]
        if operation == "submit" and ticket not in submitted:
            submitted.add(ticket)
            gate.submit(ticket, key, job=str(ticket % jobs))
            model.waiting.append((ticket, key, str(ticket % jobs)))
        elif operation == "release" and running:
            gate.release(running[ticket % len(running)])
            del model.running[ticket % len(running)]
        elif operation == "cancel":
            assert gate.cancel(ticket) == (ticket in waiting)
            model.waiting = [entry for entry in model.waiting if entry[0] != ticket]
        elif operation == "rekey":
            assert gate.rekey(ticket, key) == (ticket in waiting)
            model.waiting = [(t, key if t == ticket else k, j) for t, k, j in model.waiting]
        elif operation == "rekey_all":
            assert gate.rekey_all((t, key * (t % 3)) for t in range(31) if not math.isinf(key)) == (
                0 if math.isinf(key) else len(waiting)
            )
            if not math.isinf(key):
                model.waiting = [(t, key * (t % 3), j) for t, _, j in model.waiting]
        model.track()
        assert gate.grant(0.0) == model.grant()
        figures = gate.statistics()
        assert (figures.running, figures.waiting) == (len(model.running), len(model.waiting))
        assert figures.running == slots or figures.waiting == 0  # work conservation
        assert gate.oldest_waiting() == (model.waiting[0][0] if model.waiting else None)


@given(st.integers(0, 20), st.integers(2, 8))
def test_no_action_waits_longer_than_the_stated_bound(older: int, oldest_every: int) -> None:
    gate: ActionGate[str] = ActionGate(1, oldest_every=oldest_every)
    gate.submit("first", 0.0)
    gate.grant(0.0)
    for number in range(older):
        gate.submit(f"older {number}", 1.0)
    gate.submit("victim", math.inf)
    holder, grants = "first", 0
    while holder != "victim":  # an endless stream of actions that always sort before it
        gate.submit(f"newer {grants}", -1.0)
        gate.release(holder)
        (holder,) = gate.grant(0.0)
        grants += 1
        assert grants <= oldest_every * (older + 1)


def test_jobs_share_slots_equally_and_leave_no_slot_idle() -> None:
    gate: ActionGate[tuple[str, int]] = ActionGate(4)
    for number in range(6):
        gate.submit(("greedy", number), job="greedy")
    assert len(gate.grant(0.0)) == 4  # alone, it may have all of them
    for number in range(6):
        gate.submit(("late", number), job="late")
    started = []
    for number in range(4):
        gate.release(("greedy", number))
        started += gate.grant(0.0)
    # Holding 3 and 0, then 2 and 1, the late job is owed a slot; holding 1 and 2, the greedy one is.
    assert started == [("late", 0), ("late", 1), ("greedy", 4), ("greedy", 5)]
    assert gate.statistics().running == 4


def test_a_rate_limit_spaces_grants_and_says_when_the_next_one_is_due() -> None:
    gate: ActionGate[int] = ActionGate(100, rate=RateLimit(per_s=2.0, burst=3))
    for number in range(8):
        gate.submit(number)
    assert gate.grant(10.0) == [0, 1, 2]
    assert gate.next_grant_s(10.0) == pytest.approx(10.5)
    assert gate.grant(10.4) == []
    assert gate.grant(10.5) == [3]
    assert gate.grant(12.0) == [4, 5, 6]
    assert gate.grant(100.0) == [7]
    assert gate.next_grant_s(100.0) is None  # nobody waits


def test_a_full_gate_waits_for_a_release_not_for_time() -> None:
    gate: ActionGate[int] = ActionGate(1, rate=RateLimit(per_s=1.0, burst=1))
    gate.submit(0)
    gate.submit(1)
    assert gate.grant(0.0) == [0]
    assert gate.next_grant_s(0.0) is None
    assert gate.grant(50.0) == []


def test_adopted_actions_hold_slots_even_above_the_count() -> None:
    gate: ActionGate[str] = ActionGate(1)
    gate.adopt("a")
    gate.adopt("b")
    gate.submit("c")
    assert gate.grant(0.0) == []
    gate.release("a")
    assert gate.grant(0.0) == []
    gate.release("b")
    assert gate.grant(0.0) == ["c"]


def test_wrong_use_is_an_error_and_changes_nothing() -> None:
    gate: ActionGate[int] = ActionGate(1)
    gate.submit(1)
    with pytest.raises(ValueError, match="already"):
        gate.submit(1)
    with pytest.raises(ValueError, match="holds no slot"):
        gate.release(1)
    not_numbers = (
        lambda: gate.submit(2, math.nan),
        lambda: gate.rekey(1, math.nan),
        lambda: gate.rekey_all([(1, math.nan)]),
    )
    for call in not_numbers:
        with pytest.raises(ValueError, match="not a number"):
            call()
    assert gate.statistics().waiting == 1
    assert gate.grant(0.0) == [1]


@pytest.mark.parametrize("make", [lambda: ActionGate(0), lambda: ActionGate(-3), lambda: ActionGate(1, oldest_every=0)])
def test_impossible_gates_are_refused(make: object) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("rate", [RateLimit(0.0), RateLimit(math.inf), RateLimit(1.0, burst=0)])
def test_impossible_rates_are_refused(rate: RateLimit) -> None:
    with pytest.raises(ConfigError, match="rate limit"):
        ActionGate(1, rate=rate)


def test_a_decision_stays_fast_with_ten_thousand_waiting() -> None:
    gate: ActionGate[int] = ActionGate(8)
    for number in range(10_008):
        gate.submit(number, float(-number % 997))
    running = gate.grant(0.0)
    took = []
    for number in range(2_000):
        started = time.perf_counter()
        gate.release(running.pop(0))
        gate.rekey(number * 4 % 10_008, 0.5)
        gate.submit(20_000 + number, float(number % 991))
        running += gate.grant(0.0)
        took.append(time.perf_counter() - started)
    assert gate.statistics().waiting == 10_000
    took.sort()
    assert took[int(0.99 * len(took))] < 0.002  # seconds
