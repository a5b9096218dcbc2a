"""What memory is left for blocks: a GPU's memory, less what training keeps there, the weights and the working space.

The working space is an estimate, as it depends on kernels and compiled graphs: the activations of a step's tokens, the
logits of the sequences that are sampled, and a fixed part for the runtime. vLLM measures it when it starts; a plan that
has to be exact takes vLLM's figure (`--activations`).
"""

from __future__ import annotations

import msgspec

from makespan.rollout.resources.footprint import ModelFootprint, Platform
from makespan.rollout.resources.shape import ResourceError

GIB = 1 << 30

USABLE = 0.92
"""Share of a device's memory that is planned for; vLLM's own default."""

RUNTIME_BYTES: dict[Platform, int] = {"cuda": 3 * GIB // 2, "cpu": GIB // 4}
"""Driver, communication buffers and compiled graphs."""

WIDTHS = 16
"""Vectors of the model's width that a token of a step takes at most, of two bytes an element."""

LOGIT_BYTES = 10
"""Of a word a sampled sequence: bfloat16 logits, their float32 copy, and the sampler's."""


class NotEnoughMemory(ResourceError):
    """The memory does not hold the model: which term, and by how much."""


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Where the bytes of one device go."""

    memory_bytes: int
    reserved_bytes: int
    """Left free, for fragments and whatever else runs there."""
    training_resident_bytes: int
    weights_bytes: int
    activations_bytes: int
    cache_bytes: int
    """For blocks: states, keys and values."""

    @property
    def utilization(self) -> float:
        """The share of the device that vLLM may take, all but what training keeps (`gpu_memory_utilization`)."""
        used = self.weights_bytes + self.activations_bytes + self.cache_bytes
        return int(1000 * used / self.memory_bytes) / 1000


def activations(footprint: ModelFootprint, batched_tokens: int, sequences: int) -> int:
    """The estimate of the working space of a step, in bytes."""
    step = batched_tokens * footprint.hidden * WIDTHS * 2
    logits = sequences * footprint.vocabulary * LOGIT_BYTES // footprint.tensor_parallel
    return step + logits + RUNTIME_BYTES[footprint.platform]


def budget(
    footprint: ModelFootprint,
    memory_bytes: int,
    *,
    training_resident_bytes: int = 0,
    weights_bytes: int | None = None,
    activations_bytes: int,
) -> MemoryBudget:
    """Divide a device's memory. Raises `NotEnoughMemory`."""
    weights = footprint.weights_bytes if weights_bytes is None else weights_bytes
    reserved = memory_bytes - int(memory_bytes * USABLE)
    left = memory_bytes
    terms = (
        ("the reserve of 8%", reserved),
        ("what training keeps resident", training_resident_bytes),
        ("the weights", weights),
        ("activations and runtime", activations_bytes),
    )
    for name, taken in terms:
        if taken > left:
            before = ", ".join(f"{other} {_gib(size)}" for other, size in terms[: terms.index((name, taken))])
            raise NotEnoughMemory(
                f"{_gib(memory_bytes)} of memory: {name} need {_gib(taken)}, and {_gib(left)} are left after {before}: "
                f"{_gib(taken - left)} are missing; more ranks (--tp), more memory, or less resident training state"
            )
        left -= taken
    return MemoryBudget(
        memory_bytes=memory_bytes,
        reserved_bytes=reserved,
        training_resident_bytes=training_resident_bytes,
        weights_bytes=weights,
        activations_bytes=activations_bytes,
        cache_bytes=left,
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
