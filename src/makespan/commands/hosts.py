"""What a batch runs on: replicas with their share of the machine, and an environment server to connect to.

`parts` starts both side by side and ends both, whatever happens in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from makespan.commands.memory import check_blocks
from makespan.envs.client import EnvClient
from makespan.envs.server import ServerConfig
from makespan.envs.spawn import spawn_server
from makespan.envs.worker import EnvironmentConfig as HostedEnvironment
from makespan.rollout.config import RunConfig
from makespan.rollout.errors import ConfigError
from makespan.rollout.replicas.vllm import VllmReplica, divide_cores, start_replicas, visible_gpus
from makespan.rollout.replicas.wire import HostConfig

if TYPE_CHECKING:
    from makespan.envs.latency import Latency


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a model was made for, as far as its configuration says."""

    context_tokens: int | None
    vocabulary: int | None
    """Number of its token ids."""


def model_limits(model: Path) -> ModelLimits:
    """The limits of the model in a directory. Raises `ConfigError` when it has no readable `config.json`."""
    path = model / "config.json"
    try:
        document: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"model.path: {path} is not a model's configuration: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"model.path: {path} is not a model's configuration: it holds a {type(document).__name__}")
    text = document.get("text_config")  # where models that also see keep what concerns their language model
    found = {**text, **document} if isinstance(text, dict) else document
    figures = {name: found.get(name) for name in ("max_position_embeddings", "vocab_size")}
    context, vocabulary = (value if isinstance(value, int) else None for value in figures.values())
    return ModelLimits(context_tokens=context, vocabulary=vocabulary)


def check_model_length(model: Path, max_model_len: int) -> None:
    """Raise `ConfigError` when the model was not made for contexts of `max_model_len` tokens."""
    limit = model_limits(model).context_tokens
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"replicas.max_model_len is {max_model_len}, and {model.name} was made for {limit} tokens: "
            f"--set replicas.max_model_len={limit}"
        )


@contextlib.asynccontextmanager
async def parts(
    config: RunConfig, model: Path, directory: Path
) -> AsyncIterator[tuple[dict[str, VllmReplica], EnvClient]]:
    """Replicas and a connected environment client, for the time of the block."""
    async with (
        environment_address(config, directory) as address,
        connected(config, address, f"{directory.name}-{os.getpid()}") as client,
        running_replicas(config, model, directory) as replicas,
    ):
        yield replicas, client


@contextlib.asynccontextmanager
async def connected(config: RunConfig, address: str, job: str) -> AsyncIterator[EnvClient]:
    """A client of the environment server under this job's name. Raises `ConfigError` when the server lacks the
    environment."""
    environment = config.environment
    async with EnvClient(
        address,
        job=job,
        connect_timeout_s=environment.connect_timeout_s,
        request_timeout_s=environment.request_timeout_s,
    ) as client:
        if environment.name not in client.info.environments:
            known = ", ".join(client.info.environments)
            raise ConfigError(
                f"environment.name: the server at {address} has no {environment.name!r} (it has: {known})"
            )
        yield client


@contextlib.asynccontextmanager
async def running_replicas(config: RunConfig, model: Path, directory: Path) -> AsyncIterator[dict[str, VllmReplica]]:
    """Replicas, for the time of the block; their logs go to `directory/logs`."""
    replicas = await start_replicas(host_configs(config, model), directory / "logs", config.replicas.start_timeout_s)
    try:
        yield replicas
    finally:
        await asyncio.shield(asyncio.gather(*(replica.close() for replica in replicas.values())))


def host_configs(config: RunConfig, model: Path) -> dict[str, HostConfig]:
    """What each replica's host is started with: a GPU each where there are any, else the cores divided between them.

    Raises `ConfigError` for more replicas than GPUs, and for too few cache blocks to hold a longest context.
    """
    replicas = config.replicas
    gpus = visible_gpus()
    if gpus and replicas.count > len(gpus):
        raise ConfigError(
            f"replicas.count is {replicas.count}, and {len(gpus)} GPUs are visible: --set replicas.count={len(gpus)}"
        )
    if replicas.num_blocks is not None:
        caching = replicas.prefix_caching
        check_blocks(replicas.num_blocks, model, replicas.max_model_len, on_gpu=bool(gpus), prefix_caching=caching)
    cores = divide_cores(replicas.count, sorted(os.sched_getaffinity(0)))
    memory = None if replicas.kv_cache_gib is None else int(replicas.kv_cache_gib * 2**30)
    return {
        f"replica-{index}": HostConfig(
            model=str(model),
            max_model_len=replicas.max_model_len,
            max_num_seqs=replicas.max_num_seqs,
            kv_cache_bytes=memory,
            max_num_batched_tokens=replicas.max_num_batched_tokens,
            prefix_caching=replicas.prefix_caching,
            cores=() if gpus else cores[index],
            gpu=gpus[index] if gpus else None,
            seed=config.seed,
            num_blocks=replicas.num_blocks,
        )
        for index in range(replicas.count)
    }


@contextlib.asynccontextmanager
async def environment_address(config: RunConfig, directory: Path) -> AsyncIterator[str]:
    """Where the environment server is: the configured one, or one of its own for the time of the block."""
    environment = config.environment
    if environment.address is not None:
        yield environment.address
        return
    server = ServerConfig(
        slots={f"{environment.name}.{kind}": count for kind, count in environment.slots.items()},
        environments={environment.name: HostedEnvironment(latency=_latency(config))},
        event_log=str(directory / "events" / "broker.jsonl"),
    )
    async with spawn_server(server, log_path=directory / "logs" / "environment-server.log") as address:
        yield address


def _latency(config: RunConfig) -> Latency | None:
    if (latency := config.environment.latency) is None:
        return None
    from makespan.envs.latency import Latency

    return Latency(median_s=latency.median_s, sigma=latency.sigma, cap_s=latency.cap_s, seed=config.seed)


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
