"""Which source measures an action."""

import pytest

from makespan.rollout.telemetry.merge import merge_directory
from makespan.rollout.telemetry.slot_use import slot_uses
from tests.rollout.telemetry import logs


def used(tmp_path, engine, server=None):
    """(actions, seconds of waiting, of running) of each use."""
    logs.write(tmp_path / "engine.jsonl", [logs.header(), *engine])
    if server is not None:
        logs.write(tmp_path / "broker.jsonl", [logs.header("broker"), *server])
    return [(use.actions, use.queue_s, use.service_s) for use in slot_uses(merge_directory(tmp_path))]


def failure(outcome="timeout", **data):
    return logs.act(9, 13.0, "a#0", 10.0, **({"outcome": outcome, "queue_s": None, "service_s": None} | data))


def test_an_action_that_went_well_is_measured_by_its_reply(tmp_path):
    record = logs.action(0, 1, 10.0, 99.0)
    for outcome in ({}, {"outcome": "ok"}):  # logs had no outcome once
        act = logs.act(0, 13.0, "a#0", 10.0, queue_s=1.0, service_s=1.5, **outcome)
        assert used(tmp_path, [act], [record]) == [(1, 1.0, 1.5)]


def test_a_failed_action_is_measured_by_the_server_even_where_the_reply_said_something(tmp_path):
    replied = failure(queue_s=0.5, service_s=2.5)
    assert used(tmp_path, [replied]) == [(1, 0.5, 2.5)]
    assert used(tmp_path, [replied], [logs.action(0, 1, 10.0, 30.0, granted_s=10.5, outcome="timeout")]) == [
        (1, 0.5, 19.5)
    ]


def test_an_action_that_was_withdrawn_waited_and_ran_for_no_time(tmp_path):
    assert used(tmp_path, [failure()], [logs.action(0, 1, 10.0, 12.5, granted_s=None, outcome="timeout")]) == [
        (1, 2.5, 0.0)
    ]


@pytest.mark.parametrize(("outcome", "seconds"), [("busy", 0), ("unknown_session", 0), ("unreachable", None)])
def test_without_a_record_only_what_the_server_turned_away_took_nothing(tmp_path, outcome, seconds):
    ((_, queue_s, service_s),) = used(tmp_path, [failure(outcome)], [])
    assert (queue_s, service_s) == (seconds, seconds)


def test_a_repeated_name_gives_each_attempt_its_own_record(tmp_path):
    well = logs.act(1, 43.0, "a#0", 40.0, queue_s=0.0, service_s=3.0)
    lost = logs.action(0, 1, 10.0, 14.0, outcome="unknown_outcome")
    again = logs.action(1, 1, 40.0, 43.0)
    assert used(tmp_path, [failure("unknown_outcome"), well], [lost, again]) == [(1, 0.0, 3.0), (1, 0.0, 4.0)]
    assert used(tmp_path, [failure("unknown_outcome"), well], [again]) == [(1, 0.0, 3.0), (1, None, None)]


def test_records_of_several_jobs_under_our_names_are_not_used(tmp_path):
    records = [logs.action(0, 1, 10.0, 14.0, outcome="timeout"), logs.action(1, 0, 1.0, 2.0, job="another")]
    reset = logs.reset(0, 9.0, "a#0", 1.0, service_s=8.0)
    assert used(tmp_path, [reset, failure()], records) == [(1, 0.0, 8.0), (1, None, None)]
    assert used(tmp_path, [failure()], records) == [(1, 0.0, 4.0)]  # the other job has none of our names
