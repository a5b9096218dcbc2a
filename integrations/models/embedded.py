"""The embedded model: a small hybrid (Mamba2 layers and attention, Granite 4's architecture) with random weights.

It says nothing sensible, and it is not meant to: it loads in seconds, runs on two CPU cores, keeps a recurrent state
beside a KV cache as the large hybrids do, and is the same on every machine (fixed seed, a tokenizer trained on
`corpus.txt`). Its size is chosen so that prefill is a real part of the inference time of function-calling prompts.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from makespan.integrations.models.cache import build_once

VOCABULARY = 1024
"""Byte-level BPE: 256 bytes, three special tokens and the corpus's most frequent merges."""

SEED = 0

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

REVISION = "5"
"""Part of the directory's name: raise it with any change of what is built, so that no stale model is used."""


def build(cache: Path) -> Path:
    """The model's directory under `cache`, built there at the first call (about 5 s)."""
    return build_once(
        cache / f"embedded-{REVISION}", lambda directory: _write_model(directory, _write_tokenizer(directory))
    )


def _write_tokenizer(directory: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    corpus = resources.files("makespan.integrations.models").joinpath("corpus.txt").read_text()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus.splitlines(keepends=True),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(directory)
    return len(fast)


def _write_model(directory: Path, vocabulary: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, logging

    logging.set_verbosity_error()  # the absence of GPU kernels is no news to someone who builds a model on a CPU
    logging.disable_progress_bar()
    config = GraniteMoeHybridConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=8192,
        shared_intermediate_size=8192,
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=16,
        mamba_d_head=32,
        mamba_d_state=64,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        max_position_embeddings=65_536,
        position_embedding_type="nope",
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            # A padding row of zeros would have a gradient norm of 10^7 once the model generates that token.
            model.get_input_embeddings().weight[config.pad_token_id].normal_(std=config.initializer_range)
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory)
