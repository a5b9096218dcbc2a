"""One slot, three trajectories, and a pass in between: what `explain` makes of it, worked out by hand."""

import pytest

from makespan.rollout.errors import ConfigError
from makespan.rollout.telemetry.events import LOG_VERSION, EventLog, LogHeader
from makespan.rollout.telemetry.explain import explain
from makespan.rollout.telemetry.merge import merge


def header(role):
    return LogHeader(
        version=LOG_VERSION, writer=role, role=role, host="h", host_boot_id="b", pid=1, wall_s=0.0, monotonic_s=0.0
    )


def why(key, remaining_s, horizon_s=50.0):
    return {
        "key": key, "turns": 0, "remaining_turns": remaining_s / 2, "remaining_s": remaining_s, "horizon_s": horizon_s,
        "turn_s": 2.0,
    }  # fmt: skip


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def logs(tmp_path):
    """At 100 s the batch begins. `a` acts from 101 to 111. Meanwhile `b` comes at 102, `c` at 103, and a pass at 105
    puts `c` first; so `c` runs from 111 to 113, and `b`, by its age, from 113."""
    clock = Clock()
    engine = EventLog(tmp_path / "engine.jsonl", "engine", clock, header=header("engine"))
    broker = EventLog(tmp_path / "broker.jsonl", "broker", clock, header=header("broker"))
    engine.emit("batch_start", trajectories=3)
    for name in "abc":
        engine.emit("submitted", name)
    clock.now_s = 105.0
    engine.emit("rekey", waiting=2, first={"c": why(-30.0, 80.0), "b": why(-1.0, 20.0)})
    acts = {"a": (101.0, 0.0, 10.0), "c": (103.0, 8.0, 2.0), "b": (102.0, 11.0, 1.0)}
    for name, (start_s, queue_s, service_s) in acts.items():
        clock.now_s = start_s + queue_s + service_s
        times = {"submitted_s": start_s, "granted_s": start_s + queue_s, "released_s": clock.now_s}
        grant = {"key": {"a": -5.0, "b": -1.0, "c": -30.0}[name], "by_age": name == "b"}
        broker.emit("action", name, slot_class="x.start", granted_s=100.5, released_s=100.6, key=0.0, by_age=False)
        broker.emit("action", name, slot_class="x.step", outcome="ok", **times, **grant)
        engine.emit(
            "act", name, turn=0, start_s=start_s, slot_class="x.step", queue_s=queue_s, service_s=service_s,
            outcome="ok", key=-5.0, why=why(-5.0, 30.0),
        )  # fmt: skip
    engine.close()
    broker.close()
    return tmp_path


def test_each_action_is_explained_by_the_last_key_it_got(logs):
    log = merge(sorted(logs.iterdir()))
    ((a,), (b,), (c,)) = (explain(log, name) for name in "abc")
    assert (a.submitted_s, a.queue_s, a.service_s) == (1.0, 0.0, 10.0)
    assert (a.waiting, a.overtook, a.overtaken_by, a.rekeyed) == (0, 0, 0, 0)
    assert (a.why.remaining_s, a.why.slack_s) == (30.0, 20.0)  # as submitted: no pass came while it waited
    assert (c.waiting, c.overtook, c.overtaken_by, c.rekeyed) == (1, 1, 0, 1)
    assert (c.key, c.why.key, c.why.slack_s) == (-5.0, -30.0, -30.0)  # the pass's forecast: it would end the batch
    assert (b.waiting, b.overtook, b.overtaken_by) == (0, 0, 1)
    assert (b.grant.by_age, c.grant.by_age, c.grant.key) == (True, False, -30.0)


def test_without_the_brokers_log_the_grant_is_not_known(logs):
    (c,) = explain(merge([logs / "engine.jsonl"]), "c")
    assert c.grant is None
    assert c.why.key == -30.0


def test_a_trajectory_that_is_not_there_is_refused_with_the_nearest_one(logs):
    with pytest.raises(ConfigError, match="no trajectory 'd'"):
        explain(merge([logs / "engine.jsonl"]), "d")
