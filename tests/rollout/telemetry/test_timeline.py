"""Rows of the timeline, against segments worked out by hand."""

import pytest

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.last_chain import last_chain
from makespan.rollout.telemetry.timeline import Phase, rows
from tests.rollout.telemetry import batches, logs


def segments(row):
    return [
        (pytest.approx(start_s), pytest.approx(end_s), phase.name, turn, place)
        for start_s, end_s, phase, turn, place in row.segments
    ]


def row_of(tmp_path, lines, trajectory="b#0", server=None):
    return next(row for row in rows(batches.merged(tmp_path, lines, server)) if row.trajectory_id == trajectory)


def test_a_row_is_laid_out_as_by_hand(tmp_path):
    row = row_of(tmp_path, logs.two_trajectories())
    # Of 300 computed prompt tokens 100 had been computed before: a third of 1.2 s.
    assert segments(row) == [
        (0.0, 6.0, "ADMISSION", -1, ""),
        (6.0, 7.0, "ENVIRONMENT", -1, "env.start"),
        (7.0, 7.5, "REPLICA_QUEUE", 0, "replica-0"),
        (7.5, 7.9, "RECOMPUTATION", 0, "replica-0"),
        (7.9, 8.7, "PREFILL", 0, "replica-0"),
        (8.7, 9.7, "DECODE", 0, "replica-0"),
        (9.7, 10.0, "OTHER", 0, ""),
        (10.0, 10.5, "SLOT_QUEUE", 0, "env.step"),
        (10.5, 13.5, "ENVIRONMENT", 0, "env.step"),
        (13.5, 14.5, "OTHER", 0, ""),
    ]
    assert (row.state, row.end_s, row.turns, row.reward, row.failure) == ("finished", 14.5, 1, 1.0, "")
    assert (row.cached_tokens, row.recomputed_tokens, row.replicas) == (100, 100, 1)


def test_what_nobody_measured_is_whole_and_says_so(tmp_path):
    lines = logs.two_trajectories()
    lines[12] = logs.generate(11, 20.0, "b#0", 17.0, queue_s=None, cached_tokens=None, recomputed_tokens=None)
    lines[13] = logs.act(12, 24.0, "b#0", 20.0, queue_s=None, service_s=None, outcome="timeout")
    row = row_of(tmp_path, lines)
    assert segments(row)[2:] == [
        (7.0, 10.0, "INFERENCE", 0, "replica-0"),
        (10.0, 14.0, "ACTION", 0, "env.step"),
        (14.0, 14.5, "OTHER", 0, ""),
    ]
    assert (row.cached_tokens, row.recomputed_tokens) == (None, None)


def test_a_failed_action_has_the_times_of_the_servers_record(tmp_path):
    lines = logs.two_trajectories()
    lines[13] = logs.act(12, 24.0, "b#0", 20.0, queue_s=None, service_s=None, outcome="timeout")
    record = logs.action(0, 1, 20.0, 23.0, trajectory="b#0", granted_s=21.0, outcome="timeout")
    assert segments(row_of(tmp_path, lines, server=[record]))[-3:] == [
        (10.0, 11.0, "SLOT_QUEUE", 0, "env.step"),
        (11.0, 13.0, "ENVIRONMENT", 0, "env.step"),
        (13.0, 14.5, "OTHER", 0, ""),
    ]
    # A record of another action, or two of one name, measure nothing.
    other = logs.action(0, 2, 20.0, 23.0, trajectory="b#0", outcome="timeout")
    assert segments(row_of(tmp_path, lines, server=[other]))[-2][2] == "ACTION"
    assert segments(row_of(tmp_path, lines, server=[record, {**record, "seq": 1}]))[-2][2] == "ACTION"


def test_a_slot_that_stays_taken_does_not_lengthen_the_row(tmp_path):
    lines = logs.two_trajectories()
    lines[13] = logs.act(12, 24.0, "b#0", 20.0, queue_s=None, service_s=None, outcome="timeout")
    record = logs.action(0, 1, 20.0, 99.0, trajectory="b#0", outcome="timeout")
    row = row_of(tmp_path, lines, server=[record])
    assert segments(row)[-2:] == [(10.0, 14.0, "ENVIRONMENT", 0, "env.step"), (14.0, 14.5, "OTHER", 0, "")]


def test_a_trajectory_that_was_never_admitted_only_waits(tmp_path):
    lines = [*logs.two_trajectories()[:5], logs.ended(4, 12.0, "a#0", state="cancelled", reward=None, turns=0)]
    row = row_of(tmp_path, lines, "a#0")
    assert segments(row) == [(0.0, 2.0, "ADMISSION", -1, "")]
    assert row.state == "cancelled"


def test_a_parked_trajectory_waits_for_admission_again(tmp_path):
    lines = logs.two_trajectories()
    lines.insert(13, logs.event(90, 19.75, "parked", "b#0", turn=1, start_s=17.0, prompt_tokens=1))
    lines[12] = logs.event(91, 16.5, "nothing")  # the generation is left out
    row = row_of(tmp_path, lines)
    assert segments(row)[1:4] == [
        (6.0, 7.0, "ENVIRONMENT", -1, "env.start"),
        (7.0, 9.75, "ADMISSION", 1, ""),
        (9.75, 10.0, "OTHER", 0, ""),
    ]


def test_a_log_that_ends_early_leaves_its_rows_unfinished(tmp_path):
    row = row_of(tmp_path, logs.two_trajectories()[:12])
    assert (row.state, row.end_s, row.reward) == ("unfinished", 7.0, None)
    assert segments(row)[-1] == (6.0, 7.0, "ENVIRONMENT", -1, "env.start")


def test_a_log_without_a_batch_is_refused(tmp_path):
    with pytest.raises(FormatError, match="no batch"):
        rows(batches.merged(tmp_path, [logs.header(), logs.event(0, 1.0, "replica", replica="replica-0")]))


def test_rows_have_no_gap_and_agree_with_the_last_chain(tmp_path):
    log = batches.simulated(tmp_path / "engine.jsonl", "swe", 16, "--slots", "4", "--kv-tokens", "100000")
    timeline = rows(log)
    assert len(timeline) == 16
    for row in timeline:
        starts, ends = [s.start_s for s in row.segments], [s.end_s for s in row.segments]
        assert starts == [0.0, *ends[:-1]]
        assert ends[-1] == row.end_s
        assert sum(row.seconds().values()) == pytest.approx(row.end_s)
    # `last_chain` sums what the events say, without laying anything out.
    chain = last_chain(log, next(log.of("batch_start")))
    last = max(timeline, key=lambda row: row.end_s)
    spent = last.seconds()
    assert last.trajectory_id == chain.trajectory_id
    assert spent[Phase.RECOMPUTATION] == pytest.approx(chain.recomputation)
    assert spent[Phase.PREFILL] == pytest.approx(chain.prefill)
    assert spent[Phase.DECODE] == pytest.approx(chain.decode)
    assert spent[Phase.SLOT_QUEUE] == pytest.approx(chain.slot_queue)
    assert spent[Phase.ENVIRONMENT] == pytest.approx(chain.environment)
    assert chain.recomputation > 0
    assert chain.slot_queue > 0
