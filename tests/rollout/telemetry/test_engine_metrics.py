"""The engine's figures for Prometheus, against events that were counted by hand."""

import json
import re

from prometheus_client.parser import text_string_to_metric_families

from makespan.rollout.engine import EngineStatus
from makespan.rollout.replicas.base import ReplicaLoad
from makespan.rollout.telemetry.engine_metrics import CountedEventLog, engine_families
from makespan.rollout.telemetry.exposition import render
from tests.rollout.telemetry import logs

STATUS = EngineStatus(total=9, done=3, failed=1, running=4, waiting=1, acting=2, generated_tokens=0, turns=0)
LOADS = {
    "replica-0": ReplicaLoad(running=3, waiting=2, kv_used_fraction=0.25, preemptions=None),
    "replica-1": ReplicaLoad(running=1, waiting=0, kv_used_fraction=None, preemptions=None),
    "replica-2": None,
}


def replayed(tmp_path, lines, path="engine.jsonl"):
    """A counted log into which the events of a log by hand are written, each at its time."""
    at = [0.0]
    log = CountedEventLog(None if path is None else tmp_path / path, "engine", lambda: at[0])
    for line in lines[1:]:
        at[0] = line["monotonic_s"]
        data = {"outcome": "ok"} | line["data"] if line["kind"] in ("act", "reset") else line["data"]
        log.emit(line["kind"], line["trajectory_id"], **data)
    log.close()
    return log


def samples(log):
    text = render([*log.families(), *engine_families(STATUS, LOADS)])
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_are_what_the_events_add_up_to(tmp_path):
    found = samples(replayed(tmp_path, logs.two_trajectories()))
    expected = {
        ("makespan_engine_trajectories_ended_total", "finished"): 2,
        ("makespan_engine_prompt_tokens_total", "replica-0"): 1400,
        ("makespan_engine_cached_tokens_total", "replica-0"): 100,
        ("makespan_engine_recomputed_tokens_total", "replica-0"): 100,
        ("makespan_engine_generated_tokens_total", "replica-0"): 32,
        ("makespan_engine_preemptions_total", "replica-0"): 1,
        ("makespan_engine_inference_seconds_sum", "replica-0"): 5.0,
        ("makespan_engine_inference_seconds_count", "replica-0"): 2,
        ("makespan_engine_actions_total", "env.step", "ok"): 2,
        ("makespan_engine_action_wait_seconds_sum", "env.step"): 1.5,
        ("makespan_engine_action_seconds_sum", "env.step"): 5.0,
        ("makespan_engine_action_seconds_count", "env.step"): 2,
        ("makespan_engine_events_total", "generate"): 2,
        ("makespan_engine_trajectories_running",): 4,
        ("makespan_replica_requests_waiting", "replica-0"): 2,
        ("makespan_replica_kv_used_ratio", "replica-0"): 0.25,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert ("makespan_replica_kv_used_ratio", "replica-1") not in found
    assert ("makespan_replica_requests_running", "replica-2") not in found


def test_what_was_not_measured_once_has_no_sample(tmp_path):
    lines = logs.two_trajectories()
    lines[12] = logs.generate(11, 20.0, "b#0", 17.0, cached_tokens=None, recomputed_tokens=None)
    lines[13] = logs.act(12, 24.0, "b#0", 20.0, queue_s=None, service_s=None, outcome="timeout")
    lines[14] = logs.ended(13, 24.5, "b#0", state="failed", failure={"kind": "timeout", "message": ""})
    found = samples(replayed(tmp_path, lines))
    assert ("makespan_engine_cached_tokens_total", "replica-0") not in found
    assert found["makespan_engine_actions_total", "env.step", "timeout"] == 1
    assert found["makespan_engine_action_seconds_count", "env.step"] == 1
    assert found["makespan_engine_failures_total", "timeout"] == 1


def test_the_log_is_the_one_that_an_uncounted_log_would_be(tmp_path):
    replayed(tmp_path, logs.two_trajectories())
    lines = [json.loads(line) for line in (tmp_path / "engine.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines[1:]] == [line["kind"] for line in logs.two_trajectories()[1:]]
    assert [line["seq"] for line in lines[1:]] == list(range(len(lines) - 1))
    assert samples(replayed(tmp_path, logs.two_trajectories(), path=None)) == samples(
        replayed(tmp_path, logs.two_trajectories())
    )


def test_names_keep_to_prometheuss_conventions(tmp_path):
    families = [*replayed(tmp_path, logs.two_trajectories()).families(), *engine_families(STATUS, LOADS)]
    for family in families:
        assert re.fullmatch(r"makespan_(engine|replica)_[a-z_]+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert not re.search(r"_(s|ms|share|fraction|percent|count|sum)$", family.name), family.name
        assert family.text.endswith(".")
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
