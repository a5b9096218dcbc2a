"""Asks vLLM itself how it would lay out a model's memory: `python -m makespan.rollout.resources.vllm_specs`.

The model is built on PyTorch's meta device, from `config.json`, without weights and in a fraction of a second. Each of
its layers says what it keeps (`get_kv_cache_spec`), and vLLM's own functions align blocks, form groups and count bytes.
For a GPU's figures on a machine without one, FlashAttention's block sizes are handed to the alignment, and what stands
in for CUDA objects that a model's constructor makes is never used.

The same process can run vLLM's scheduler on these specs (`vllm_play.py`).
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.resources.footprint import CacheSettings, ModelFootprint, Platform
from makespan.rollout.resources.shape import ResourceError
from makespan.rollout.resources.vllm_wire import Answer, Played, Question, Refusal

PROBE_BYTES = 1 << 34
"""Memory that groups are formed for; blocks are counted per byte afterwards."""


class _StubType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub


class Stub(metaclass=_StubType):
    """Stands in for an object that a model's constructor makes and that nothing here ever uses."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return None


class _StubFinder:
    """Imports of `torchvision`, where it is not installed, give modules whose every name is a `Stub`: the text part of
    a multimodal model does not need it, but its module imports it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: Stub  # type: ignore[method-assign]
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in(platform: Platform) -> None:
    """Make vLLM's model classes constructible in this process, whatever it runs on."""
    import torch
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():  # transformers remembers the answer, and does not fall for the stub
        sys.meta_path.append(_StubFinder())
    if not torch.cuda.is_available():
        torch.cuda.Stream = torch.cuda.Event = Stub
        if platform == "cuda":
            torch.cpu._is_avx512_bf16_supported = lambda: False  # vLLM would make states float32 for a CPU kernel
            torch.cpu._is_amx_tile_supported = lambda: True  # vLLM would turn prefix caching off for latent attention
    from vllm.model_executor.models import registry
    from vllm.triton_utils import triton

    # A model's capabilities are looked up in a child of this child otherwise: eight seconds, the first time.
    registry._run_in_subprocess = lambda function: function()
    if not hasattr(triton, "set_allocator"):
        triton.set_allocator = Stub()
    from transformers import AutoConfig
    from vllm.transformers_utils.configs.bailing_moe_v3_vl import BailingMoeV3TextConfig

    AutoConfig.register("bailing_hybrid", BailingMoeV3TextConfig, exist_ok=True)


def pretend_to_be_first_of(ranks: int) -> None:
    """Let this lone process believe that `ranks` share a model; on the meta device nothing communicates."""
    from vllm.distributed import parallel_state

    if parallel_state._WORLD is None:
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{tempfile.mktemp(prefix='makespan-store-')}",
            local_rank=0,
            backend="gloo",
        )
    parallel_state.destroy_model_parallel()  # which groups there are depends on the model
    parallel_state.initialize_model_parallel(1, 1)
    parallel_state.get_tp_group().world_size = ranks


