import gzip
import json

import pytest

from makespan.rollout.errors import FormatError
from makespan.rollout.replay.trace import (
    Trace,
    TraceError,
    TraceHeader,
    TraceTrajectory,
    TraceTurn,
    read_trace,
    write_trace,
)

HEADER = {"format": "makespan-trace", "version": 1}


def line(**changes):
    document = {
        "trajectory_id": "a#0",
        "task_id": "a",
        "group": "a",
        "reset_s": 1.5,
        "turns": [
            {
                "prompt_tokens": 100,
                "generated_tokens": 20,
                "observation_tokens": 30,
                "environment_s": 2.0,
                "start_s": 0.0,
            },
            {"prompt_tokens": 150, "generated_tokens": 10, "start_s": 5.0},
        ],
    }
    return document | changes


def turn(number, **changes):
    document = line()
    document["turns"][number] |= changes
    return document


def written(tmp_path, *documents, header=HEADER):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in (header, *documents)))
    return path


def test_a_trace_is_read_as_it_was_written(tmp_path):
    trajectory = TraceTrajectory(
        trajectory_id="a#0",
        task_id="a",
        group="g",
        reset_s=1.25,
        max_turns=9,
        reward=0.5,
        prompt_ids=[1, 2, 3],
        turns=(
            TraceTurn(
                prompt_tokens=3, generated_tokens=2, observation_tokens=1, environment_s=0.5, generated_ids=[4, 5]
            ),
            TraceTurn(prompt_tokens=6, generated_tokens=1, cached_tokens=4),
        ),
    )
    trace = Trace(TraceHeader(source="by hand", assumptions=("none",), dropped={"failed": 2}), (trajectory,))
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        write_trace(tmp_path / name, trace)
        assert read_trace(tmp_path / name) == trace
    with gzip.open(tmp_path / "trace.jsonl.gz") as zipped:
        assert zipped.read() == (tmp_path / "trace.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (turn(0, generated_tokens=-1), r"turns\[0\].generated_tokens"),
        (turn(1, prompt_tokens=0), r"turns\[1\].prompt_tokens"),
        (turn(0, observation_tokens=-5), r"turns\[0\].observation_tokens"),
        (turn(0, environment_s=-0.5), r"turns\[0\].environment_s"),
        (turn(1, cached_tokens=151), r"turns\[1\].cached_tokens: a cached prefix of 151 tokens is longer"),
        (
            turn(1, prompt_tokens=151),
            r"turns\[1\].prompt_tokens: 151, but .* leaves 100 \+ 20 \+ 30 = 150",
        ),
        (turn(1, start_s=1.0), r"turns\[1\].start_s: time goes backwards"),
        (turn(0, generated_ids=[1, 2]), r"turns\[0\].generated_ids: 2 ids for 20 tokens"),
        (line(prompt_ids=[1]), r"prompt_ids: 1 ids for 100 tokens"),
        (line(reset_s=-1.0), "reset_s"),
        (line(turns=[]), "turns: a trajectory needs at least one turn"),
        (line(max_turns=1), "turns: 2 turns, and max_turns is 1"),
        (line(max_tokens=0), "max_tokens"),
        (line(turns="none"), r"\$.turns"),
        ({"task_id": "a"}, "trajectory_id"),
    ],
)
def test_what_cannot_have_happened_is_refused_by_line_and_field_or_skipped_and_counted(tmp_path, document, field):
    good = line(trajectory_id="b#0")
    path = written(tmp_path, line(trajectory_id="c#0"), document, good)
    with pytest.raises(FormatError, match=rf"trace.jsonl, line 3: .*{field}"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert [trajectory.trajectory_id for trajectory in trace.trajectories] == ["c#0", "b#0"]
    assert trace.header.dropped == {"bad": 1}


def test_a_consistent_trace_is_not_refused(tmp_path):
    assert len(read_trace(written(tmp_path, line())).trajectories) == 1


def test_a_line_that_is_not_json_is_skipped_and_counted(tmp_path):
    path = written(tmp_path, line())
    path.write_text(path.read_text() + "{nonsense\n")
    with pytest.raises(FormatError, match="line 3"):
        read_trace(path)
    assert read_trace(path, skip_bad=True).header.dropped == {"bad": 1}


@pytest.mark.parametrize("skip_bad", [False, True])
def test_an_unknown_version_is_refused_whatever_is_skipped(tmp_path, skip_bad):
    path = written(tmp_path, line(), header=HEADER | {"version": 2})
    with pytest.raises(FormatError, match="line 1: version: trace of version 2"):
        read_trace(path, skip_bad=skip_bad)


def test_another_format_is_refused(tmp_path):
    with pytest.raises(FormatError, match="line 1: format"):
        read_trace(written(tmp_path, line(), header={"hello": 1}))


def test_a_trajectory_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(FormatError, match="'a#0' stands more than once"):
        read_trace(written(tmp_path, line(), line()))


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FormatError, match=r"missing\.jsonl"):
        read_trace(tmp_path / "missing.jsonl")


def test_a_bad_trajectory_is_not_written(tmp_path):
    bad = TraceTrajectory(trajectory_id="a", task_id="a", group="a", turns=())
    with pytest.raises(TraceError):
        write_trace(tmp_path / "trace.jsonl", Trace(TraceHeader(), (bad,)))
