"""Real GRPO steps of a stock verl trainer with makespan's plug-ins, looked at from outside.

The runs are made in `conftest.py`; the reconstruction of the tokens is in `reconstruction.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.integrations.verl.conftest import AT_ONCE, EXAMPLE, TrainerRun
from tests.integrations.verl.inside.observing_sampler import PROBE_IDS
from tests.integrations.verl.reconstruction import Row, Words, rebuild
from tests.integrations.verl.wandb_file import history

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]

TRAINED_STEPS = (1, 2, 3)
"""Of the run with one rank; its fourth step follows a weight sync that was lost on purpose."""

MEAN_TOLERANCE = 0.02
"""Mean absolute difference of log-probabilities between vLLM and transformers, both in bfloat16 on the CPU: their
kernels round differently. Measured 0.002 to 0.006."""

STALE_RATIO = 2.0
"""Weights that are one step old are at least this much farther away. Measured 0.019 to 0.2: how far a step moves the
weights depends on what was sampled in it."""

PEARSON_AT_LEAST = 0.99

SKEW_S = 0.5
"""By how much the trajectories of a step may start apart: their waits are counted from their own starts."""


def _rows(run: TrainerRun, step: int) -> list[dict[str, Any]]:
    return run.observed("batch", step)  # type: ignore[no-any-return]


@cache
def _logprobs(model: Path, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities of `ids[1:]` by transformers with these weights, in bfloat16."""
    from transformers import AutoModelForCausalLM

    module = _load(model, AutoModelForCausalLM)
    with torch.no_grad():
        logits = module(torch.tensor([ids])).logits[0].float()
    table = torch.log_softmax(logits, -1)
    return table[:-1].gather(-1, torch.tensor(ids)[1:, None])[:, 0]


@cache
def _load(model: Path, kind: Any) -> Any:
    # Small chunks of the Mamba layers take less memory and give the same result.
    return kind.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa", mamba_chunk_size=32).eval()


def _probe_distance(run: TrainerRun, step: int, weights: Path) -> float:
    """How far the replicas' log-probabilities in `step` are from transformers' with `weights`; the worst replica."""
    expected = _logprobs(weights, tuple(PROBE_IDS))
    return max((torch.tensor(answer) - expected).abs().mean().item() for answer in run.observed("probe", step).values())


# --- one rank, one replica ------------------------------------------------------------------------------------------


def test_the_run_ends_by_itself_and_prints_its_steps(one_rank: TrainerRun) -> None:
    assert one_rank.exit_code == 0, one_rank.output
    assert set(one_rank.steps()) == {1, 2, 3, 4}
    assert re.search(r"step 1 +step 2 +step 3 +step 4\n", one_rank.output)
    assert "makespan, s" in one_rank.output


@pytest.mark.parametrize("step", TRAINED_STEPS)
def test_what_was_sampled_and_what_is_trained_on_have_the_same_probabilities(one_rank: TrainerRun, step: int) -> None:
    assert one_rank.steps()[step]["training/rollout_actor_probs_pearson_corr"] >= PEARSON_AT_LEAST


@pytest.mark.parametrize("step", TRAINED_STEPS)
def test_after_each_weight_sync_vllm_computes_what_the_trainers_weights_say(one_rank: TrainerRun, step: int) -> None:
    distance = _probe_distance(one_rank, step, one_rank.weights_of_rollout(step))
    assert distance < MEAN_TOLERANCE
    if step > 1:
        assert _probe_distance(one_rank, step, one_rank.weights_of_rollout(step - 1)) > STALE_RATIO * distance


def test_a_lost_weight_sync_fails_that_check(one_rank: TrainerRun) -> None:
    """The control: the sync before step 4 was lost, so the replica still has the weights of step 3's rollout."""
    distance = _probe_distance(one_rank, 4, one_rank.weights_of_rollout(3))
    assert distance < MEAN_TOLERANCE
    assert _probe_distance(one_rank, 4, one_rank.weights_of_rollout(4)) > STALE_RATIO * distance


