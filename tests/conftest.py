"""What the whole suite shares: one background event loop, and the vLLM engines that live on it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from makespan.rollout.replicas.vllm import VllmReplica, start_replicas
from makespan.rollout.replicas.wire import HostConfig

T = TypeVar("T")

Await = Callable[[Coroutine[Any, Any, T]], T]


@pytest.fixture(scope="session")
def on_loop() -> Iterator[Await[Any]]:
    """Runs a coroutine on the session's own loop and gives its result; the shared engines belong to that loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="session-loop", daemon=True)
    thread.start()
    yield lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout=500)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The embedded model's directory."""
    from makespan.integrations.models import resolve

    return resolve("embedded")


def host_config(model: Path, **changes: Any) -> HostConfig:
    """A small engine on all cores, as the tests use it."""
    settings: dict[str, Any] = {
        "model": str(model),
        "max_model_len": 16_384,
        "max_num_seqs": 8,
        "kv_cache_bytes": 2**29,
        "max_num_batched_tokens": 2048,
        "prefix_caching": True,
        "cores": tuple(sorted(os.sched_getaffinity(0))),
        "seed": 0,
    }
    return HostConfig(**{**settings, **changes})


@pytest.fixture(scope="session")
def engines(
    on_loop: Await[Any], embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VllmReplica]]:
    """Two real engines of the embedded model: `cached` keeps prefixes, `uncached` does not."""
    configs = {
        "cached": host_config(embedded_model),
        "uncached": host_config(embedded_model, prefix_caching=False),
    }
    replicas = on_loop(start_replicas(configs, tmp_path_factory.mktemp("engines"), 300.0))
    yield replicas
    for replica in replicas.values():
        on_loop(replica.close())
