"""How many weights the parts of a layer have: the matrices, from their sizes. Norms and biases are left out."""

from __future__ import annotations


def attention(hidden: int, heads: int, kv_heads: int, head: int, *, gated: bool = False, source: int = 0) -> int:
    """Query, key, value and output projections. `gated`: the queries bring an output gate along; `source`: the width
    that queries, keys and values are made of, where it is not `hidden`."""
    into = (source or hidden) * head * (heads * (2 if gated else 1) + 2 * kv_heads)
    return into + heads * head * hidden


def latent_attention(hidden: int, heads: int, *, query_rank: int, rank: int, nope: int, rope: int, value: int) -> int:
    """Multi-head latent attention (DeepSeek-V2). `query_rank` 0: queries are projected at once."""
    query = heads * (nope + rope)
    queries = hidden * query_rank + query_rank * query if query_rank else hidden * query
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def mamba1(hidden: int, inner: int, state: int, kernel: int, rank: int) -> int:
    """Selective state space layer of Mamba."""
    return 3 * hidden * inner + inner * (kernel + rank + 2 * state) + rank * inner + inner * state


def mamba2(hidden: int, inner: int, groups: int, state: int, heads: int, kernel: int) -> int:
    """Mamba2: one projection in, a convolution over `x`, `B` and `C`, one projection out."""
    return hidden * (3 * inner + 2 * groups * state + heads) + (inner + 2 * groups * state) * kernel


def delta_net(hidden: int, keys: int, values: int, heads: int, kernel: int) -> int:
    """Gated delta net: queries, keys, values, output gate, decay and write strength, a convolution, and out."""
    return hidden * (2 * keys + 3 * values + 2 * heads) + (2 * keys + values) * kernel


def kimi_delta(hidden: int, heads: int, head: int, kernel: int, *, low_rank: bool) -> int:
    """Kimi delta attention: its decay and its output gate are matrices, of rank `head` with `low_rank`."""
    inner = heads * head
    gates = 2 * (hidden * head + head * inner) if low_rank else 2 * hidden * inner
    return 4 * hidden * inner + gates + hidden * heads + 3 * inner * kernel


def mlp(hidden: int, intermediate: int, *, gated: bool = True) -> int:
    """Feed-forward layer, with a gate (SwiGLU) or without."""
    return (3 if gated else 2) * hidden * intermediate


def experts(hidden: int, count: int, intermediate: int, shared: int = 0, *, gated: bool = True) -> int:
    """A router, `count` experts and one shared expert of width `shared`."""
    return hidden * count + count * mlp(hidden, intermediate, gated=gated) + mlp(hidden, shared, gated=gated)


def embeddings(vocabulary: int, hidden: int, tied: bool) -> int:
    """Input embedding and, unless they are tied, the output's."""
    return vocabulary * hidden * (1 if tied else 2)