def _rebuilt(run: TrainerRun) -> Counter[Row]:
    (entry,) = yaml.safe_load((EXAMPLE / "agent_loops.yaml").read_text())
    words = Words(run.directory / "data" / "model")
    limits = {"max_turn_tokens": entry["max_turn_tokens"], "max_turns": entry["max_turns"]}
    return Counter(rebuild(record, words, **limits) for record in run.environment_records())


def test_the_batches_hold_exactly_the_tokens_and_masks_that_the_environments_record_says(one_rank: TrainerRun) -> None:
    trained = Counter(
        (tuple(row["prompts"]), tuple(row["responses"]), tuple(row["response_mask"]))
        for step in one_rank.steps()
        for row in _rows(one_rank, step)
    )
    assert trained == _rebuilt(one_rank)
    assert trained.total() == 4 * 8


def test_one_corrupted_token_or_mask_fails_that_comparison(one_rank: TrainerRun) -> None:
    rebuilt = _rebuilt(one_rank)
    prompt, response, mask = next(iter(rebuilt))
    other_token = (*response[:-1], response[-1] ^ 1)
    other_mask = (1 - mask[0], *mask[1:])
    assert (prompt, other_token, mask) not in rebuilt
    assert (prompt, response, other_mask) not in rebuilt


@pytest.mark.parametrize("step", TRAINED_STEPS)
def test_the_batchs_log_probabilities_belong_to_their_tokens_one_by_one(one_rank: TrainerRun, step: int) -> None:
    weights = one_rank.weights_of_rollout(step)
    for row in _rows(one_rank, step):
        expected = _logprobs(weights, tuple(row["prompts"] + row["responses"]))[len(row["prompts"]) - 1 :]
        given, mask = torch.tensor(row["rollout_log_probs"]), torch.tensor(row["response_mask"]).bool()
        assert torch.all(given[~mask] == 0.0)
        assert torch.all(given[mask] < 0.0)
        assert (given - expected)[mask].abs().mean() < MEAN_TOLERANCE
        assert (given - expected)[mask].abs().max() < 10 * MEAN_TOLERANCE
        shifted = expected.roll(1)
        assert (given - shifted)[mask].abs().mean() > MEAN_TOLERANCE  # the control: off by one token


def test_each_turns_prompt_begins_with_the_turn_before_so_the_cache_is_hit(one_rank: TrainerRun) -> None:
    for step in one_rank.steps().values():
        assert step["makespan/tokens/cached"] > 0
        assert step["makespan/tokens/cached"] < step["makespan/tokens/prompt"]


def test_the_steps_makespan_figures_agree_with_its_rows(one_rank: TrainerRun) -> None:
    for number, step in one_rank.steps().items():
        rows = [row["makespan"] for row in _rows(one_rank, number)]
        assert step["makespan/trajectories/total"] == len(rows) == 8
        assert step["makespan/trajectories/failed"] == 0
        assert step["makespan/completion_s/p99"] == pytest.approx(max(row["completion_s"] for row in rows))
        assert step["makespan/makespan_s"] >= 0.95 * step["makespan/completion_s/p99"]
        generated = sum(sum(row["response_mask"]) for row in _rows(one_rank, number))
        assert step["makespan/tokens/generated"] == generated


def test_wandb_offline_holds_each_steps_makespan_figures(one_rank: TrainerRun) -> None:
    (run_file,) = (one_rank.directory / "wandb").glob("offline-run-*/run-*.wandb")
    logged = history(run_file)
    for number, step in one_rank.steps().items():
        (entry,) = [row for row in logged if row.get("training/global_step") == number]
        for name in ("makespan/makespan_s", "makespan/completion_s/p99", "makespan/tokens/cached"):
            assert entry[name] == pytest.approx(step[name])


def test_the_coordinator_learns_from_step_to_step(one_rank: TrainerRun) -> None:
    first, third, fourth = (one_rank.observed("coordinator", step) for step in (1, 3, 4))
    assert first["running"] + first["over"] == 8  # this step's trajectories; no step was there to learn from
    assert first["steps_learnt"] == 0
    assert third["incarnation"] == fourth["incarnation"]
    assert fourth["steps_learnt"] == third["steps_learnt"] + 1 >= 2


