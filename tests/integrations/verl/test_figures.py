"""The figures of a step against values worked out by hand."""

from __future__ import annotations

from makespan.integrations.verl.figures import TrajectoryFigures, slowest_table, step_metrics


def test_a_step_is_summed_up_and_its_slowest_trajectory_is_parted() -> None:
    metrics = step_metrics(
        [
            TrajectoryFigures(state="finished", turns=2, prompt_tokens=30, generated_tokens=5, cached_tokens=10,
                              recomputed_tokens=1, preemptions=0, completion_s=4.0, generate_s=3.0, environment_s=0.5),
            TrajectoryFigures(state="truncated", turns=4, prompt_tokens=70, generated_tokens=15, cached_tokens=20,
                              recomputed_tokens=2, preemptions=1, completion_s=10.0, generate_s=6.0, slot_queue_s=1.0,
                              environment_s=2.5),
            TrajectoryFigures(state="failed", failure="timeout", cached_tokens=0, recomputed_tokens=0, preemptions=0,
                              completion_s=1.0),
        ]
    )  # fmt: skip
    assert metrics["makespan/trajectories/total"] == 3
    assert [metrics[f"makespan/trajectories/{state}"] for state in ("finished", "truncated", "failed")] == [1, 1, 1]
    assert [metrics[f"makespan/completion_s/p{p}"] for p in (50, 90, 99)] == [4.0, 10.0, 10.0]
    assert (metrics["makespan/turns/mean"], metrics["makespan/turns/max"]) == (2.0, 4)
    assert metrics["makespan/phases_s/generate"] == 3.0
    assert metrics["makespan/slowest/completion_s"] == 10.0
    assert metrics["makespan/slowest/other_s"] == 10.0 - 6.0 - 1.0 - 2.5
    assert (metrics["makespan/tokens/prompt"], metrics["makespan/tokens/generated"]) == (100, 20)
    assert (metrics["makespan/tokens/cached"], metrics["makespan/tokens/recomputed"]) == (30, 3)
    assert metrics["makespan/preemptions"] == 1


def test_a_figure_that_one_trajectory_did_not_measure_is_left_out_and_not_zero() -> None:
    metrics = step_metrics([TrajectoryFigures(state="finished", cached_tokens=3), TrajectoryFigures(state="finished")])
    assert "makespan/tokens/cached" not in metrics
    assert "makespan/preemptions" not in metrics


def test_no_trajectories_give_no_figures() -> None:
    assert step_metrics([]) == {}


def test_the_slowest_are_named_with_the_phase_that_made_them_late() -> None:
    usual = {"state": "finished", "generate_s": 8.0, "environment_s": 1.0}
    trajectories = [
        TrajectoryFigures(**usual, completion_s=9.0, turns=2),
        TrajectoryFigures(**usual, completion_s=14.0, slot_queue_s=5.0, turns=3),
        TrajectoryFigures(state="failed", failure="timeout", generate_s=9.5, completion_s=10.0),
    ]
    columns, rows = slowest_table(["a", "b", "c"], trajectories, step=4)
    table = [dict(zip(columns, row, strict=True)) for row in rows]
    assert [row["trajectory"] for row in table] == ["b", "c", "a"]
    assert table[0]["why_late"] == "slot_queue_s 5.0, 5.0 beyond the median"
    assert table[1]["why_late"] == "failed (timeout): generate_s 9.5, 1.5 beyond the median"
    assert (table[0]["step"], table[0]["completion_s"], table[0]["other_s"]) == (4, 14.0, 0.0)
    assert table[0]["cached_tokens"] is None
    assert slowest_table([], [], step=4)[1] == []
