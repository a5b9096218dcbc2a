"""The plan: where bytes go, what is refused, which traps are named."""

from __future__ import annotations

import msgspec
import pytest

from makespan.rollout.resources.budget import GIB, NotEnoughMemory, budget
from makespan.rollout.resources.footprint import CacheSettings, footprint
from makespan.rollout.resources.plan import MemoryPlan, PlanRequest, make_plan
from makespan.rollout.resources.profile import WorkloadProfile, from_numbers
from makespan.rollout.resources.shape import ResourceError
from makespan.rollout.resources.vllm_wire import Played, ServedTurn
from tests.rollout.resources.conftest import FAMILIES, config_of

SHORT = from_numbers(prompt_tokens=600, turns=4, generated_tokens=50, observation_tokens=150, sample=24)


def planned(name: str, profile: WorkloadProfile = SHORT, **request: object) -> MemoryPlan:
    settings = request.pop("settings", CacheSettings())
    asked = PlanRequest(**{"memory_bytes": 141 * GIB, **request})  # type: ignore[arg-type]
    ranks = 4 if footprint(config_of(name)).weights_bytes > 120 * GIB else 1
    return make_plan(footprint(config_of(name), tensor_parallel=ranks, settings=settings), asked, profile)


def test_memory_divides_into_its_terms_without_rest():
    found = footprint(config_of("granite-4-h-tiny"))
    parts = budget(found, 80 * GIB, training_resident_bytes=20 * GIB, activations_bytes=2 * GIB)
    assert parts.reserved_bytes == 80 * GIB - int(80 * GIB * 0.92)
    assert (
        parts.reserved_bytes
        + parts.training_resident_bytes
        + parts.weights_bytes
        + parts.activations_bytes
        + parts.cache_bytes
        == 80 * GIB
    )
    assert parts.utilization == pytest.approx((0.92 * 80 - 20) / 80, abs=0.002)


def test_memory_below_the_weights_is_refused_with_the_term_and_the_amount():
    """32.2 billion weights of 2 bytes are 59.99 GiB; of 64 GiB 0.92 * 64 = 58.88 are left after the reserve."""
    found = footprint(config_of("granite-4-h-small"))
    with pytest.raises(NotEnoughMemory, match=r"the weights need 59.99 GiB, and 58.88 GiB are left .*: 1.11 GiB"):
        budget(found, 64 * GIB, activations_bytes=GIB)
    with pytest.raises(NotEnoughMemory, match=r"what training keeps resident need 60.00 GiB"):
        budget(found, 64 * GIB, training_resident_bytes=60 * GIB, activations_bytes=GIB)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gets_a_plan_that_fits(name):
    plan = planned(name)
    found = plan.footprint
    assert plan.num_blocks * found.bytes_per_block <= plan.memory.cache_bytes
    assert plan.reference_concurrency >= 1
    assert plan.max_num_seqs * found.blocks_held(1) <= plan.num_blocks - 1
    half, once, twice = plan.predictions
    assert half.concurrency <= once.concurrency == plan.reference_concurrency < twice.concurrency
    assert half.found_share >= once.found_share >= twice.found_share
    assert once.found_share > 0.9


def test_twice_the_reference_loses_cached_tokens_where_memory_is_scarce():
    long = from_numbers(prompt_tokens=4_000, turns=12, generated_tokens=100, observation_tokens=800, sample=24)
    plan = planned("nemotron-h-8b", long, memory_bytes=32 * GIB)
    half, _, twice = plan.predictions
    assert half.found_share == 1.0
    assert half.recomputed_tokens_per_turn == 0
    assert twice.found_share < 0.7
    assert twice.recomputed_tokens_per_turn > 1_000


def test_vllm_is_told_what_the_plan_decided():
    plan = planned("granite-4-h-tiny", settings=CacheSettings(match_unit=80, kv_cache_dtype="fp8"))
    arguments = plan.vllm_arguments()
    assert arguments["mamba_cache_mode"] == "align"
    assert arguments["prefix_match_unit"] == 80
    assert arguments["kv_cache_dtype"] == "fp8"
    assert arguments["kv_cache_memory_bytes"] == plan.memory.cache_bytes
    assert arguments["max_num_seqs"] == plan.max_num_seqs
    assert "block_size" not in arguments  # a GPU's vLLM finds it
    overrides = plan.verl_overrides()
    assert "actor_rollout_ref.rollout.enable_prefix_caching=true" in overrides
    assert "+actor_rollout_ref.rollout.engine_kwargs.vllm.prefix_match_unit=80" in overrides


def test_on_a_cpu_vllm_is_told_the_padded_block(embedded_model):
    found = footprint(embedded_model, platform="cpu", cpu_flags={"avx512_bf16"})
    plan = make_plan(found, PlanRequest(memory_bytes=2 * GIB), SHORT)
    assert plan.vllm_arguments()["block_size"] == 384
    assert "gpu_memory_utilization" not in plan.vllm_arguments()


def test_plain_attention_has_no_mamba_arguments():
    assert "mamba_cache_mode" not in planned("qwen3-8b").vllm_arguments()


