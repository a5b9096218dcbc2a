import pytest

from makespan.rollout.replicas.base import Completion
from makespan.rollout.simulation.tokens import CountedTokens
from makespan.rollout.telemetry.entries import inference
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.telemetry.merge import read_log
from makespan.rollout.trajectory import Task, Trajectory


@pytest.mark.parametrize(
    ("prompt_tokens", "computed_tokens", "cached_tokens", "recomputed_tokens"),
    [
        (100, 60, 0, 60),
        (100, 60, 16, 44),
        (100, 60, 80, 0),  # another trajectory had computed the rest
        (100, 500, 16, 84),  # the context dropped most of its history: no more than the uncached prompt is computed
        (100, 60, None, None),
    ],
)
def test_recomputed_tokens_are_uncached_tokens_of_this_prompt(
    tmp_path, prompt_tokens, computed_tokens, cached_tokens, recomputed_tokens
):
    trajectory = Trajectory("a#0", Task(task_id="a", environment="env"), "a", CountedTokens(prompt_tokens))
    trajectory.computed_tokens = computed_tokens
    completion = Completion(
        token_ids=[1],
        logprobs=None,
        stop_reason="length",
        cached_tokens=cached_tokens,
        preemptions=0,
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )
    with EventLog(tmp_path / "engine.jsonl", "engine") as events:
        inference(events, trajectory, 0, "replica-0", completion, 0.0)
    (event,) = read_log(tmp_path / "engine.jsonl").events
    assert event.data["recomputed_tokens"] == recomputed_tokens
