"""How much of a replica's memory a context takes, while it runs and while it waits: all that admission and routing need
to know of it.

The unit is whatever the capacity is counted in: tokens of context in the simulator, cache blocks on a live replica,
where a recurrent state and the rounding to blocks make `held` more than proportional.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec


class Kept(NamedTuple):
    """What a turn leaves behind until its trajectory's next one."""

    tokens: int
    """Of the next prompt: so many need not be computed."""
    held: int
    """Memory that it takes while it waits."""


class ReplicaMemory(Protocol):
    """The memory of one replica."""

    @property
    def capacity(self) -> int:
        """What all sequences together can hold."""
        ...

    def held(self, context_tokens: int) -> int:
        """What one sequence with so many tokens of context holds while it runs, at its peak."""
        ...

    def kept(self, prompt_tokens: int, context_tokens: int) -> Kept:
        """What stays of a turn that ended with so many tokens of context, if nothing overwrites it."""
        ...


class LinearMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A fixed part for each sequence (its recurrent state, the waste in its last block) and a part for each token."""

    capacity: int
    sequence: int = 0
    token: int = 1

    def held(self, context_tokens: int) -> int:
        return self.sequence + self.token * context_tokens

    def kept(self, prompt_tokens: int, context_tokens: int) -> Kept:
        return Kept(context_tokens, self.held(context_tokens))


class BlockMemory(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's memory: blocks of `block_tokens` tokens, `attention` of them at once, and blocks for recurrent states."""

    capacity: int
    """Blocks, the null block left out."""
    block_tokens: int
    attention: int = 1
    """Groups of attention layers: each has its own blocks for the same tokens."""
    states: int = 0
    """Blocks of one sequence's recurrent states at their peak: the running ones, and with prefix caching as many that
    they were copied from."""
    prefix_caching: bool = True
    """Without it nothing is found again."""

    def held(self, context_tokens: int) -> int:
        return self.attention * -(-context_tokens // self.block_tokens) + self.states

    def kept(self, prompt_tokens: int, context_tokens: int) -> Kept:
        """Whole blocks alone are found again. A recurrent state is kept at the last block that ends in the prompt, so
        that what was generated is computed once more."""
        if not self.prefix_caching:
            return Kept(0, 0)
        found = prompt_tokens if self.states else context_tokens - 1  # the last token was sampled, not computed
        blocks = max(0, found) // self.block_tokens
        return Kept(blocks * self.block_tokens, self.attention * blocks + (self.states // 2 if blocks else 0))
