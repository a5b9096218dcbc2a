"""Deadlines against a plain dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from makespan.envs.deadlines import Deadlines

STEPS = st.lists(
    st.tuples(st.sampled_from(["set", "clear", "pass"]), st.integers(0, 5), st.floats(0.0, 5.0)), max_size=60
)


@given(STEPS)
def test_items_expire_after_their_time_and_at_most_one_bucket_late(steps: list[tuple[str, int, float]]) -> None:
    deadlines: Deadlines[int] = Deadlines(granularity_s=0.25)
    expected: dict[int, float] = {}
    now = 0.0
    for what, item, amount in steps:
        if what == "set":
            deadlines.set(item, now + amount)
            expected[item] = now + amount
        elif what == "clear":
            deadlines.clear(item)
            expected.pop(item, None)
        else:
            now += amount
            over = deadlines.expired(now)
            assert len(over) == len(set(over))
            assert all(expected[item] <= now for item in over)
            for item in over:
                del expected[item]
            assert all(at > now - 0.25 for at in expected.values())
        assert len(deadlines) == len(expected)


def test_what_is_cleared_costs_nothing_later() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for number in range(10_000):
        deadlines.set(number, 600.0)
        deadlines.clear(number)
    assert len(deadlines) == 0
    assert deadlines.expired(1_000.0) == []
