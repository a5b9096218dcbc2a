"""The parts of a model that decide about memory: how many layers keep what.

A hybrid model has two kinds of layers that remember. An *attention* layer keeps keys and values of every token, so its
memory grows with the context. A *recurrent* layer (Mamba, gated delta net, short convolution, ...) keeps one state of
fixed size a sequence: the last inputs of a convolution, and a matrix a head. `ModelShape` holds the sizes of both for
the whole model, as read from its `config.json`; the methods divide them between tensor-parallel ranks as vLLM does.
"""

from __future__ import annotations

import math

import msgspec

from makespan.rollout.errors import MakespanError


class ResourceError(MakespanError):
    """A model, a machine and a workload that do not go together, or a model that is not known."""


class UnknownArchitecture(ResourceError):
    """The model's architecture is none that a closed form is known for."""


class BadConfig(ResourceError):
    """The model's `config.json` lacks something, or contradicts itself."""


class BadParallelism(ResourceError):
    """The model cannot be divided between so many ranks."""


class RecurrentState(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's state of one sequence, undivided."""

    conv_channels: int = 0
    """Channels of the convolution that are divided between the ranks."""
    conv_groups: int = 0
    """Groups of `B` and `C` in Mamba2. Where the ranks do not divide them there are as many as ranks instead."""
    conv_group_channels: int = 0
    conv_kernel: int = 1
    """The convolution remembers `conv_kernel - 1` inputs a channel."""
    heads: int = 0
    """Heads of the recurrent part (Mamba1: channels)."""
    head_elements: int = 0
    """Elements of one head's matrix."""
    float32: bool = False
    """The recurrent part is float32 unless the user says otherwise, on every platform."""
    fixed_to_conv: bool = False
    """The recurrent part always has the dtype of the convolution's part (lightning attention)."""

    def elements(self, ranks: int) -> tuple[int, int]:
        """Elements of the convolution's part and of the recurrent part on one rank. Raises `BadParallelism`."""
        groups = self.conv_groups if self.conv_groups % ranks == 0 else ranks
        channels = self.conv_channels + groups * self.conv_group_channels
        conv = _share("convolution channels", channels, ranks) * (self.conv_kernel - 1)
        return conv, _share("recurrent heads", self.heads, ranks) * self.head_elements


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a whole model, undivided, in elements."""

    family: str
    architecture: str
    attention_layers: int
    attention_heads: int
    kv_heads: int
    """1 with `latent`: every rank keeps the whole latent vector."""
    head_elements: int
    """Of a token in a layer, a head: keys and values together (`latent`: the latent vector)."""
    latent: bool = False
    """Multi-head latent attention."""
    recurrent_layers: int = 0
    state: RecurrentState = RecurrentState()
    chunk_tokens: int = 2048
    """Of the recurrent kernel; what `mamba_cache_mode=all` aligns its blocks to."""
    state_at_every_block: bool = False
    """vLLM can keep a state at every block (`mamba_cache_mode=all`)."""
    hidden: int
    """Width of the model."""
    vocabulary: int
    most_ranks: int | None = None
    """A model's own limit, where it has one."""
    parameters: int
    """Elements of all weights, to within a few percent (biases and norms are left out)."""
    max_context_tokens: int

    def check_ranks(self, ranks: int) -> None:
        """Raise `BadParallelism` unless the vocabulary, which vLLM pads to a multiple of 64, and the heads divide."""
        if self.most_ranks is not None and ranks > self.most_ranks:
            raise BadParallelism(
                f"{self.family} allows at most {self.most_ranks} ranks, not {ranks}: give a smaller --tp"
            )
        _share("words of vocabulary", math.ceil(self.vocabulary / 64) * 64, ranks)
        _share("attention heads", self.attention_heads, ranks)

    def kv_elements(self, ranks: int) -> int:
        """Elements of one token in one attention layer on one rank. Raises `BadParallelism`."""
        if self.latent:
            return self.head_elements
        if self.kv_heads >= ranks:
            return _share("KV heads", self.kv_heads, ranks) * self.head_elements
        if ranks % self.kv_heads:
            raise BadParallelism(f"{ranks} ranks cannot share {self.kv_heads} KV heads{_advice(self.kv_heads)}")
        return self.head_elements  # each rank keeps a copy of one head


def _share(what: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise BadParallelism(f"{count:,} {what} cannot be divided between {ranks} ranks{_advice(count)}")
    return count // ranks


def _advice(count: int) -> str:
    fitting = [ranks for ranks in range(1, 9) if count % ranks == 0]
    return f"; --tp {', '.join(map(str, fitting))} would do for these"


def group_layers(attention_layers: int, recurrent_layers: int) -> int:
    """Layers that share a block table in vLLM (`_get_kv_cache_groups_uniform_page_size`).

    The smaller count of the two kinds; the larger one where it is less than 1.5 times the smaller, as padding a group
    by a few layers wastes less than doubling the number of groups.
    """
    counts = [count for count in (attention_layers, recurrent_layers) if count]
    smaller, larger = min(counts), max(counts)
    return larger if larger < 1.5 * smaller else smaller


def groups(layers: int, group: int) -> int:
    """Groups that so many layers of one kind make."""
    return math.ceil(layers / group)
