import pytest

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.merge import merge, merge_directory, read_log
from tests.rollout.telemetry import logs


def test_a_line_that_was_cut_off_at_the_end_is_left_out_and_noted(tmp_path):
    lines = [logs.header(), logs.event(0, 1.0, "a"), logs.event(1, 2.0, "b")]
    path = logs.write(tmp_path / "engine.jsonl", lines, tail='{"seq": 2, "monotonic_s": 3.')
    log = read_log(path)
    assert [event.kind for event in log.events] == ["a", "b"]
    assert log.torn
    assert merge([path]).torn == ("engine@boot-a",)


def test_a_log_that_was_closed_is_not_torn(tmp_path):
    path = logs.write(tmp_path / "engine.jsonl", [logs.header(), logs.event(0, 1.0, "a")])
    assert not read_log(path).torn


def test_a_bad_line_in_the_middle_is_an_error_that_names_file_and_line(tmp_path):
    path = logs.write(tmp_path / "engine.jsonl", [logs.header()], tail='{"seq": "x"}\n')
    with pytest.raises(FormatError, match=r"engine.jsonl, line 2"):
        read_log(path)


def test_an_unknown_version_is_refused(tmp_path):
    path = logs.write(tmp_path / "engine.jsonl", [logs.header(version=99)])
    with pytest.raises(FormatError, match="version 99"):
        read_log(path)


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "engine.jsonl"
    path.write_text("")
    with pytest.raises(FormatError, match="header"):
        read_log(path)


def test_a_line_written_twice_counts_once(tmp_path):
    twice = logs.event(1, 2.0, "b")
    path = logs.write(tmp_path / "engine.jsonl", [logs.header(), logs.event(0, 1.0, "a"), twice, twice])
    assert [event.kind for _, event in merge([path]).events] == ["a", "b"]


def test_two_copies_of_a_log_are_one_log_with_the_events_of_both(tmp_path):
    first = logs.write(tmp_path / "copy.jsonl", [logs.header(), logs.event(0, 1.0, "a")])
    second = logs.write(tmp_path / "full.jsonl", [logs.header(), logs.event(0, 1.0, "a"), logs.event(1, 2.0, "b")])
    for order in ([first, second], [second, first]):
        assert [event.kind for _, event in merge(order).events] == ["a", "b"]


def test_logs_of_one_host_are_ordered_by_their_common_clock(tmp_path):
    logs.write(tmp_path / "engine.jsonl", [logs.header(), logs.event(0, 1.0, "first"), logs.event(1, 3.0, "third")])
    logs.write(tmp_path / "broker.jsonl", [logs.header("broker"), logs.event(0, 2.0, "second")])
    merged = merge_directory(tmp_path)
    assert [(role, event.kind) for role, event in merged.events] == [
        ("engine", "first"),
        ("broker", "second"),
        ("engine", "third"),
    ]


def test_without_an_engine_log_there_is_no_view(tmp_path):
    logs.write(tmp_path / "broker.jsonl", [logs.header("broker")])
    with pytest.raises(FormatError, match=r"no engine log.*broker.jsonl"):
        merge_directory(tmp_path)


def broker_action(seq, number, submitted_s, released_s, trajectory="a#0"):
    times = {"submitted_s": submitted_s, "granted_s": submitted_s, "released_s": released_s}
    return logs.event(seq, released_s, "action", trajectory, seq=number, **times)


def two_hosts(tmp_path, broker_lines):
    """The engine sends at 10 and 20 and has its answers at 13 and 22."""
    logs.write(
        tmp_path / "engine.jsonl",
        [logs.header(), logs.reset(0, 13.0, "a#0", 10.0), logs.act(1, 22.0, "a#0", 20.0, turn=0)],
    )
    logs.write(tmp_path / "broker.jsonl", [logs.header("broker", boot="boot-b"), *broker_lines])
    return merge_directory(tmp_path)


def test_another_hosts_clock_is_placed_by_the_actions_that_both_saw(tmp_path):
    # The broker's clock is 100 s ahead. Its first action (110.5 to 112.5) bounds the offset to [99.5, 100.5], its
    # second (120.25 to 121.5) to [99.5, 100.25]: 99.875 with an error of 0.375.
    merged = two_hosts(tmp_path, [broker_action(0, 0, 110.5, 112.5), broker_action(1, 1, 120.25, 121.5)])
    (alignment,) = merged.alignments
    assert (alignment.offset_s, alignment.error_s, alignment.pairs) == (99.875, 0.375, 2)
    assert merged.elsewhere == ()
    placed = [(event.kind, event.monotonic_s) for _, event in merged.events]
    assert placed == [("action", 12.625), ("reset", 13.0), ("action", 21.625), ("act", 22.0)]


def test_an_answer_never_stands_before_the_action_that_caused_it(tmp_path):
    merged = two_hosts(tmp_path, [broker_action(0, 0, 110.0, 113.0), broker_action(1, 1, 120.0, 122.0)])
    kinds = [event.kind for _, event in merged.events]
    assert kinds.index("action") < kinds.index("reset")
    assert merged.alignments[0].error_s == 0.0