def served(prompt: int, cached: int) -> Played:
    turn = ServedTurn(trajectory=0, turn=0, prompt_tokens=prompt, generated_tokens=1, cached_tokens=cached)
    return Played(
        turns=(turn,),
        preemptions=0,
        computed_tokens=prompt - cached,
        peak_blocks=1,
        allocated_blocks=1,
        simulated_s=1.0,
        complete=True,
    )


def test_vllms_scheduler_decides_between_candidates():
    """It says that the second one computes a tenth, whatever the pool's model says; and an incomplete answer counts for
    nothing."""
    found = footprint(config_of("granite-4-h-tiny"))
    request = PlanRequest(memory_bytes=141 * GIB)
    told = (served(1_000, 0), served(1_000, 900), served(1_000, 0))
    plan = make_plan(found, request, SHORT, played=told)
    assert plan.footprint.settings.match_unit == 16  # 400 tokens have no coarser divisor of at most 64 among 16, 32, 48
    assert [candidate.scheduler_computed_tokens for candidate in plan.candidates] == [1_000, 100, 1_000]
    unfinished = tuple(msgspec.structs.replace(one, complete=False) for one in told)
    asked_in_vain = make_plan(found, request, SHORT, played=unfinished)
    assert {candidate.scheduler_computed_tokens for candidate in asked_in_vain.candidates} == {None}


def test_settings_that_were_asked_for_are_kept():
    plan = planned("granite-4-h-tiny", settings=CacheSettings(retain_all=True))
    assert plan.vllm_arguments()["prefix_cache_retention_interval"] is None
    # verl leaves out what is null, and vLLM's command line reads the word None.
    assert "+actor_rollout_ref.rollout.engine_kwargs.vllm.prefix_cache_retention_interval=None" in plan.verl_overrides()
    assert plan.footprint.settings.retain_all
    assert len(plan.candidates) == 1


def test_a_workload_longer_than_the_context_or_the_memory_is_refused():
    long = from_numbers(prompt_tokens=3_000, turns=40, sample=8)
    with pytest.raises(ResourceError, match="outgrow the model's context of 4,096 tokens"):
        planned("zamba2-2.7b", long)
    with pytest.raises(ResourceError, match=r"GiB are missing"):
        planned("granite-4-h-tiny", long, memory_bytes=16 * GIB, activations_bytes=int(1.6 * GIB))
    with pytest.raises(ResourceError, match="longer than the model's context"):
        planned("zamba2-2.7b", max_model_len=5_000)


# Traps


def test_a_stretched_block_and_prompts_shorter_than_it_are_named_with_a_remedy():
    short = from_numbers(prompt_tokens=300, turns=4, generated_tokens=30, observation_tokens=30, spread=0.0, sample=8)
    plan = planned("kimi-linear-48b-a3b", short, settings=CacheSettings(match_unit=None, retain_all=True))
    said = {trap.what.split(" ")[0]: trap for trap in plan.warnings}
    assert "from 16 to 1920 tokens" in said["the"].what
    assert "8 of 8 first prompts fit into one block of 1920 tokens" in said["8"].what
    assert all(trap.remedy for trap in plan.warnings)


def test_a_model_whose_block_is_the_kernels_has_no_such_trap():
    assert not [trap for trap in planned("lfm2-1.2b").warnings if "stretches" in trap.what]


def test_fp8_keys_are_said_to_coarsen_hits():
    plan = planned("granite-4-h-tiny", settings=CacheSettings(kv_cache_dtype="fp8"))
    assert any("FP8" in trap.what and "800" in trap.what for trap in plan.warnings)


def test_no_prefix_caching_is_a_trap():
    plan = planned("granite-4-h-tiny", settings=CacheSettings(mamba_cache_mode="none"))
    assert any("every turn computes its whole prompt" in trap.what for trap in plan.warnings)


def test_more_sequences_than_blocks_are_named_with_how_many_would_do():
    from makespan.rollout.resources.traps import traps

    found = footprint(config_of("granite-4-h-tiny"))  # 19 blocks a sequence at least
    said = traps(found, SHORT, num_blocks=191, max_num_seqs=11, cached_share=0.9)
    assert any("11 sequences" in trap.what or "max_num_seqs=11" in trap.what for trap in said)
    assert any(trap.remedy == "max_num_seqs of at most 10" for trap in said)
    assert not [
        trap for trap in traps(found, SHORT, num_blocks=191, max_num_seqs=10, cached_share=0.9) if "=10" in trap.what
    ]


def test_a_step_of_the_pool_that_is_played_smaller_takes_as_long_as_one_of_the_whole():
    """One sequence stands for four: a step takes as long as with all four, and prefills as much of them."""
    from makespan.rollout.resources.plan import scaled
    from makespan.rollout.simulation.cost import InferenceCost

    cost = InferenceCost(step_s=0.01, sequence_s=1e-5, context_s=1e-8, prefill_s=2e-5, chunk_tokens=8_192)
    one = scaled(cost, 4.0)
    # A step with 4 sequences of 1,000 tokens each, and the one that stands for them.
    assert one.steps_s(1, 1, 1_000, 1, 500) == pytest.approx(cost.steps_s(1, 4, 4_000, 4, 2_000))
    assert one.chunk_tokens == 2_048
