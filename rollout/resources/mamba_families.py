"""Hybrids of attention and Mamba, in the words of their `config.json`: one function a family.

What a function says, vLLM says in `get_mamba_state_shape_from_config` of the model's class.
"""

from __future__ import annotations

from makespan.rollout.resources import parameters as weights
from makespan.rollout.resources.config_file import ModelConfigFile
from makespan.rollout.resources.shape import BadConfig, ModelShape, RecurrentState
from makespan.rollout.resources.stack import embedding_parameters, layer_types, max_context_tokens, with_grouped_queries


def granite(config: ModelConfigFile) -> ModelShape:
    hidden, inner = config.count("hidden_size"), config.count("mamba_expand") * config.count("hidden_size")
    types = layer_types(config, "layer_types", "layers_block_type")
    attention, mamba = types.count("attention"), types.count("mamba")
    state, mixer = _mamba2(
        hidden,
        inner,
        groups=config.count("mamba_n_groups"),
        width=config.count("mamba_d_state"),
        heads=config.count("mamba_n_heads"),
        head=config.count("mamba_d_head"),
        kernel=config.count("mamba_d_conv"),
    )
    routed = config.count("num_local_experts", default=0)
    forward = weights.experts(
        hidden, routed, config.count("intermediate_size"), config.count("shared_intermediate_size", default=0)
    )
    return with_grouped_queries(
        config,
        "Granite-4",
        attention,
        mamba,
        state,
        mamba * mixer + (attention + mamba) * forward,
        chunk=config.count("mamba_chunk_size", default=256),
        every_block=True,
    )


def nemotron_h(config: ModelConfigFile) -> ModelShape:
    hidden = config.count("hidden_size")
    pattern = config.get("hybrid_override_pattern")
    names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
    if isinstance(pattern, str):
        unknown = set(pattern) - names.keys()
        if unknown:
            raise BadConfig(f"{config.where}: `hybrid_override_pattern` holds {sorted(unknown)}; known: M * - E")
        types = [names[letter] for letter in pattern]
    else:
        types = layer_types(config, "layers_block_type", "layer_types")
    attention, mamba = types.count("attention"), types.count("mamba")
    heads, head = config.count("mamba_num_heads"), config.count("mamba_head_dim")
    state, mixer = _mamba2(
        hidden,
        heads * head,
        groups=config.count("n_groups", "mamba_n_groups"),
        width=config.count("ssm_state_size"),
        heads=heads,
        head=head,
        kernel=config.count("conv_kernel", "mamba_d_conv"),
        float32=config.get("mamba_ssm_cache_dtype", default="float32") == "float32",
    )
    rest = mamba * mixer + types.count("mlp") * weights.mlp(hidden, config.count("intermediate_size"), gated=False)
    if routed := types.count("moe"):
        shared = config.count("n_shared_experts", default=1) * config.count(
            "moe_shared_expert_intermediate_size", default=0
        )
        rest += routed * weights.experts(
            hidden, config.count("n_routed_experts"), config.count("moe_intermediate_size"), shared, gated=False
        )
    return with_grouped_queries(
        config,
        "Nemotron-H",
        attention,
        mamba,
        state,
        rest,
        head=config.count("attention_head_dim", "head_dim"),
        chunk=config.count("chunk_size", "mamba_chunk_size", default=128),
        every_block=True,
    )


def falcon_h1(config: ModelConfigFile) -> ModelShape:
    hidden, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    inner = config.count("mamba_d_ssm", default=config.count("mamba_expand", default=2) * hidden)
    state, mixer = _mamba2(
        hidden,
        inner,
        groups=config.count("mamba_n_groups"),
        width=config.count("mamba_d_state"),
        heads=config.count("mamba_n_heads"),
        head=config.count("mamba_d_head"),
        kernel=config.count("mamba_d_conv"),
    )
    rest = layers * (mixer + weights.mlp(hidden, config.count("intermediate_size")))
    chunk = config.count("mamba_chunk_size", default=256)
    return with_grouped_queries(config, "Falcon-H1", layers, layers, state, rest, chunk=chunk, every_block=True)


def jamba(config: ModelConfigFile) -> ModelShape:
    hidden, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    period, offset = config.count("attn_layer_period", least=1), config.count("attn_layer_offset")
    attention = sum(index % period == offset for index in range(layers))
    period, offset = config.count("expert_layer_period", least=1), config.count("expert_layer_offset")
    routed = sum(index % period == offset for index in range(layers))
    inner, width = config.count("mamba_expand") * hidden, config.count("mamba_d_state")
    kernel = config.count("mamba_d_conv")
    rank = config.get("mamba_dt_rank", default="auto")
    mixer = weights.mamba1(hidden, inner, width, kernel, rank if isinstance(rank, int) else -(-hidden // 16))
    state = RecurrentState(conv_channels=inner, conv_kernel=kernel, heads=inner, head_elements=width)
    intermediate = config.count("intermediate_size")
    rest = (
        (layers - attention) * mixer
        + routed * weights.experts(hidden, config.count("num_experts"), intermediate)
        + (layers - routed) * weights.mlp(hidden, intermediate)
    )
    return with_grouped_queries(config, "Jamba", attention, layers - attention, state, rest, every_block=True)


def zamba2(config: ModelConfigFile) -> ModelShape:
    """Every layer has a Mamba2 mixer; the hybrid ones also apply one of a few shared attention blocks, each time with a
    cache of its own. Attention works on twice the hidden size."""
    hidden, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    hybrid = layer_types(config, "layers_block_type", "layer_types").count("hybrid")
    heads = config.count("num_attention_heads")
    head = config.count("attention_head_dim", default=2 * hidden // heads)
    inner, mamba_heads = config.count("mamba_expand") * hidden, config.count("n_mamba_heads")
    state, mixer = _mamba2(
        hidden,
        inner,
        groups=config.count("mamba_ngroups"),
        width=config.count("mamba_d_state"),
        heads=mamba_heads,
        head=inner // mamba_heads,
        kernel=config.count("mamba_d_conv"),
    )
    intermediate, rank = config.count("intermediate_size", default=4 * hidden), config.count("adapter_rank")
    block = weights.attention(hidden, heads, heads, head, source=2 * hidden) + weights.mlp(hidden, intermediate)
    adapters = hybrid * rank * (hidden + 2 * intermediate)
    if config.get("use_shared_attention_adapter", default=False):
        adapters += hybrid * 3 * rank * 4 * hidden
    return ModelShape(
        family="Zamba2",
        architecture=config.architecture,
        attention_layers=hybrid,
        attention_heads=heads,
        kv_heads=heads,
        head_elements=2 * head,
        recurrent_layers=layers,
        state=state,
        chunk_tokens=config.count("chunk_size", default=256),
        state_at_every_block=True,
        parameters=layers * mixer
        + config.count("num_mem_blocks") * block
        + adapters
        + hybrid * hidden * hidden
        + embedding_parameters(config),
        hidden=hidden,
        vocabulary=config.count("vocab_size"),
        max_context_tokens=max_context_tokens(config),
    )


def _mamba2(
    hidden: int, inner: int, *, groups: int, width: int, heads: int, head: int, kernel: int, float32: bool = False
) -> tuple[RecurrentState, int]:
    state = RecurrentState(
        conv_channels=inner,
        conv_groups=groups,
        conv_group_channels=2 * width,
        conv_kernel=kernel,
        heads=heads,
        head_elements=head * width,
        float32=float32,
    )
    return state, weights.mamba2(hidden, inner, groups, width, heads, kernel)
