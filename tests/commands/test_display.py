"""What people read: a line of progress, and figures that say when they were not measured."""

from __future__ import annotations

import io

from rich.console import Console

from makespan.commands.display import progress_line, show_summary
from makespan.rollout.engine import EngineStatus
from makespan.rollout.telemetry.analysis import Completions, Phases, Tail, Tokens
from makespan.rollout.telemetry.bounds import Bounds
from makespan.rollout.telemetry.last_chain import LastChain
from makespan.rollout.telemetry.summary import Reward, Summary, TrajectoryCounts


def test_progress_says_what_runs_how_fast_and_how_long_it_still_takes():
    status = EngineStatus(total=20, done=7, failed=1, running=4, waiting=8, acting=3, generated_tokens=5_000, turns=90)
    # 8 of 20 are over after 50 s: the other 12 take 75 s at the same pace; 5,000 tokens in 50 s are 100 a second.
    assert progress_line(status, 50.0, "3/8 step") == (
        "7/20 done, 1 failed, 4 running (3 in the environment), 8 waiting | 100 tokens/s | slots 3/8 step | "
        "50 s, 75 s left"
    )


def test_progress_admits_that_it_knows_nothing_yet():
    status = EngineStatus(total=2, done=0, failed=0, running=2, waiting=0, acting=0, generated_tokens=0, turns=0)
    assert progress_line(status, 0.0, "unknown").endswith("0 tokens/s | slots unknown | 0 s, time left unknown")


def summary(**changes) -> Summary:
    values = {
        "version": 1,
        "name": "test",
        "makespan_s": 20.0,
        "complete": True,
        "lower_bound_s": 10.0,
        "bounds_s": Bounds(slots={"x.step": 10.0}, inference=None, chain=None),
        "tail_s": Tail(after_90=4.0, after_99=0.5),
        "last_chain": LastChain(
            trajectory_id="slow#0",
            turns=3,
            total=20.0,
            admission=1.0,
            inference=6.0,
            replica_queue=None,
            prefill=None,
            recomputation=None,
            decode=None,
            slot_queue=2.5,
            environment=10.5,
            overhead=0.0,
        ),
        "trajectories": TrajectoryCounts(total=3, finished=2, truncated=0, failed=1, cancelled=0),
        "completion_s": Completions(p50=5.0, p90=9.0, p99=9.9),
        "phases_s": Phases(
            admission=1.0, replica_queue=None, prefill=None, decode=None, slot_queue=0.0, environment=4.0, overhead=None
        ),
        "tokens": Tokens(prompt=1000, cached=None, recomputed=None, generated=100),
        "preemptions": None,
        "inferences": 7,
        "reward": Reward(source="script", mean=1.0, by_task={"a": 1.0}),
        "environment_utilisation": None,
        "slot_classes": {},
        "failures": {"raised": 1},
        "notes": ["a note"],
        "setup_s": None,
        "machine": {},
    }
    return Summary(**{**values, **changes})


def printed(value: Summary) -> dict[str, str]:
    console = Console(file=io.StringIO(), width=160)
    show_summary(console, value)
    rows = [line.strip("│").split("│") for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return {name.strip(): cell.strip() for name, cell in rows}


def test_what_was_not_measured_is_not_shown_as_zero():
    rows = printed(summary())
    for name in ("cached", "recomputed", "preemptions", "seconds in prefill", "prefill's share of request time"):
        assert rows[name] == "not measured"


def test_the_makespan_stands_beside_its_bound_and_failures_beside_rewards():
    rows = printed(summary())
    assert rows["makespan"] == "20.0 s (2.00 times the lower bound)"
    assert rows["trajectories"] == "3: finished 2, failed 1"
    assert rows["failed: raised"] == "1"
    assert "stopped early" in printed(summary(complete=False))["makespan"]


def test_the_tail_and_the_last_trajectory_are_explained():
    rows = printed(summary())
    assert rows["last 10% / last 1% took"] == "4.0 s / 0.5 s"
    assert rows["last to end"] == "slow#0: environment 10.5 s, slot queue 2.5 s, admission 1.0 s"
    assert "last to end" not in printed(summary(last_chain=None))


def test_a_scripted_reward_is_never_shown_as_the_models():
    assert "reward (scripted actions: says nothing of the model)" in printed(summary())
    rows = printed(summary(reward=Reward(source="model", mean=0.0, by_task={"a": 0.0})))
    assert rows["reward"] == "0.000"
    assert rows["a"] == "0.000"  # a model's rewards are printed one by one, also when they are zero