class Layout:
    """One model, built without weights, and what vLLM makes of its layers under different settings."""

    def __init__(self, question: Question) -> None:
        import torch
        from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.model_executor.model_loader.utils import initialize_model

        self.question = question
        self._directory = tempfile.TemporaryDirectory(prefix="makespan-specs-")
        directory = Path(self._directory.name)
        model = Path(question.model)
        shutil.copy(model / "config.json" if model.is_dir() else model, directory / "config.json")
        ranks = question.tensor_parallel
        self.config = EngineArgs(
            model=str(directory),
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=question.max_model_len,
            max_num_batched_tokens=question.max_num_batched_tokens,
            enforce_eager=True,
            enable_prefix_caching=True,
            async_scheduling=False,
            disable_log_stats=False,
        ).create_engine_config()
        self.config.model_config.verify_with_parallel_config(
            msgspec_like(self.config.parallel_config, tensor_parallel_size=ranks)
        )
        with set_current_vllm_config(self.config):
            pretend_to_be_first_of(ranks)
            self.config.parallel_config.tensor_parallel_size = ranks
            # Layers read it when they are made: all settings of a question have the same.
            self.config.cache_config.cache_dtype = question.settings[0].kv_cache_dtype
            torch.set_default_dtype(torch.bfloat16)
            with torch.device("meta"):
                built = initialize_model(vllm_config=self.config)
            torch.set_default_dtype(torch.float32)
            self.layers: dict[str, Any] = get_layers_from_vllm_config(self.config, AttentionLayerBase)
        self.weights_bytes = sum(weight.numel() * weight.element_size() for weight in built.parameters())
        cache = self.config.cache_config
        self._resolved_ssm_dtype = cache.mamba_ssm_cache_dtype
        self._default_block = 16 if question.platform == "cuda" else cache.block_size

    def apply(self, settings: CacheSettings) -> None:
        """Set vLLM's cache configuration as if it had been started with these settings."""
        cache = self.config.cache_config
        cache.enable_prefix_caching = settings.mamba_cache_mode != "none"
        cache.mamba_cache_mode = settings.mamba_cache_mode
        if settings.kv_cache_dtype != cache.cache_dtype:
            raise ResourceError("one question cannot ask for several kv_cache_dtype")
        cache.mamba_cache_dtype = settings.mamba_cache_dtype
        asked = settings.mamba_ssm_cache_dtype
        cache.mamba_ssm_cache_dtype = self._resolved_ssm_dtype if asked == "auto" else asked
        cache.block_size = settings.block_size or self._default_block
        cache.user_specified_block_size = settings.block_size is not None
        cache.mamba_page_size_padded = None
        cache.mamba_block_size = self.question.max_model_len if settings.mamba_cache_mode == "none" else None
        cache.prefix_cache_retention_interval = None if settings.retain_all else 0
        cache.prefix_match_unit = settings.match_unit
        cache.kv_cache_layout = "LBHNC"

    def specs(self, settings: CacheSettings) -> dict[str, Any]:
        """What each layer keeps, after vLLM has aligned the blocks. Call inside the configuration's context."""
        from vllm.platforms import current_platform
        from vllm.platforms.interface import Platform as VllmPlatform
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.kv_cache_interface import AttentionSpec

        self.apply(settings)
        emulated = self.question.platform == "cuda" and not current_platform.is_cuda()
        if not emulated:
            current_platform.update_block_size_for_backend(self.config)
        elif self.config.model_config.is_hybrid:
            VllmPlatform._align_hybrid_block_size.__func__(VllmPlatform, self.config, FlashAttentionBackend)
        register_all_kvcache_specs(self.config)
        specs = {}
        for name, layer in self.layers.items():
            spec = layer.get_kv_cache_spec(self.config)
            if spec is None or getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            if isinstance(spec, AttentionSpec) and not emulated:
                spec = layer.get_attn_backend().customize_spec(spec)
            specs[name] = spec
        return specs

    def footprint(self, settings: CacheSettings) -> ModelFootprint:
        """The footprint as vLLM has it."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.kv_cache_interface import MambaSpec

        with set_current_vllm_config(self.config):
            specs = self.specs(settings)
            groups = kv_cache_utils.get_kv_cache_groups(self.config, dict(specs))
            attention = [spec for spec in specs.values() if not isinstance(spec, MambaSpec)]
            recurrent = [spec for spec in specs.values() if isinstance(spec, MambaSpec)]
            of_states = sum(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
            if not attention:
                raise ResourceError("the model has no attention layers: nothing grows with its context")
            return ModelFootprint(
                family=self.config.model_config.architecture,
                architecture=self.config.model_config.architecture,
                source="vllm",
                platform=self.question.platform,
                tensor_parallel=self.question.tensor_parallel,
                settings=settings,
                attention_layers=len(attention),
                recurrent_layers=len(recurrent),
                state_bytes_per_sequence=sum(state_bytes(spec) for spec in recurrent),
                kv_bytes_per_token=round(sum(spec.page_size_bytes / spec.block_size for spec in attention)),
                block_tokens=max(spec.block_size for spec in attention),
                page_bytes=max(spec.page_size_bytes for spec in specs.values()),
                bytes_per_block=kv_cache_utils._get_kv_cache_bytes_per_block(groups),
                attention_groups=len(groups) - of_states,
                recurrent_groups=of_states,
                weights_bytes=self.weights_bytes,
                hidden=self.config.model_config.get_hidden_size(),
                vocabulary=self.config.model_config.get_vocab_size(),
                max_context_tokens=self.config.model_config.max_model_len,
            )


def state_bytes(spec: Any) -> int:
    """Bytes of one layer's state before it is padded to a page."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))


def msgspec_like(config: Any, **changes: Any) -> Any:
    """A shallow copy of one of vLLM's configurations with other values, unchecked."""
    import copy

    changed = copy.copy(config)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


def answer(question: Question) -> Answer | Refusal:
    """Build the model and answer; what stops vLLM is an answer too."""
    began_s = time.monotonic()
    try:
        layout = Layout(question)
        footprints = tuple(layout.footprint(settings) for settings in question.settings)
        played: tuple[Played, ...] = ()
        if question.plays:
            from makespan.rollout.resources.vllm_play import play

            played = tuple(play(layout, batch) for batch in question.plays)
        return Answer(footprints=footprints, played=played, took_s=time.monotonic() - began_s)
    except Exception as error:  # vLLM's errors have no common base
        lines = [line.strip() for line in str(error).strip().splitlines()[:3]]
        return Refusal(refusal=f"{type(error).__name__}: {' '.join(lines)}")


def main() -> None:
    """Read a list of questions from standard input, write a list of answers to standard output."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints goes to standard error
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[Question, ...])
    stand_in(questions[0].platform)
    replies.write(msgspec.json.encode([answer(question) for question in questions]))
    replies.flush()
    os._exit(0)  # nothing of vLLM's is worth an orderly end


if __name__ == "__main__":
    main()