def test_a_coordinator_that_is_killed_in_mid_step_is_replaced_and_nothing_stops(one_rank: TrainerRun) -> None:
    before, after = one_rank.observed("coordinator", "killed"), one_rank.observed("coordinator", 2)
    assert before["running"] > 0
    assert after["incarnation"] != before["incarnation"]
    assert after["steps_learnt"] == 0  # without a history file it begins anew
    assert one_rank.steps()[2]["makespan/trajectories/failed"] == 0
    assert one_rank.steps()[2]["makespan/trajectories/total"] == 8


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_some_trajectories_start_when_others_are_over_also_where_the_coordinator_died(
    one_rank: TrainerRun, step: int
) -> None:
    """They wait for as long as the first one took; how long all wait for a coordinator that comes up does not count."""
    rows = [row["makespan"] for row in _rows(one_rank, step)]
    first_s = min(row["completion_s"] for row in rows)
    waited = [row for row in rows if row["admission_s"] > first_s - SKEW_S]
    assert len(waited) >= len(rows) - AT_ONCE
    assert len(waited) < len(rows)  # the control: somebody was the first
    assert one_rank.steps()[step]["makespan/phases_s/admission"] > 0.0


def test_no_more_are_admitted_than_may_be_and_nobody_is_left_waiting(one_rank: TrainerRun) -> None:
    killed = one_rank.observed("coordinator", "killed")
    assert 0 < killed["admitted"] <= AT_ONCE
    for step in (1, 2, 3, 4):
        over = one_rank.observed("coordinator", step)
        assert (over["waiting"], over["parked"]) == (0, 0)


def test_nothing_of_the_run_is_left_behind(one_rank: TrainerRun) -> None:
    """No process: Ray's and vLLM's make sessions of their own, but all inherit where the run writes to."""
    mark = f"VERL_CPU_OUT={one_rank.directory}".encode()
    left = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environment.read_bytes().split(b"\0"):
                left.append(environment)
        except OSError:  # ended meanwhile, or somebody else's
            continue
    assert left == []


def test_no_shared_memory_of_the_run_is_left_behind(one_rank: TrainerRun, two_ranks: TrainerRun) -> None:
    for run in (one_rank, two_ranks):
        segments = run.observed("segments", 1)
        assert segments  # the control: vLLM's processes had some
        assert [segment for segment in segments if Path(segment).exists()] == []


# --- two ranks, two replicas, and a worker that is killed ------------------------------------------------------------


def test_two_ranks_and_two_replicas_train_and_a_killed_worker_does_not_stop_the_step(two_ranks: TrainerRun) -> None:
    assert two_ranks.exit_code == 0, two_ranks.output
    first, second = two_ranks.steps()[1], two_ranks.steps()[2]
    assert (first["makespan/trajectories/total"], first["makespan/groups/abandoned"]) == (8, 0)
    assert second["makespan/groups/abandoned"] == 2  # the dead worker had two of the four prompts
    assert 4 <= second["makespan/trajectories/total"] < 8


@pytest.mark.parametrize("step", [1, 2])
def test_both_replicas_have_the_trainers_weights(two_ranks: TrainerRun, step: int) -> None:
    assert len(two_ranks.observed("probe", step)) == 2
    assert _probe_distance(two_ranks, step, two_ranks.weights_of_rollout(step)) < MEAN_TOLERANCE
    assert two_ranks.steps()[step]["training/rollout_actor_probs_pearson_corr"] >= PEARSON_AT_LEAST


def test_the_router_used_both_replicas_and_counts_nothing_of_the_dead_worker(two_ranks: TrainerRun) -> None:
    before, after = two_ranks.observed("router", 1), two_ranks.observed("router", 2)
    assert before["total_inflight"] == after["total_inflight"] == 0
    assert before["active_servers"] == 2
    assert after["tickets"]["worker_lost"] > 0


def test_every_row_of_the_interrupted_step_is_one_that_the_environment_recorded(two_ranks: TrainerRun) -> None:
    rebuilt = _rebuilt(two_ranks)
    for row in _rows(two_ranks, 2):
        assert (tuple(row["prompts"]), tuple(row["responses"]), tuple(row["response_mask"])) in rebuilt
