"""Hybrids of attention and gated delta nets, Kimi delta attention, lightning attention or short convolutions, in the
words of their `config.json`: one function a family.

What a function says, vLLM says in `get_mamba_state_shape_from_config` of the model's class.
"""

from __future__ import annotations

import msgspec

from makespan.rollout.resources import parameters as weights
from makespan.rollout.resources.config_file import ModelConfigFile
from makespan.rollout.resources.shape import BadConfig, ModelShape, RecurrentState
from makespan.rollout.resources.stack import layer_types, with_grouped_queries, with_latent_attention


def lfm2(config: ModelConfigFile) -> ModelShape:
    """Short convolutions: a state of a few kilobytes, and no matrix."""
    hidden, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    types = layer_types(config, "layer_types")
    attention = types.count("full_attention")
    kernel, channels = config.count("conv_L_cache"), config.count("conv_dim", "hidden_size")
    state = RecurrentState(conv_channels=channels, conv_kernel=kernel)
    width = config.count("block_ff_dim", "intermediate_size")
    if config.get("block_auto_adjust_ff_dim", default=False):
        multiple = config.count("block_multiple_of", default=256)
        width = int(float(config.get("block_ffn_dim_multiplier", default=1.0)) * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    routed = config.count("num_experts", default=0)
    dense = config.count("num_dense_layers", default=0) if routed else layers
    rest = (layers - attention) * (4 * hidden * channels + channels * kernel) + dense * weights.mlp(hidden, width)
    if routed:
        rest += (layers - dense) * weights.experts(hidden, routed, config.count("moe_intermediate_size"))
    return with_grouped_queries(config, "LFM2", attention, layers - attention, state, rest)


def qwen_next(config: ModelConfigFile) -> ModelShape:
    """Qwen3-Next and Qwen3.5: gated delta nets, and attention with an output gate."""
    hidden = config.count("hidden_size")
    attention, linear, state, mixer = _delta_layers(config)
    layers = attention + linear
    routed = config.count("num_experts", default=0)
    if routed:
        shared = config.count("shared_expert_intermediate_size", default=0)
        forward = weights.experts(hidden, routed, config.count("moe_intermediate_size"), shared)
    else:
        forward = weights.mlp(hidden, config.count("intermediate_size"))
    family = "Qwen3-Next" if config.architecture.startswith("Qwen3Next") else "Qwen3.5"
    if config.get("mamba_ssm_dtype") == "float32" and family == "Qwen3.5":
        state = msgspec.structs.replace(state, float32=True)
    return with_grouped_queries(config, family, attention, linear, state, linear * mixer + layers * forward, gated=True)


def olmo_hybrid(config: ModelConfigFile) -> ModelShape:
    attention, linear, state, mixer = _delta_layers(config)
    forward = weights.mlp(config.count("hidden_size"), config.count("intermediate_size"))
    rest = linear * mixer + (attention + linear) * forward
    return with_grouped_queries(config, "OLMo-hybrid", attention, linear, state, rest)


def kimi_linear(config: ModelConfigFile) -> ModelShape:
    linear = config.get("linear_attn_config")
    if not isinstance(linear, dict) or not {"kda_layers", "num_heads", "head_dim"} <= linear.keys():
        raise BadConfig(f"{config.where}: `linear_attn_config` must give kda_layers, num_heads and head_dim")
    kernel, layers = int(linear.get("short_conv_kernel_size", 4)), len(linear["kda_layers"])
    state, mixer = _kimi_delta(config, int(linear["num_heads"]), int(linear["head_dim"]), kernel, low_rank=True)
    attention = config.count("num_hidden_layers") - layers
    return with_latent_attention(config, "Kimi-Linear", attention, layers, state, layers * mixer)


def bailing_v25(config: ModelConfigFile) -> ModelShape:
    """Ling 2.5 and 2.6: lightning attention, whose state has one dtype, and MLA in the last layer of every group."""
    hidden, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    heads = config.count("num_attention_heads")
    head = config.count("head_dim", default=hidden // heads)
    attention = layers // config.count("layer_group_size", least=1)
    state = RecurrentState(heads=heads, head_elements=head * head, fixed_to_conv=True)
    mixer = 5 * hidden * heads * head
    linear = layers - attention
    shape = with_latent_attention(config, "Bailing V2.5", attention, linear, state, linear * mixer)
    # The output's norm works on whole groups of heads.
    return msgspec.structs.replace(shape, most_ranks=config.count("group_norm_size", default=1))


def bailing_v3(config: ModelConfigFile) -> ModelShape:
    """Ling 3.0 and 3.1: Kimi delta attention, MLA in the last layer of every group and in the layers after the last."""
    layers, group = config.count("num_hidden_layers"), config.count("layer_group_size", least=1)
    attention = sum((index + 1) % group == 0 or index >= layers // group * group for index in range(layers))
    heads = config.count("num_attention_heads")
    head = config.count("head_dim", default=config.count("hidden_size") // heads)
    kernel = config.count("short_conv_kernel_size", default=4)
    low_rank = not config.get("no_kda_lora", default=False)
    state, mixer = _kimi_delta(config, heads, head, kernel, low_rank=low_rank)
    linear = layers - attention
    return with_latent_attention(config, "Bailing V3", attention, linear, state, linear * mixer)


def _delta_layers(config: ModelConfigFile) -> tuple[int, int, RecurrentState, int]:
    """Attention and gated delta net layers, the latter's state, and its weights."""
    types = config.layers("layer_types")
    if types is None:
        layers, every = config.count("num_hidden_layers"), config.count("full_attention_interval", default=4)
        types = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    heads, key_heads = config.count("linear_num_value_heads"), config.count("linear_num_key_heads")
    key, value = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    kernel = config.count("linear_conv_kernel_dim")
    state = RecurrentState(
        conv_channels=2 * key_heads * key + heads * value, conv_kernel=kernel, heads=heads, head_elements=key * value
    )
    mixer = weights.delta_net(config.count("hidden_size"), key_heads * key, heads * value, heads, kernel)
    return types.count("full_attention"), types.count("linear_attention"), state, mixer


def _kimi_delta(
    config: ModelConfigFile, heads: int, head: int, kernel: int, *, low_rank: bool
) -> tuple[RecurrentState, int]:
    """Its state is float32 by default."""
    state = RecurrentState(
        conv_channels=3 * heads * head, conv_kernel=kernel, heads=heads, head_elements=head * head, float32=True
    )
    return state, weights.kimi_delta(config.count("hidden_size"), heads, head, kernel, low_rank=low_rank)
