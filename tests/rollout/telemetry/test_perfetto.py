"""The exported trace, against the published trace event format and against values by hand.

What `check` holds is written after "Trace Event Format" (Chromium project): complete events (`X`) need `ts` and `dur`
in microseconds, counters (`C`) numbers as arguments, and metadata (`M`) one of the known names with its argument;
complete events of one thread must nest.
"""

import json
from collections import defaultdict

import pytest

from makespan.rollout.telemetry.perfetto import COUNTERS, REPLICAS, SLOTS, TRAJECTORIES, write_trace
from tests.rollout.telemetry import batches, logs

METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check(document):
    """Raise `AssertionError` for what the format does not allow."""
    assert isinstance(document["traceEvents"], list)
    assert document.get("displayTimeUnit", "ms") in ("ms", "ns")
    slices = defaultdict(list)
    named = set()
    for event in document["traceEvents"]:
        assert event["ph"] in ("X", "C", "M")
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["name"], str)
        assert event["name"]
        if event["ph"] == "M":
            argument, kind = METADATA[event["name"]]
            assert type(event["args"][argument]) is kind
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], (int, float))
        assert event["ts"] >= 0
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        else:
            assert event["dur"] >= 0
            assert isinstance(event["args"], dict)
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (process, thread), own in slices.items():
        assert ("process_name", process, 0) in named
        assert ("thread_name", process, thread) in named
        open_ends = []
        for start, end in sorted(own, key=lambda interval: (interval[0], -interval[1])):
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3, f"slices of thread {process}/{thread} cross"
            open_ends.append(end)


def exported(tmp_path, log):
    write_trace(tmp_path / "trace.json", log)
    return json.loads((tmp_path / "trace.json").read_bytes())


def of_process(document, process, kind="X"):
    return [event for event in document["traceEvents"] if event["pid"] == process and event["ph"] == kind]


def test_the_trace_of_a_batch_is_as_by_hand(tmp_path):
    document = exported(tmp_path, batches.merged(tmp_path, logs.two_trajectories()))
    check(document)
    threads = {
        event["tid"]: event["args"]["name"]
        for event in of_process(document, TRAJECTORIES, "M")
        if event["name"] == "thread_name"
    }
    assert threads == {1: "b#0 (finished, 1 turns)", 2: "a#0 (finished, 1 turns)"}  # the last to end is on top
    last = [(e["name"], e["ts"], e["dur"]) for e in of_process(document, TRAJECTORIES) if e["tid"] == 1]
    assert last[0] == ("admission", 0.0, 6e6)
    assert last[-2] == ("environment", 10.5e6, 3e6)
    decode = next(e for e in of_process(document, TRAJECTORIES) if e["name"] == "decode" and e["tid"] == 1)
    assert decode["args"] == {"turn": 0, "replica": "replica-0"}
    counts = {(event["name"], event["ts"]): event["args"]["count"] for event in of_process(document, COUNTERS, "C")}
    assert counts["env.step running", 4e6] == 1
    assert counts["env.step running", 6e6] == 0
    assert ("trajectories admitted", 6e6) not in counts  # one ends as the other begins: nothing changes


def test_requests_that_overlap_have_lanes_of_their_own(tmp_path):
    log = batches.simulated(tmp_path / "engine.jsonl", "bfcl", 24, "--replicas", "2", "--slots", "3")
    document = exported(tmp_path, log)
    check(document)
    lanes = {e["args"]["name"] for e in of_process(document, SLOTS, "M") if e["name"] == "thread_name"}
    assert {name for name in lanes if "step" in name} == {f"replay.step · lane {n}" for n in (1, 2, 3)}
    assert len(of_process(document, REPLICAS)) == sum(1 for _ in log.of("generate"))
    assert len({(e["pid"], e["tid"]) for e in of_process(document, REPLICAS)}) > 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda events: events[-1].pop("ts"),
        lambda events: next(e for e in events if e["ph"] == "X").update(dur=-1.0),
        lambda events: next(e for e in events if e["ph"] == "X").update(tid="1"),
        lambda events: next(e for e in events if e["name"] == "thread_name").update(name="tread_name"),
        lambda events: events.remove(next(e for e in events if e["name"] == "thread_name")),
        lambda events: next(e for e in events if e["name"] == "admission").update(dur=6.5e6),
    ],
)
def test_the_check_finds_what_the_format_does_not_allow(tmp_path, spoil):
    document = exported(tmp_path, batches.merged(tmp_path, logs.two_trajectories()))
    spoil(document["traceEvents"])
    with pytest.raises((AssertionError, KeyError)):
        check(document)
