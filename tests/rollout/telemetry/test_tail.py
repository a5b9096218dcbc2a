"""What stands idle in the tail, by hand."""

import pytest

from makespan.rollout.telemetry.analysis import analyse
from makespan.rollout.telemetry.tail import tail_use
from tests.rollout.telemetry import batches, logs


def tails(tmp_path, lines, server=None):
    log = batches.merged(tmp_path, lines, server)
    analysis = analyse(log)
    return [tail_use(log, analysis, after) for after in (analysis.tail_s.after_90, analysis.tail_s.after_99)]


def test_the_tail_of_a_hundred_trajectories_is_as_by_hand(tmp_path):
    after_90, after_99 = tails(tmp_path, batches.one_hundred())
    # The 90th ends at 90 s, the 99th at 110 s, the last at 120 s.
    assert (after_90.start_s, after_90.seconds) == (90.0, 30.0)
    assert (after_99.start_s, after_99.seconds) == (110.0, 10.0)
    # From 90 s on: replica-0 is busy for 10 s, replica-1 for 5 s more of its 15; slots for 8 and 15 s of 2 x 30.
    assert (after_90.idle_replica_s, after_90.replica_s) == (20.0 + 25.0, 60.0)
    assert after_90.idle_slot_s == {"env.step": 60.0 - 8.0 - 15.0}
    assert after_90.slot_s == {"env.step": 60.0}
    # From 110 s on: no request, and one slot busy throughout.
    assert after_99.idle_replica_s == 20.0
    assert after_99.idle_slot_s == {"env.step": 10.0}


def test_idle_slots_are_not_measured_where_an_action_was_not(tmp_path):
    lines = batches.one_hundred()
    at = next(n for n, line in enumerate(lines) if line.get("kind") == "act")
    lines[at]["data"] |= {"queue_s": None, "service_s": None, "outcome": "timeout"}
    (after_90, _) = tails(tmp_path, lines)
    assert after_90.idle_slot_s == {"env.step": None}
    assert after_90.idle_replica_s == 45.0


def test_requests_that_overlap_keep_a_replica_busy_once(tmp_path):
    lines = batches.one_hundred()
    lines.insert(-1, logs.generate(9_999, 118.0, "t99#0", 91.0, turn=1))
    (after_90, _) = tails(tmp_path, lines)
    # replica-0 is busy from 90 to 118 s now, twice so until 100 s.
    assert after_90.idle_replica_s == pytest.approx(2.0 + 25.0)


def test_without_an_end_there_is_no_tail(tmp_path):
    assert tails(tmp_path, logs.two_trajectories()[:8]) == [None, None]
