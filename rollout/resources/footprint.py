"""How much memory a sequence holds: state, keys and values, and what vLLM's blocks make of both.

vLLM cuts the memory that is left beside the weights into equal blocks. A block holds a *page* in each of `g` layers,
and a page is either the keys and values of `B` tokens or one recurrent state. With `a` the bytes of a token in one
attention layer, `s` the bytes of one layer's state and `k` the smallest block of the attention kernel, on one rank,

    B = k * ceil(s / (k * a)),   page = B * a,   bytes a block = g * page

so the attention block is stretched until its page holds a state, and the state is padded to the page. Layers of one
kind form `A` groups of attention and `M` groups of recurrent layers, `g` layers each, and every group has its own
block table. A running sequence of `L` tokens then holds

    none:   A * ceil(L / B) + M             one state a group
    align:  A * ceil(L / B) + 2 M           the running state and the checkpoint that it was copied from, at its peak
    all:    (A + M) * ceil(L / B)           a state at every block; vLLM frees the older ones, so this is a bound

Between turns nothing is reserved: a waiting trajectory keeps what others have not overwritten. What its next turn finds
is cut to whole blocks and, but for `all`, to where a state was kept.

The closed form needs no vLLM and no machine, only `config.json`. `vllm_specs.py` asks vLLM for the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from makespan.rollout.resources.config_file import ModelConfigFile
from makespan.rollout.resources.families import model_shape
from makespan.rollout.resources.shape import ModelShape, ResourceError, group_layers, groups

CacheMode = Literal["none", "align", "all"]
Platform = Literal["cuda", "cpu"]

DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes an element, by vLLM's name of the dtype; `auto` is the model's own, bfloat16 here."""

KERNEL_BLOCK_TOKENS: dict[Platform, int] = {"cuda": 16, "cpu": 128}
"""Smallest block: FlashAttention's, and the one that vLLM's CPU platform sets."""
LATENT_BLOCK_TOKENS = 128
"""Smallest block of a hybrid with latent attention, whose decode kernels want their blocks in multiples of it."""


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How vLLM is told to keep its cache; the names are those of its arguments."""

    mamba_cache_mode: CacheMode = "align"
    """`none` also turns prefix caching off, as it does in vLLM."""
    block_size: int | None = None
    """None: the smallest that the kernel allows, then stretched."""
    kv_cache_dtype: str = "auto"
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    retain_all: bool = False
    """`prefix_cache_retention_interval=None`: states are kept at every block instead of at the prompt's end only."""
    match_unit: int | None = None
    """`prefix_match_unit`: hits end at a multiple of it instead of a whole block's."""


