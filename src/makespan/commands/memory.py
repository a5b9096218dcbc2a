"""The memory of a live replica, for admission and routing: the engine reports its blocks, the closed form the rest."""

from __future__ import annotations

from pathlib import Path

from makespan.rollout.errors import ConfigError
from makespan.rollout.memory import BlockMemory
from makespan.rollout.replicas.wire import Ready
from makespan.rollout.resources.footprint import CacheSettings, ModelFootprint, footprint
from makespan.rollout.resources.shape import ResourceError


def replica_memory(model: Path, ready: Ready, *, on_gpu: bool, prefix_caching: bool) -> BlockMemory | None:
    """What a sequence holds of this replica; None when the engine does not say how many blocks it has.

    A model that the closed form does not know counts as if it had attention alone: its states are left out.
    """
    if ready.num_blocks is None:
        return None
    attention, states = 1, 0
    known = _footprint(model, on_gpu=on_gpu, prefix_caching=prefix_caching)
    if known is not None:
        attention, states = max(1, known.attention_groups), known.states_held
    return BlockMemory(
        capacity=max(1, ready.num_blocks - 1),
        block_tokens=ready.block_tokens,
        attention=attention,
        states=states,
        prefix_caching=prefix_caching,
    )


def check_blocks(num_blocks: int, model: Path, max_model_len: int, *, on_gpu: bool, prefix_caching: bool) -> None:
    """Raises `ConfigError` for too few blocks to hold one longest context, where the closed form knows the model."""
    known = _footprint(model, on_gpu=on_gpu, prefix_caching=prefix_caching)
    if known is None:
        return
    needed = known.blocks_held(max_model_len) + 1
    if num_blocks < needed:
        raise ConfigError(
            f"replicas.num_blocks: {num_blocks} cache blocks cannot hold one context of {max_model_len:,} tokens "
            f"(replicas.max_model_len), which takes {needed - 1} and vLLM one for itself: give at least {needed}, or "
            "shorten the contexts"
        )


def _footprint(model: Path, *, on_gpu: bool, prefix_caching: bool) -> ModelFootprint | None:
    settings = CacheSettings(mamba_cache_mode="align" if prefix_caching else "none")
    try:
        return footprint(model, platform="cuda" if on_gpu else "cpu", settings=settings)
    except ResourceError:
        return None
