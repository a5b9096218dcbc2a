"""The families of models that a closed form is known for, by the name of the model's class in vLLM."""

from __future__ import annotations

from collections.abc import Callable

from makespan.rollout.errors import nearest
from makespan.rollout.resources import linear_families as linear
from makespan.rollout.resources import mamba_families as mamba
from makespan.rollout.resources import parameters as weights
from makespan.rollout.resources.config_file import ModelConfigFile
from makespan.rollout.resources.shape import ModelShape, RecurrentState, UnknownArchitecture
from makespan.rollout.resources.stack import with_grouped_queries


def model_shape(config: ModelConfigFile) -> ModelShape:
    """The shape of the model. Raises `UnknownArchitecture`, `BadConfig`."""
    family = FAMILIES.get(config.architecture)
    if family is None:
        raise UnknownArchitecture(
            f"{config.where}: no closed form is known for {config.architecture!r}"
            f"{nearest(config.architecture, FAMILIES)}; where vLLM is installed and serves it, "
            "vLLM's own specs are asked: pip install 'makespan[vllm]'"
        )
    return family(config)


def _attention_only(config: ModelConfigFile) -> ModelShape:
    """The limit case: no state at all."""
    types = config.layers("layer_types") or []
    if any("sliding" in name or "chunk" in name for name in types) or (
        config.get("sliding_window") is not None and config.get("use_sliding_window", default=True) and not types
    ):
        raise UnknownArchitecture(
            f"{config.where}: {config.architecture} has layers that attend to a window only; the model covers full "
            "attention and recurrent states"
        )
    hidden, layers = config.count("hidden_size"), config.count("num_hidden_layers")
    routed = config.count("num_experts", "num_local_experts", default=0)
    if routed:
        width = config.count("moe_intermediate_size", "intermediate_size")
        forward = weights.experts(hidden, routed, width, config.count("shared_expert_intermediate_size", default=0))
    else:
        forward = weights.mlp(hidden, config.count("intermediate_size"))
    return with_grouped_queries(config, "attention only", layers, 0, RecurrentState(), layers * forward)


FAMILIES: dict[str, Callable[[ModelConfigFile], ModelShape]] = {
    "GraniteMoeHybridForCausalLM": mamba.granite,
    "NemotronHForCausalLM": mamba.nemotron_h,
    "FalconH1ForCausalLM": mamba.falcon_h1,
    "JambaForCausalLM": mamba.jamba,
    "Zamba2ForCausalLM": mamba.zamba2,
    "Lfm2ForCausalLM": linear.lfm2,
    "Lfm2MoeForCausalLM": linear.lfm2,
    "Qwen3NextForCausalLM": linear.qwen_next,
    "Qwen3_5ForCausalLM": linear.qwen_next,
    "Qwen3_5MoeForCausalLM": linear.qwen_next,
    "Qwen3_5ForConditionalGeneration": linear.qwen_next,
    "Qwen3_5MoeForConditionalGeneration": linear.qwen_next,
    "OlmoHybridForCausalLM": linear.olmo_hybrid,
    "KimiLinearForCausalLM": linear.kimi_linear,
    "BailingMoeV2_5ForCausalLM": linear.bailing_v25,
    "BailingMoeV3ForCausalLM": linear.bailing_v3,
    **dict.fromkeys(
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "GraniteForCausalLM",
            "GraniteMoeForCausalLM",
            "Olmo2ForCausalLM",
        ),
        _attention_only,
    ),
}
