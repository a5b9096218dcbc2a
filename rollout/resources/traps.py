"""Known traps of a plan, each with its remedy."""

from __future__ import annotations

import statistics

import msgspec

from makespan.rollout.resources.footprint import KERNEL_BLOCK_TOKENS, ModelFootprint
from makespan.rollout.resources.profile import WorkloadProfile


class Trap(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong, and what to do about it."""

    what: str
    remedy: str


INFLATED = 8
"""Times the kernel's block from which a block counts as inflated."""


def traps(
    footprint: ModelFootprint, profile: WorkloadProfile, num_blocks: int, max_num_seqs: int, cached_share: float
) -> list[Trap]:
    """The traps that this plan is in. `cached_share`: of all prompt tokens, at the reference concurrency."""
    found = [
        *_inflated(footprint),
        *_short_prompts(footprint, profile),
        *_too_many_sequences(footprint, num_blocks, max_num_seqs),
        *_coarse(footprint),
    ]
    if not footprint.prefix_caching:
        found.append(
            Trap(
                what="every turn computes its whole prompt: nothing is found of the last one (mamba_cache_mode=none)",
                remedy="take mamba_cache_mode=align unless trajectories have one turn",
            )
        )
    elif cached_share < 0.3 and footprint.recurrent_groups:
        found.append(
            Trap(
                what=f"only {cached_share:.0%} of the prompt tokens are found: turns add about as much as a block "
                f"({footprint.block_tokens} tokens) or more",
                remedy="a smaller block (more ranks, a smaller state dtype) or prefix_match_unit",
            )
        )
    return found


def _inflated(footprint: ModelFootprint) -> list[Trap]:
    kernel = footprint.settings.block_size or KERNEL_BLOCK_TOKENS[footprint.platform]
    if not footprint.recurrent_groups or footprint.block_tokens < INFLATED * kernel:
        return []
    wasted = footprint.recurrent_layers * footprint.page_bytes / footprint.state_bytes_per_sequence - 1
    return [
        Trap(
            what=f"the page of one state stretches attention blocks from {kernel} to {footprint.block_tokens} tokens "
            f"(and pads states by {wasted:.0%}): hits come in steps of that, and a short context holds a whole block",
            remedy="more ranks divide the state, mamba_ssm_cache_dtype=bfloat16 halves a float32 one, "
            "prefix_match_unit makes hits finer",
        )
    ]


def _short_prompts(footprint: ModelFootprint, profile: WorkloadProfile) -> list[Trap]:
    if not footprint.prefix_caching or footprint.settings.match_unit is not None:
        return []
    first = [turns[0].new_tokens for turns in profile.trajectories if len(turns) > 1]
    short = sum(tokens <= footprint.block_tokens for tokens in first)
    if not first or short < len(first) / 4:
        return []
    return [
        Trap(
            what=f"{short} of {len(first)} first prompts fit into one block of {footprint.block_tokens} tokens (the "
            f"median has {statistics.median(first):,.0f}): their second turn finds nothing",
            remedy="a smaller block, prefix_match_unit, or a longer system prompt in front",
        )
    ]


def _too_many_sequences(footprint: ModelFootprint, num_blocks: int, max_num_seqs: int) -> list[Trap]:
    least = footprint.blocks_held(1)
    if max_num_seqs * least <= num_blocks - 1:
        return []
    return [
        Trap(
            what=f"max_num_seqs={max_num_seqs} sequences of one token need {max_num_seqs * least:,} blocks, and there "
            f"are {num_blocks - 1:,}: vLLM will preempt before it runs so many",
            remedy=f"max_num_seqs of at most {(num_blocks - 1) // least}",
        )
    ]


def _coarse(footprint: ModelFootprint) -> list[Trap]:
    if not footprint.settings.kv_cache_dtype.startswith("fp8") or not footprint.recurrent_groups:
        return []
    return [
        Trap(
            what=f"FP8 keys and values halve a token and so double the tokens of a block, to {footprint.block_tokens}: "
            "memory for contexts is saved, and hits get coarser",
            remedy="prefix_match_unit, or FP8 only where contexts are many blocks long",
        )
    ]