def test_a_clock_that_contradicts_itself_is_kept_apart(tmp_path):
    # The first action wants an offset of at least 99.5, the second of at most 90.
    merged = two_hosts(tmp_path, [broker_action(0, 0, 110.5, 112.5), broker_action(1, 1, 110.0, 111.0)])
    assert merged.alignments == ()
    assert [event.kind for _, event in merged.elsewhere] == ["action", "action"]
    assert [event.kind for event in merged.of("action")] == ["action", "action"]


def test_a_log_of_another_host_that_nothing_ties_to_the_engine_is_kept_apart(tmp_path):
    merged = two_hosts(tmp_path, [broker_action(0, 0, 110.5, 112.5, trajectory="of another job")])
    assert merged.alignments == ()
    assert len(merged.elsewhere) == 1


def test_a_restarted_chain_does_not_tie_clocks(tmp_path):
    lines = [broker_action(0, 0, 110.5, 112.5), broker_action(1, 0, 510.5, 512.5)]
    assert two_hosts(tmp_path, lines).alignments == ()


def test_a_missing_log_is_named(tmp_path):
    lines = [logs.header(), logs.event(0, 0.0, "environment_server", slots={}, server="server-7")]
    logs.write(tmp_path / "engine.jsonl", lines)
    assert "server-7" in merge_directory(tmp_path).missing[0]
    logs.write(tmp_path / "broker.jsonl", [logs.header("broker")])
    assert merge_directory(tmp_path).missing == ()


@pytest.mark.parametrize("content", ["", "\n", '{"version": 1, "wri'])
def test_a_log_that_ends_before_its_header_costs_only_itself(tmp_path, content):
    logs.write(tmp_path / "engine.jsonl", [logs.header(), logs.event(0, 1.0, "a")])
    (tmp_path / "broker.jsonl").write_text(content)
    merged = merge_directory(tmp_path)
    assert [event.kind for _, event in merged.events] == ["a"]
    (sentence,) = merged.missing
    assert "broker.jsonl" in sentence
    (tmp_path / "broker.jsonl").rename(tmp_path / "engine.jsonl")  # but the engine's is indispensable
    with pytest.raises(FormatError, match=r"no engine log.*engine.jsonl ends before its header"):
        merge_directory(tmp_path)


def test_a_blank_last_line_is_nothing(tmp_path):
    path = logs.write(tmp_path / "engine.jsonl", [logs.header(), logs.event(0, 1.0, "a")], tail="\n  \n ")
    log = read_log(path)
    assert [event.kind for event in log.events] == ["a"]
    assert not log.torn
    # A blank line in the middle is something.
    logs.write(path, [logs.header()], tail='\n{"seq": 0, "monotonic_s": 1.0, "kind": "a"}\n')
    with pytest.raises(FormatError, match="line 2"):
        read_log(path)


def test_the_logs_of_two_engines_are_refused(tmp_path):
    first = logs.write(tmp_path / "engine.jsonl", [logs.header(writer="engine-1")])
    second = logs.write(tmp_path / "engine-2.jsonl", [logs.header(writer="engine-2")])
    with pytest.raises(FormatError, match=r"2 engines \(engine-1, engine-2\)"):
        merge([first, second])
    assert len(merge([first]).headers) == 1


def aligned(tmp_path, engine_lines, broker_lines):
    logs.write(tmp_path / "engine.jsonl", [logs.header(), *engine_lines])
    logs.write(tmp_path / "broker.jsonl", [logs.header("broker", boot="boot-b"), *broker_lines])
    return merge_directory(tmp_path).alignments


def test_an_action_that_the_engine_sent_twice_does_not_tie_clocks(tmp_path):
    # The broker lost its record of the second attempt, or of the first: its clock is 100 s ahead, or 120 s.
    first, second = logs.reset(0, 13.0, "a#0", 10.0), logs.reset(2, 33.0, "a#0", 30.0)
    record = [logs.action(0, 0, 110.5, 112.5)]
    restarted = logs.event(1, 20.0, "restarted", "a#0", turn=0)
    assert aligned(tmp_path, [first, restarted, second], record) == ()
    assert aligned(tmp_path, [first, second], record) == ()
    assert aligned(tmp_path, [restarted, second], record) == ()  # the first attempt had no answer, and no event
    (alignment,) = aligned(tmp_path, [first], record)
    assert (alignment.offset_s, alignment.error_s) == (100.0, 0.5)


def test_neither_a_failed_action_nor_another_jobs_ties_clocks(tmp_path):
    # The engine gave up after 3 s; the tool held its slot for 50 s.
    gave_up = logs.reset(0, 13.0, "a#0", 10.0, outcome="timeout", queue_s=None, service_s=None)
    assert aligned(tmp_path, [gave_up], [logs.action(0, 0, 110.5, 160.5, outcome="timeout")]) == ()
    engine = [logs.reset(0, 13.0, "a#0", 10.0), logs.act(1, 22.0, "a#0", 20.0)]
    ours = logs.action(0, 0, 110.5, 112.5)
    assert len(aligned(tmp_path, engine, [ours, logs.action(1, 1, 120.25, 121.5)])) == 1
    assert aligned(tmp_path, engine, [ours, logs.action(1, 1, 120.25, 121.5, job="another")]) == ()
