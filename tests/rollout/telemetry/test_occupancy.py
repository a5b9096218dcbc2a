"""Sums over intervals, against counting in small steps and against values by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makespan.rollout.telemetry.occupancy import (
    Interval,
    admitted,
    busy_s,
    covered_s,
    mean_in_buckets,
    most_at_once,
    requests,
    slot_intervals,
)
from makespan.rollout.telemetry.timeline import rows
from tests.rollout.telemetry import batches, logs

# Whole numbers of ticks, so that counting tick by tick is exact.
TICKS = 40
intervals_of_ticks = st.lists(
    st.tuples(st.integers(-10, TICKS), st.integers(0, 30)).map(lambda pair: Interval(pair[0], pair[0] + pair[1])),
    max_size=12,
)


def at_tick(intervals, tick):
    return sum(start <= tick < end for start, end in intervals)


@given(intervals_of_ticks)
def test_windows_are_what_counting_tick_by_tick_gives(intervals):
    counts = [at_tick(intervals, tick) for tick in range(5, 25)]
    assert busy_s(intervals, 5, 25) == sum(counts)
    assert covered_s(intervals, 5, 25) == sum(count > 0 for count in counts)


@given(intervals_of_ticks)
def test_the_most_at_once_is_what_counting_tick_by_tick_gives(intervals):
    ticks = range(-10, TICKS + 31)
    assert most_at_once(intervals) == max(at_tick(intervals, tick) for tick in ticks)


@given(intervals_of_ticks, st.sampled_from([1, 2, 5, 8, 40]))
def test_means_in_buckets_are_exact(intervals, buckets):
    width = TICKS // buckets
    expected = [sum(at_tick(intervals, b * width + k) for k in range(width)) / width for b in range(buckets)]
    assert mean_in_buckets(intervals, TICKS, buckets) == pytest.approx(expected)


def test_a_batch_of_no_length_has_empty_buckets():
    assert mean_in_buckets([Interval(0.0, 0.0)], 0.0, 3) == [0.0, 0.0, 0.0]


def test_intervals_of_a_batch_are_as_by_hand(tmp_path):
    log = batches.merged(tmp_path, logs.two_trajectories())
    assert requests(log) == {"replica-0": [(1.0, 3.0), (7.0, 10.0)]}
    slots = slot_intervals(log)
    assert slots["env.start"].running == ((0.0, 1.0), (6.0, 7.0))
    assert slots["env.step"].running == ((4.0, 6.0), (10.5, 13.5))
    assert slots["env.step"].waiting == ((3.0, 4.0), (10.0, 10.5))
    assert admitted(rows(log)) == [(0.0, 6.0), (6.0, 14.5)]


def test_the_servers_log_is_the_authority_for_slots(tmp_path):
    # Its clock is the engine's here; the slot stayed taken to 26.0 although the engine had its answer at 24.0.
    record = logs.action(0, 1, 20.0, 26.0, trajectory="b#0", granted_s=21.5)
    slots = slot_intervals(batches.merged(tmp_path, logs.two_trajectories(), [record]))
    assert list(slots) == ["env.step"]
    assert slots["env.step"].running == ((11.5, 16.0),)
    assert slots["env.step"].waiting == ((10.0, 11.5),)


def test_a_class_with_an_unmeasured_action_is_not_measured(tmp_path):
    lines = logs.two_trajectories()
    lines[13] = logs.act(12, 24.0, "b#0", 20.0, queue_s=None, service_s=None, outcome="timeout")
    slots = slot_intervals(batches.merged(tmp_path, lines))
    assert slots["env.step"] is None
    assert slots["env.start"] is not None
