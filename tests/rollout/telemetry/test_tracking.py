"""The tracked figures, by hand, and what is said of them."""

from pathlib import Path

import pytest

from makespan.rollout.telemetry.analysis import analyse
from makespan.rollout.telemetry.timeline import rows
from makespan.rollout.telemetry.tracking import METRICS, metric_of, tracked
from tests.rollout.telemetry import batches, logs


def figures_of(tmp_path, lines):
    log = batches.merged(tmp_path, lines)
    return tracked(log, analyse(log), rows(log))


def test_the_figures_of_a_batch_are_as_by_hand(tmp_path):
    figures = figures_of(tmp_path, logs.two_trajectories())
    expected = {
        "makespan_s": 15.0,
        "last_chain/total_s": 14.5,
        "last_chain/admission_s": 6.0,
        "last_chain/recomputation_s": 0.4,
        "last_chain/environment_s": 4.0,
        "phase_sum_s/admission": 6.0,
        "phase_sum_s/slot_queue": 1.5,
        "phase_sum_s/environment": 7.0,
        "tokens/prompt": 1400,
        "tokens/cached": 100,
        "tokens/cached_share": 100 / 1400,
        "tokens/recomputed_share": 100 / 1400,
        "tokens/generated": 32,
        "preemptions": 1,
        "slots/env.step/wait_mean_s": 0.75,
        "slots/env.step/wait_max_s": 1.0,
        "slots/env.step/utilisation": 5.0 / (2 * 15.0),
        "slots/env.start/wait_max_s": 0.0,
        # `a` was admitted for 6 s, `b` for 8.5 s of 15; `b` only once `a` had ended.
        "concurrency/mean": 14.5 / 15.0,
        "concurrency/max": 1,
        "reward/mean": 0.75,
        "trajectories/total": 2,
        "trajectories/finished": 2,
        "trajectories/failed": 0,
        "turns/mean": 1.0,
        "turns/max": 1,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert figures["over_lower_bound"] == pytest.approx(15.0 / figures["lower_bound_s"])


def test_tail_and_concurrency_of_a_hundred_are_as_by_hand(tmp_path):
    figures = figures_of(tmp_path, batches.one_hundred())
    assert figures["tail/after_90_s"] == 30.0
    assert figures["tail/after_99_s"] == 10.0
    assert figures["tail/idle_replica_90_s"] == 45.0
    assert figures["tail/idle_slot_99_s/env.step"] == 10.0
    assert figures["concurrency/reference"] == 100
    assert figures["concurrency/max"] == 100
    assert figures["concurrency/mean"] == pytest.approx((sum(range(1, 99)) + 110 + 120) / 120)


def test_what_was_not_measured_is_none_and_never_zero(tmp_path):
    lines = logs.two_trajectories()
    unknown = {"queue_s": None, "prefill_s": None, "decode_s": None, "cached_tokens": None}
    lines[12] = logs.generate(11, 20.0, "b#0", 17.0, **unknown, recomputed_tokens=None, preemptions=None)
    lines[13] = logs.act(12, 24.0, "b#0", 20.0, queue_s=None, service_s=None, outcome="timeout")
    lines[14] = logs.ended(13, 24.5, "b#0", state="failed", reward=None, failure={"kind": "timeout", "message": ""})
    lines[7]["data"]["cached_tokens"] = 0
    figures = figures_of(tmp_path, lines)
    for name in (
        "last_chain/decode_s",
        "phase_sum_s/decode",
        "phase_sum_s/environment",
        "tokens/cached",
        "tokens/cached_share",
        "preemptions",
        "slots/env.step/wait_mean_s",
        "slots/env.step/wait_max_s",
        "slots/env.step/utilisation",
        "forecast/turns_error",
        "concurrency/reference",
    ):
        assert figures[name] is None, name
    assert figures["failures/timeout"] == 1
    assert figures["trajectories/failed"] == 1
    assert figures["reward/mean"] == 0.5


def test_every_figure_is_explained_on_the_tracking_page(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "tracking.md").read_text()
    for metric in METRICS:
        assert f"| `{metric.name}` | {metric.better} | {metric.meaning} |" in page
    for name in figures_of(tmp_path, batches.one_hundred()):
        assert metric_of(name) in METRICS
    with pytest.raises(KeyError):
        metric_of("unheard_of")
