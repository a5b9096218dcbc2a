"""The plan of a replica's memory: how much goes where, which settings, and how many trajectories it carries.

`make_plan` is a pure function of a footprint, a device's memory and a workload. What vLLM's scheduler says of the
candidates is handed to it, where there is a vLLM to ask.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from makespan.rollout.resources import pool
from makespan.rollout.resources.budget import GIB, MemoryBudget, activations, budget
from makespan.rollout.resources.candidates import Candidate, choose, score, settings_of
from makespan.rollout.resources.footprint import CacheSettings, ModelFootprint, reference_concurrency
from makespan.rollout.resources.profile import WorkloadProfile
from makespan.rollout.resources.shape import ResourceError
from makespan.rollout.resources.traps import Trap, traps
from makespan.rollout.resources.vllm_wire import Played
from makespan.rollout.simulation.cost import InferenceCost

PLAN_VERSION = 1

SIMULATED = 32
"""Trajectories at once that a pool is played with: a larger pool is played smaller, and the result scaled."""

MOST_SEQUENCES = 1024


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a concurrency does to one replica."""

    concurrency: int
    cached_share: float
    """Of all prompt tokens."""
    found_share: float
    """Of what could have been found had nothing been overwritten."""
    recomputed_tokens_per_turn: float
    """Prompt tokens computed again, in the mean over turns."""
    generated_tokens_per_s: float
    """By the costs that the plan was given; guesses unless they were calibrated."""


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for one replica of `footprint.tensor_parallel` devices; bytes are those of one device."""

    version: int = PLAN_VERSION
    footprint: ModelFootprint
    memory: MemoryBudget
    num_blocks: int
    reference_concurrency: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    predictions: tuple[Prediction, ...]
    candidates: tuple[Candidate, ...]
    warnings: tuple[Trap, ...]
    notes: tuple[str, ...]
    workload_source: str
    workload: dict[str, float]
    calibrated: bool

    def vllm_arguments(self) -> dict[str, int | float | str | bool | None]:
        """vLLM's arguments, by their Python names (`EngineArgs`)."""
        found = self.footprint
        settings = found.settings
        arguments: dict[str, int | float | str | bool | None] = {
            "tensor_parallel_size": found.tensor_parallel,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": found.prefix_caching,
            "kv_cache_memory_bytes": self.memory.cache_bytes,
        }
        if found.platform == "cuda":
            arguments["gpu_memory_utilization"] = self.memory.utilization
        if found.recurrent_groups:
            arguments["mamba_cache_mode"] = settings.mamba_cache_mode
            if found.platform == "cpu" and found.prefix_caching:
                # vLLM 0.30 resets a block size that was not given to 128 on the CPU, and checkpoints then miss.
                arguments["block_size"] = found.block_tokens
        if settings.block_size is not None:
            arguments["block_size"] = found.block_tokens
        for name in ("kv_cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype"):
            if (dtype := getattr(settings, name)) != "auto":
                arguments[name] = dtype
        if settings.match_unit is not None:
            arguments["prefix_match_unit"] = settings.match_unit
        if settings.retain_all:
            arguments["prefix_cache_retention_interval"] = None
        return arguments

    def verl_overrides(self) -> list[str]:
        """Overrides of verl's configuration that say the same."""
        own = {"tensor_parallel_size": "tensor_model_parallel_size"}
        known = {
            "tensor_parallel_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "enable_prefix_caching",
            "gpu_memory_utilization",
        }
        overrides = []
        for name, value in self.vllm_arguments().items():
            # verl leaves out what is null; vLLM's command line reads the word None.
            text = str(value) if isinstance(value, (str, type(None))) else json.dumps(value)
            if name in known:
                overrides.append(f"actor_rollout_ref.rollout.{own.get(name, name)}={text}")
            else:
                overrides.append(f"+actor_rollout_ref.rollout.engine_kwargs.vllm.{name}={text}")
        return overrides


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan is made for."""

    memory_bytes: int
    training_resident_bytes: int = 0
    activations_bytes: int | None = None
    """None: estimated."""
    weights_bytes: int | None = None
    """None: the footprint's, in bfloat16."""
    max_model_len: int | None = None
    """None: the model's context."""
    max_num_batched_tokens: int = 8192
    cost: InferenceCost | None = None
    """None: the simulator's guesses."""

    def length(self, footprint: ModelFootprint) -> int:
        """The longest context of the replica. Raises `ResourceError`."""
        if self.max_model_len is None:
            return footprint.max_context_tokens
        if self.max_model_len > footprint.max_context_tokens:
            raise ResourceError(
                f"max_model_len={self.max_model_len:,} is longer than the model's context of "
                f"{footprint.max_context_tokens:,} tokens"
            )
        return self.max_model_len

    def inference_cost(self) -> InferenceCost:
        """The costs, with this request's chunk."""
        given = self.cost or InferenceCost()
        return msgspec.structs.replace(given, chunk_tokens=self.max_num_batched_tokens)


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of blocks and how many trajectories it carries."""

    memory: MemoryBudget
    num_blocks: int
    reference_concurrency: int
    factor: float
    """The pool that is played is so many times smaller, and each trajectory in it stands for so many."""
    cost: InferenceCost
    """Costs in the pool that is played: what a trajectory does is done so many times in a step."""

    @property
    def blocks_a_trajectory(self) -> float:
        return (self.num_blocks - 1) / self.reference_concurrency

    @property
    def played_blocks(self) -> int:
        return max(2, round((self.num_blocks - 1) / self.factor) + 1)


def carried(footprint: ModelFootprint, request: PlanRequest, profile: WorkloadProfile) -> Carried:
    """How many trajectories a device's memory carries. Raises `ResourceError` where it does not carry one."""
    working = request.activations_bytes
    if working is None:
        working = activations(footprint, request.max_num_batched_tokens, 256)
    memory = budget(
        footprint,
        request.memory_bytes,
        training_resident_bytes=request.training_resident_bytes,
        weights_bytes=request.weights_bytes,
        activations_bytes=working,
    )
    blocks = footprint.num_blocks(memory.cache_bytes)
    longest = footprint.blocks_held(profile.longest_tokens)
    if blocks - 1 < longest:
        short = (longest + 1) * footprint.bytes_per_block - memory.cache_bytes
        raise ResourceError(
            f"one context of {profile.longest_tokens:,} tokens needs {longest:,} blocks of "
            f"{footprint.bytes_per_block:,} bytes, and {memory.cache_bytes / GIB:.2f} GiB are {blocks:,}: "
            f"{short / GIB:.2f} GiB are missing; more ranks, more memory, or shorter trajectories"
        )
    cost = request.inference_cost()
    guess = reference_concurrency(footprint, blocks, profile.contexts_tokens)
    factor = max(1.0, guess / SIMULATED)
    # A smaller pool must still hold the longest trajectory.
    factor = max(1.0, min(factor, (blocks - 1) / (2 * longest)))
    played = max(2, round((blocks - 1) / factor) + 1)
    played_cost = scaled(cost, factor)
    knee = pool.knee(footprint, played, profile.trajectories, played_cost, guess=max(1, round(guess / factor)))
    return Carried(
        memory=memory,
        num_blocks=blocks,
        reference_concurrency=max(1, int(knee * factor)),
        factor=factor,
        cost=played_cost,
    )


