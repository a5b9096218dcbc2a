"""What the families of models share: their attention, their embeddings, and how both make a `ModelShape`."""

from __future__ import annotations

from makespan.rollout.resources import parameters as weights
from makespan.rollout.resources.config_file import ModelConfigFile
from makespan.rollout.resources.shape import BadConfig, ModelShape, RecurrentState


def layer_types(config: ModelConfigFile, *names: str) -> list[str]:
    types = config.layers(*names)
    if types is None:
        raise BadConfig(f"{config.where}: {config.architecture} needs `{names[0]}`: the type of each layer")
    return types


def max_context_tokens(config: ModelConfigFile) -> int:
    return config.count("max_position_embeddings", "model_max_length", "max_seq_len")


def embedding_parameters(config: ModelConfigFile) -> int:
    tied = bool(config.get("tie_word_embeddings", "tie_embedding", default=False))
    return weights.embeddings(config.count("vocab_size"), config.count("hidden_size"), tied)


def with_grouped_queries(
    config: ModelConfigFile,
    family: str,
    attention: int,
    recurrent: int,
    state: RecurrentState,
    rest: int,
    *,
    head: int | None = None,
    gated: bool = False,
    chunk: int = 2048,
    every_block: bool = False,
) -> ModelShape:
    """The shape of a model with grouped-query attention; `rest`: its weights but attention's and the embeddings'."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if not attention or not heads:
        raise BadConfig(
            f"{config.where}: {config.architecture} without attention layers: nothing grows with its context"
        )
    kv_heads = config.count("num_key_value_heads", default=heads)
    head = head or config.count("head_dim", default=hidden // heads)
    return ModelShape(
        family=family,
        architecture=config.architecture,
        attention_layers=attention,
        attention_heads=heads,
        kv_heads=kv_heads,
        head_elements=2 * head,
        recurrent_layers=recurrent,
        state=state,
        chunk_tokens=chunk,
        state_at_every_block=every_block,
        parameters=attention * weights.attention(hidden, heads, kv_heads, head, gated=gated)
        + rest
        + embedding_parameters(config),
        hidden=hidden,
        vocabulary=config.count("vocab_size"),
        max_context_tokens=max_context_tokens(config),
    )


def with_latent_attention(
    config: ModelConfigFile, family: str, attention: int, recurrent: int, state: RecurrentState, mixers: int
) -> ModelShape:
    """The shape of a model with latent attention and, after some dense layers, experts."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    rank, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    attend = weights.latent_attention(
        hidden,
        heads,
        query_rank=config.count("q_lora_rank", default=0),
        rank=rank,
        nope=config.count("qk_nope_head_dim"),
        rope=rope,
        value=config.count("v_head_dim"),
    )
    layers, dense = attention + recurrent, config.count("first_k_dense_replace", default=0)
    width = config.count("moe_intermediate_size")
    shared = config.count("num_shared_experts", default=0) * config.count(
        "moe_shared_expert_intermediate_size", default=width
    )
    forward = dense * weights.mlp(hidden, config.count("intermediate_size")) + (layers - dense) * weights.experts(
        hidden, config.count("num_experts"), width, shared
    )
    return ModelShape(
        family=family,
        architecture=config.architecture,
        attention_layers=attention,
        attention_heads=heads,
        kv_heads=1,
        head_elements=rank + rope,
        latent=True,
        recurrent_layers=recurrent,
        state=state,
        parameters=attention * attend + mixers + forward + embedding_parameters(config),
        hidden=hidden,
        vocabulary=config.count("vocab_size"),
        max_context_tokens=max_context_tokens(config),
    )