class ModelFootprint(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one model with one setting of the cache, on one tensor-parallel rank."""

    family: str
    architecture: str
    source: Literal["closed form", "vllm"]
    platform: Platform
    tensor_parallel: int
    settings: CacheSettings
    attention_layers: int
    recurrent_layers: int
    state_bytes_per_sequence: int
    """All layers' states of one sequence, before they are padded to pages."""
    kv_bytes_per_token: int
    """All attention layers' keys and values of one token."""
    block_tokens: int
    page_bytes: int
    bytes_per_block: int
    attention_groups: int
    recurrent_groups: int
    weights_bytes: int
    hidden: int
    """Width of the model."""
    vocabulary: int
    max_context_tokens: int

    @property
    def prefix_caching(self) -> bool:
        """Whether a turn can find what an earlier one computed."""
        return self.settings.mamba_cache_mode != "none"

    @property
    def states_held(self) -> int:
        """Blocks that the states of one running sequence take at their peak, `all` excepted."""
        if self.settings.mamba_cache_mode == "align":
            return 2 * self.recurrent_groups
        return self.recurrent_groups

    @property
    def states_left(self) -> int:
        """Blocks of checkpoints that a turn leaves behind for nobody."""
        if self.settings.mamba_cache_mode != "align":
            return 0
        return self.recurrent_groups * (1 if self.settings.match_unit is None else 2)

    def blocks_held(self, context_tokens: int) -> int:
        """Blocks that a running sequence of so many tokens holds at its peak."""
        blocks = math.ceil(context_tokens / self.block_tokens)
        if self.settings.mamba_cache_mode == "all":
            return (self.attention_groups + self.recurrent_groups) * blocks
        return self.attention_groups * blocks + self.states_held

    def blocks_settled(self, context_tokens: int) -> int:
        """Blocks that it holds while it decodes, with the checkpoint of its prompt given back."""
        blocks = self.blocks_held(context_tokens)
        return blocks - self.recurrent_groups if self.settings.mamba_cache_mode == "align" else blocks

    def bytes_held(self, context_tokens: int) -> int:
        """Bytes that a running sequence of so many tokens holds at its peak."""
        return self.blocks_held(context_tokens) * self.bytes_per_block

    def num_blocks(self, cache_bytes: int) -> int:
        """Blocks that so many bytes make; one of them is vLLM's null block and holds nothing."""
        return cache_bytes // self.bytes_per_block

    def sequences_that_fit(self, num_blocks: int, context_tokens: int) -> int:
        """Sequences of so many tokens that so many blocks hold at once, the null block left out."""
        return (num_blocks - 1) // self.blocks_held(context_tokens)

    def next_hit_tokens(
        self,
        prompt_tokens: int,
        generated_tokens: int,
        *,
        found_tokens: int = 0,
        known_tokens: int = 0,
        chunk_tokens: int | None = None,
    ) -> int:
        """Of the next turn's prompt, the tokens that it finds when nothing was overwritten.

        The next prompt is the last prompt, what was generated, and at least one token more. The last generated token is
        never computed in the turn that generates it.

        Args:
            prompt_tokens, generated_tokens: of the turn that ends.
            found_tokens: what that turn itself had found; its checkpoint is still there.
            known_tokens: what the turn before that had computed, generated tokens included: keys and values that were
                found as far as a state allowed.
            chunk_tokens: `max_num_batched_tokens`, for a turn that ran alone; None: its prompt took one step.
        """
        if not self.prefix_caching:
            return 0
        block, unit = self.block_tokens, self.settings.match_unit
        if not self.recurrent_groups or self.settings.retain_all:
            return (prompt_tokens + generated_tokens - 1) // block * block
        last = (prompt_tokens - 1) // block * block
        if self.settings.mamba_cache_mode == "all":
            return last
        if prompt_tokens % block:
            return last if unit is None else prompt_tokens // unit * unit
        # vLLM keeps the state one block before the end of such a prompt, for a request that repeats it, but computes
        # that state only where a chunk happens to end there. It also keeps one where keys and values were found and no
        # state was, as others will want it too.
        junction = min(known_tokens, prompt_tokens - 1) // block * block
        ends = self._chunk_ends(found_tokens, junction, prompt_tokens, chunk_tokens)
        return last if last in ends else max(junction, found_tokens)

    def _chunk_ends(self, start: int, junction: int, prompt_tokens: int, chunk_tokens: int | None) -> set[int]:
        """Where the steps of a prefill end that runs alone (vLLM's `Scheduler._mamba_block_aligned_split`)."""
        block, chunk = self.block_tokens, chunk_tokens or prompt_tokens
        ends, position = {start}, start
        while position < prompt_tokens:
            end = min(prompt_tokens, position + chunk)
            aligned = end // block * block
            if end < prompt_tokens and (aligned > position or block <= chunk):
                end = aligned
            if position % block:
                end = min(end, (position // block + 1) * block)
            if position < junction:
                end = min(end, junction)
            position = end
            ends.add(position)
        return ends


def reference_concurrency(footprint: ModelFootprint, num_blocks: int, contexts_tokens: Sequence[int]) -> int:
    """Trajectories that one replica carries before they overwrite what others will need; at least 1.

    While a trajectory waits for its environment, each of the others takes a turn: it puts what it holds into the pool,
    and leaves the checkpoint that it started from behind. So the mean of both has to fit as often as there are
    trajectories. Of trajectories that grow in step the largest moment decides instead: `pool.knee` plays the batch.

    Args:
        footprint, num_blocks: the replica's memory.
        contexts_tokens: contexts that trajectories have at equally likely moments of their lives
            (`WorkloadProfile.contexts_tokens`).
    """
    mean = sum(footprint.blocks_held(tokens) + footprint.states_left for tokens in contexts_tokens)
    return max(1, int((num_blocks - 1) * len(contexts_tokens) / mean))


def footprint(
    model: Path,
    *,
    tensor_parallel: int = 1,
    platform: Platform = "cuda",
    settings: CacheSettings | None = None,
    cpu_flags: Collection[str] | None = None,
) -> ModelFootprint:
    """The footprint of the model whose `config.json` is in (or is) `model`, in closed form.

    Args:
        model: a model's directory, or its configuration's file.
        tensor_parallel: ranks that share a replica.
        platform: where vLLM runs; on a CPU blocks are larger and states may be float32.
        settings: of the cache; the default is vLLM's for prefix caching.
        cpu_flags: what that CPU can do, in Linux's words; None: what this machine's can.

    Raises `ResourceError`: an unknown architecture, a configuration that lacks something, ranks that cannot divide it,
    settings that contradict each other.
    """
    shape = model_shape(ModelConfigFile.read(model))
    return footprint_of(shape, tensor_parallel, platform, settings or CacheSettings(), cpu_flags)


def footprint_of(
    shape: ModelShape,
    tensor_parallel: int,
    platform: Platform,
    settings: CacheSettings,
    cpu_flags: Collection[str] | None = None,
) -> ModelFootprint:
    """See `footprint`."""
    if tensor_parallel < 1:
        raise ResourceError(f"a replica needs at least 1 rank, not {tensor_parallel}")
    _check(settings)
    shape.check_ranks(tensor_parallel)
    token = shape.kv_elements(tensor_parallel) * _bytes("kv_cache_dtype", settings.kv_cache_dtype)
    flags = frozenset(_this_cpu() if cpu_flags is None else cpu_flags) if platform == "cpu" else frozenset()
    if platform == "cpu" and shape.latent and settings.mamba_cache_mode != "none" and "amx_tile" not in flags:
        raise ResourceError(
            f"{shape.family}: vLLM turns prefix caching off for latent attention on a CPU without AMX; ask for "
            "mamba_cache_mode=none"
        )
    # vLLM's CPU kernels keep the recurrent part in float32 where the CPU has AVX512-BF16.
    wide = shape.state.float32 or "avx512_bf16" in flags
    state = _state_bytes(shape, tensor_parallel, settings, wide)
    if settings.mamba_cache_mode == "all" and shape.recurrent_layers and not shape.state_at_every_block:
        raise ResourceError(
            f"mamba_cache_mode=all: vLLM cannot keep a state at every block of {shape.family}, and would fall back to "
            "align; ask for align"
        )
    block = block_tokens(shape, token, state, platform, settings)
    unit = settings.match_unit
    if unit is not None and block % unit:
        raise ResourceError(f"prefix_match_unit must divide the block of {block} tokens, which {unit} does not")
    layers = group_layers(shape.attention_layers, shape.recurrent_layers)
    return ModelFootprint(
        family=shape.family,
        architecture=shape.architecture,
        source="closed form",
        platform=platform,
        tensor_parallel=tensor_parallel,
        settings=settings,
        attention_layers=shape.attention_layers,
        recurrent_layers=shape.recurrent_layers,
        state_bytes_per_sequence=state * shape.recurrent_layers,
        kv_bytes_per_token=token * shape.attention_layers,
        block_tokens=block,
        page_bytes=block * token,
        bytes_per_block=layers * block * token,
        attention_groups=groups(shape.attention_layers, layers),
        recurrent_groups=groups(shape.recurrent_layers, layers),
        weights_bytes=math.ceil(shape.parameters * 2 / tensor_parallel),
        hidden=shape.hidden,
        vocabulary=shape.vocabulary,
        max_context_tokens=shape.max_context_tokens,
    )


def block_tokens(
    shape: ModelShape, token_bytes: int, state_bytes: int, platform: Platform, settings: CacheSettings
) -> int:
    """Tokens of an attention block, stretched to hold a state (vLLM's `Platform._align_hybrid_block_size`)."""
    kernel = settings.block_size or KERNEL_BLOCK_TOKENS[platform]
    if not state_bytes:
        return kernel
    if shape.latent:
        kernel = max(kernel, LATENT_BLOCK_TOKENS)
    if settings.mamba_cache_mode == "all":
        unit = math.lcm(shape.chunk_tokens, kernel)
        return unit * math.ceil(math.ceil(state_bytes / token_bytes) / unit)
    return kernel * math.ceil(state_bytes / (kernel * token_bytes))


def _state_bytes(shape: ModelShape, ranks: int, settings: CacheSettings, wide: bool) -> int:
    """Bytes of one recurrent layer's state on one rank; `wide`: its matrix is float32 where nothing else is asked."""
    conv, recurrent = shape.state.elements(ranks)
    small = _bytes("mamba_cache_dtype", settings.mamba_cache_dtype)
    large = _bytes("mamba_ssm_cache_dtype", settings.mamba_ssm_cache_dtype)
    if shape.state.fixed_to_conv:
        large = small
    elif settings.mamba_ssm_cache_dtype == "auto":
        large = 4 if wide else small
    return conv * small + recurrent * large


def _check(settings: CacheSettings) -> None:
    mode = settings.mamba_cache_mode
    if settings.match_unit is not None and mode != "align":
        raise ResourceError(f"prefix_match_unit and mamba_cache_mode={mode} contradict each other: it needs align")
    if settings.retain_all and mode != "align":
        raise ResourceError(f"keeping all states and mamba_cache_mode={mode} contradict each other: it needs align")


def _bytes(setting: str, dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise ResourceError(f"{setting}: unknown dtype {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _this_cpu() -> frozenset[str]:
    """The flags of this machine's CPU; none where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
