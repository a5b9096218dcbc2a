"""How much of a replica's memory a context takes: all that admission and routing need to know of it.

The unit is whatever the capacity is counted in: tokens of context in the simulator, cache blocks on a live replica,
where a recurrent state and the rounding to blocks make `held` more than proportional.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class ReplicaMemory(Protocol):
    """The memory of one replica."""

    @property
    def capacity(self) -> int:
        """What all sequences together can hold."""
        ...

    def held(self, context_tokens: int) -> int:
        """What one sequence with so many tokens of context holds."""
        ...


class LinearMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed part for each sequence (its recurrent state, the waste in its last block) and a part for each token."""

    capacity: int
    sequence: int = 0
    token: int = 1

    def held(self, context_tokens: int) -> int:
        return self.sequence + self.token * context_tokens


class BlockMemory(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's memory: blocks of `block_tokens` tokens, `attention` of them at once, and blocks for recurrent states."""

    capacity: int
    """Blocks, the null block left out."""
    block_tokens: int
    attention: int = 1
    """Groups of attention layers: each has its own blocks for the same tokens."""
    states: int = 0
    """Blocks of one sequence's recurrent states at their peak."""

    def held(self, context_tokens: int) -> int:
        return self.attention * -(-context_tokens // self.block_tokens) + self.states
