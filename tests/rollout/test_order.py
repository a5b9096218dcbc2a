import pytest

from makespan.rollout.coordinator import Coordinator
from makespan.rollout.errors import ConfigError
from makespan.rollout.history import ChainRecord, History
from makespan.rollout.order import ForecastOrder, make_order, smaller_limit


def batch(history=None, groups=3, samples=4):
    coordinator = Coordinator(history, slots={"env": 2})
    coordinator.begin()
    ids = [(f"{group}#{sample}", group) for group in "abcdefgh"[:groups] for sample in range(samples)]
    for trajectory_id, group in ids:
        coordinator.join(trajectory_id, group, "env")
    return coordinator, [trajectory_id for trajectory_id, _ in ids]


def all_of(order, ids):
    for trajectory_id in ids:
        order.submit(trajectory_id)
    return [order.next() for _ in range(len(order))]


def taught(lengths, turn_s=lambda number: 1.0):
    """A history that has seen these prompts twice, with these lengths and the same seconds a turn."""
    history = History()
    for _ in range(2):
        history.learn(
            ChainRecord(name, length, length, length * turn_s(number), 10)
            for number, (name, length) in enumerate(lengths.items())
        )
    return history


LENGTHS = {"a": 3, "b": 9, "c": 30} | {f"other-{n}": n + 1 for n in range(8)}


def test_arrival_is_first_come_first_served():
    coordinator, ids = batch()
    assert all_of(make_order("arrival", coordinator, 2), ids) == ids


def test_without_memory_the_first_two_of_every_group_start_first_and_then_who_takes_longest():
    coordinator, ids = batch()
    order = ForecastOrder(coordinator, concurrency=3)
    for trajectory_id in ids:
        order.submit(trajectory_id)
    assert [order.next() for _ in range(6)] == ["a#0", "b#0", "c#0", "a#1", "b#1", "c#1"]
    coordinator.started("b#0")
    for turn in range(40):  # b's first chain runs and runs, a's and c's end at once
        coordinator.inferred("b#0", 1.0, 100 + turn)
        coordinator.acted("b#0", 1.0)
    for chain in ("a#0", "c#0"):
        coordinator.started(chain)
        coordinator.inferred(chain, 1.0, 100)
        coordinator.acted(chain, 1.0)
        coordinator.end(chain, counts=True)
    coordinator.rekeys(1.0)
    assert [order.next(), order.next()] == ["b#2", "b#3"]


def test_with_a_memory_that_predicts_the_longest_start_first():
    coordinator, ids = batch(taught(LENGTHS))
    assert [name[0] for name in all_of(ForecastOrder(coordinator, concurrency=3), ids)] == [*"cccc", *"bbbb", *"aaaa"]


def test_where_everything_fits_groups_take_turns_whatever_is_known():
    coordinator, ids = batch(taught(LENGTHS))
    for concurrency in (None, 12):
        started = all_of(ForecastOrder(coordinator, concurrency), ids)
        assert [name[0] for name in started] == [*"abc"] * 4


def told(lengths, max_turns=None):
    """An order whose coordinator knows a last step with these lengths, of prompts that do not come back."""
    history = History()
    history.learn(ChainRecord(f"old-{n}", length, length, length, 10) for n, length in enumerate(lengths))
    coordinator, _ = batch(history)
    coordinator.begin(max_turns=max_turns)
    return ForecastOrder(coordinator, 3)


def test_trajectories_advance_evenly_where_a_cap_ends_most_of_them():
    assert told([20] * 60 + [60] * 40, max_turns=60).evenly()
    assert told([44, 47, 50, 50, 52] * 20).evenly()  # without a cap, but alike
    assert told([50] * 100).evenly()


def test_trajectories_do_not_advance_evenly_where_a_few_are_long():
    assert not told([20] * 80 + [60] * 20).evenly()  # 20 steps to the quartile, and 40 more for who goes on
    assert not told([5, 10, 15, 20, 30, 45, 90, 200] * 12).evenly()
    assert not told([]).evenly()  # nothing is known
    assert not ForecastOrder(Coordinator(), 3).evenly()  # nor is there anybody yet


def test_nor_where_records_of_the_prompts_tell_what_they_take_or_nobody_forecasts():
    """Lengths are alike, and records predict them. Where they tell the cost of a turn, too, the longest go first; else
    who takes long shows only on the way."""
    same = dict.fromkeys("abc", 50) | {f"other-{n}": 49 + n % 2 for n in range(40)}
    known, _ = batch(taught(same, turn_s=float))
    unknown, _ = batch(taught(same))
    for coordinator, told in ((known, True), (unknown, False)):
        assert coordinator.lengths_alike()
        assert coordinator.predicts()
        assert ForecastOrder(coordinator, 3).evenly() is not told
    coordinator = unknown
    assert not make_order("arrival", coordinator, 3).evenly()
    assert not make_order("oracle", coordinator, 3, lambda trajectory_id, turn: 1.0).evenly()


def test_what_runs_at_once_is_the_smaller_of_limit_and_reference():
    assert [smaller_limit(*pair) for pair in ((None, None), (4, None), (None, 5), (4, 5), (6, 5))] == [None, 4, 5, 4, 5]


def test_who_is_withdrawn_is_never_started():
    coordinator, ids = batch()
    oracle = make_order("oracle", coordinator, 3, lambda trajectory_id, turn: float(len(trajectory_id)))
    for order in (ForecastOrder(coordinator, 3), make_order("arrival", coordinator, 3), oracle):
        for trajectory_id in ids:
            order.submit(trajectory_id)
        order.withdraw("b#1")
        order.withdraw("never seen")
        assert len(order) == len(ids) - 1
        assert "b#1" not in [order.next() for _ in range(len(order))]
        with pytest.raises(IndexError):
            order.next()


def test_a_second_batch_starts_breadth_first_again():
    coordinator, ids = batch()
    order = ForecastOrder(coordinator, concurrency=3)
    first = all_of(order, ids)
    assert all_of(order, ids) == first


def test_the_oracle_starts_the_longest_first_and_equal_ones_by_arrival():
    coordinator, ids = batch()
    true_s = {"a": 3.0, "b": 9.0, "c": 30.0}
    order = make_order(
        "oracle", coordinator, 3, lambda trajectory_id, turn: true_s[trajectory_id[0]] if turn == 0 else 0
    )
    assert all_of(order, ids) == [*ids[8:], *ids[4:8], *ids[:4]]


def test_the_oracle_needs_a_trace():
    with pytest.raises(ConfigError, match="'oracle' knows the future from a trace"):
        make_order("oracle", Coordinator(), None)


def test_an_unknown_order_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'forecast'"):
        make_order("forcast", Coordinator(), None)
