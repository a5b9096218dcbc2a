"""The memory of a live replica, for admission and routing: the engine reports its blocks, the closed form the rest."""

from __future__ import annotations

from pathlib import Path

from makespan.rollout.memory import BlockMemory
from makespan.rollout.replicas.wire import Ready
from makespan.rollout.resources.footprint import CacheSettings, footprint
from makespan.rollout.resources.shape import ResourceError


def replica_memory(model: Path, ready: Ready, *, on_gpu: bool, prefix_caching: bool) -> BlockMemory | None:
    """What a sequence holds of this replica; None when the engine does not say how many blocks it has.

    A model that the closed form does not know counts as if it had attention alone: its states are left out.
    """
    if ready.num_blocks is None:
        return None
    attention, states = 1, 0
    try:
        known = footprint(
            model,
            platform="cuda" if on_gpu else "cpu",
            settings=CacheSettings(mamba_cache_mode="align" if prefix_caching else "none"),
        )
        attention, states = max(1, known.attention_groups), known.states_held
    except ResourceError:
        pass
    return BlockMemory(
        capacity=max(1, ready.num_blocks - 1), block_tokens=ready.block_tokens, attention=attention, states=states
    )