def scaled(cost: InferenceCost, factor: float) -> InferenceCost:
    """The cost where one sequence stands for `factor`: a step is the same step, with so many fewer things in it."""
    return InferenceCost(
        step_s=cost.step_s,
        sequence_s=cost.sequence_s * factor,
        context_s=cost.context_s * factor,
        prefill_s=cost.prefill_s * factor,
        chunk_tokens=max(1, round(cost.chunk_tokens / factor)),
    )


def make_plan(
    footprint: ModelFootprint,
    request: PlanRequest,
    profile: WorkloadProfile,
    *,
    played: Sequence[Played] = (),
    notes: Sequence[str] = (),
) -> MemoryPlan:
    """The plan.

    Args:
        footprint: with the settings that candidates are derived from.
        request: the device and what is asked of it.
        profile: the workload.
        played: what vLLM's scheduler did with `candidates.small_plays`, in their order; empty: not asked.
        notes: what the reader should know of the footprint's source.

    Raises `ResourceError`: memory below the weights, a workload that is longer than the model's context or the memory.
    """
    length = request.length(footprint)
    profile = profile.within(length)
    carries = carried(footprint, request, profile)
    at = max(1, round(carries.reference_concurrency / carries.factor))
    scored = score(footprint, settings_of(footprint), carries.played_blocks, profile.trajectories, at, carries.cost)
    judged = choose(scored, played)
    chosen = next(candidate for candidate in judged if candidate.chosen)
    if chosen.settings != footprint.settings:
        footprint = msgspec.structs.replace(footprint, settings=chosen.settings)
        carries = carried(footprint, request, profile)
    reference = carries.reference_concurrency
    predictions = tuple(
        predict(footprint, carries, profile, concurrency)
        for concurrency in sorted({max(1, reference // 2), reference, 2 * reference})
    )
    sequences = max_num_seqs(footprint, carries)
    share = next(one.cached_share for one in predictions if one.concurrency == reference)
    return MemoryPlan(
        footprint=footprint,
        memory=carries.memory,
        num_blocks=carries.num_blocks,
        reference_concurrency=reference,
        max_num_seqs=sequences,
        max_model_len=length,
        max_num_batched_tokens=request.max_num_batched_tokens,
        predictions=predictions,
        candidates=tuple(judged),
        warnings=tuple(traps(footprint, profile, carries.num_blocks, sequences, share)),
        notes=tuple(notes),
        workload_source=profile.source,
        workload=profile.summary(),
        calibrated=request.cost is not None,
    )


def max_num_seqs(footprint: ModelFootprint, carries: Carried) -> int:
    """Room for a quarter more sequences than the reference, as all may be at the replica at once, but never more than
    there are blocks for."""
    least = max(1, (carries.num_blocks - 1) // footprint.blocks_held(1))
    return min(least, MOST_SEQUENCES, carries.reference_concurrency + carries.reference_concurrency // 4 + 1)


def predict(footprint: ModelFootprint, carries: Carried, profile: WorkloadProfile, concurrency: int) -> Prediction:
    """Play a concurrency, in the scale of the pool that is played."""
    at = max(1, round(concurrency / carries.factor))
    batch = pool.batch(profile.trajectories, at)
    outcome = pool.play(footprint, carries.played_blocks, batch, at, carries.cost)
    turns = sum(map(len, batch))
    return Prediction(
        concurrency=concurrency,
        cached_share=outcome.cached_tokens / outcome.prompt_tokens,
        found_share=outcome.cached_share,
        recomputed_tokens_per_turn=outcome.recomputed_tokens / turns,
        generated_tokens_per_s=outcome.tokens_per_s * carries.factor,
    )


def base_settings(mode: str, **settings: str | int | bool | None) -> CacheSettings:
    """Settings from a command line's strings. Raises `ResourceError` for a mode that is none."""
    try:
        return msgspec.convert({"mamba_cache_mode": mode, **settings}, CacheSettings)
    except msgspec.ValidationError as error:
        raise ResourceError(f"settings of the cache: {error}") from error
