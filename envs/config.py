"""The configuration of an environment server and of its workers, checked once before anything starts."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from makespan.envs.latency import Latency
from makespan.envs.protocol import LONGEST_S, MAX_FRAME_BYTES
from makespan.envs.registry import resolve
from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.gate import RateLimit

LEAST_MEMORY_BYTES = 64 * 1024 * 1024

LEAST_FRAME_BYTES = 1_024

KINDS = ("start", "step", "tool")


class EnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one environment is hosted.

    Args:
        factory: a bundled name or `module:attribute`; empty means the environment's own name.
        latency: seconds injected before steps (and resets); they count as running, with a slot held.
        execution: `auto` runs an asynchronous environment in the worker's event loop and a blocking one in a thread;
            `process` gives each session a process of its own, for environments that compute, or need bounds.
        step_timeout_s: a call of the environment that takes longer fails with `timeout` and ends its session. With
            `process` it is killed; a thread cannot be, and is counted as abandoned until it returns.
        memory_bytes: with `process`, how much data the process may hold; beyond that it meets `MemoryError`.
    """

    factory: str = ""
    execution: Literal["auto", "process"] = "auto"
    latency: Latency | None = None
    step_timeout_s: float | None = None
    memory_bytes: int | None = None


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server serves.

    Args:
        slots: slot class to slot count, at least 1 each. An environment has two classes, `<name>.start` for resets and
            `<name>.step` for actions; `<name>.tool` has slots for tools that run in the clients (`Lease`).
        environments: how each environment is hosted; one that is only named in `slots` is hosted with the defaults.
        rates: optional limits on grants a second by slot class.
        host, port: where clients connect; port 0 chooses a free one.
        worker_port: where workers connect; port 0 chooses a free one.
        workers: worker processes on this machine; 0 when all of them run elsewhere.
        metrics_port: where figures for Prometheus are served (`/metrics`); 0 chooses a free port, null serves none.
        event_log: the broker's event log; empty means none is written.
        max_queued: waiting actions over all classes before new ones are answered `Busy`.
        max_frame_bytes: larger requests are refused.
        worker_timeout_s: a worker that was silent for so long is lost, and its sessions with it.
        stop_grace_s: how long a stopped action may keep its slot without the worker's word.
    """

    slots: dict[str, int]
    environments: dict[str, EnvironmentConfig] = {}
    rates: dict[str, RateLimit] = {}
    host: str = "127.0.0.1"
    port: int = 0
    worker_port: int = 0
    workers: int = 1
    metrics_port: int | None = None
    event_log: str = ""
    max_queued: int = 65_536
    max_frame_bytes: int = MAX_FRAME_BYTES
    worker_timeout_s: float = 15.0
    stop_grace_s: float = 10.0


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the broker is and what to host."""

    broker: str
    """`tcp://host:port`, the server's `worker_address`."""
    environments: dict[str, EnvironmentConfig]
    worker_id: str = ""
    """Its name, and its socket's routing id, new for each process; empty chooses one."""
    beat_s: float = 0.5
    drain_timeout_s: float = 60.0
    close_timeout_s: float = 5.0
    """How long an environment may take to close before the session is confirmed as stopped anyway."""
    max_frame_bytes: int = MAX_FRAME_BYTES


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a broker."""

    max_queued: int = 65_536
    """Waiting actions over all classes before new ones are answered `Busy`."""
    max_clients: int = 10_000
    max_lease_s: float = 300.0
    max_frame_bytes: int = MAX_FRAME_BYTES
    worker_timeout_s: float = 15.0
    """A worker that was silent for so long is lost: longer than a short network cut, shorter than anyone's patience."""
    stop_grace_s: float = 10.0
    """How long a stopped action may keep its slot before the slot is freed without the worker's word."""
    busy_retry_s: float = 1.0
    adopted_lease_s: float = 60.0
    """The lease of a client that only its sessions tell of, after a restart, until it says `Hello`."""
    expected_workers: int = 0
    """Workers that must introduce themselves (with the sessions they host) before anything is accepted."""
    settle_s: float = 10.0
    """How long to wait for them."""


def hosted_environments(config: ServerConfig) -> dict[str, EnvironmentConfig]:
    """The environments of a configuration, by name, each with its two slot classes.

    Raises `ConfigError` naming the setting that is wrong. Imports the environments' modules.
    """
    hosted = dict(config.environments)
    for slot_class, count in config.slots.items():
        name, _, kind = slot_class.rpartition(".")
        if not name or kind not in KINDS:
            text = f"slots.{slot_class}: a slot class is named <environment>.start, <environment>.step or <name>.tool"
            raise ConfigError(text)
        if count < 1:
            raise ConfigError(f"slots.{slot_class} is {count}; it must be at least 1")
        if kind != "tool":
            hosted.setdefault(name, EnvironmentConfig())
    if not config.slots:
        raise ConfigError("slots is empty: name at least one environment, e.g. counting.start: 2 and counting.step: 4")
    for name, environment in hosted.items():
        for kind in ("start", "step"):
            slot_class = f"{name}.{kind}"
            if slot_class not in config.slots:
                known = nearest(slot_class, config.slots)
                raise ConfigError(f"slots.{slot_class} is missing{known}: starts and steps have slots of their own")
        resolve(environment.factory or name)
        _check_bounds(name, environment)
    _check_numbers(config)
    return hosted


def check_worker(config: WorkerConfig) -> None:
    """Raises `ConfigError` naming the setting of a worker that is wrong. Imports the environments' modules."""
    match = re.fullmatch(r"tcp://\S+:([0-9]{1,5})", config.broker)
    if match is None or not 1 <= int(match[1]) <= 65_535:
        raise ConfigError(f"broker is {config.broker!r}; it must be tcp://host:port, the server's `worker_address`")
    if not config.environments:
        raise ConfigError("environments is empty: name at least one environment, e.g. counting: {}")
    for name, environment in config.environments.items():
        resolve(environment.factory or name)
        _check_bounds(name, environment)
    for setting in ("beat_s", "drain_timeout_s", "close_timeout_s"):
        check_seconds(setting, getattr(config, setting))
    _check_least("max_frame_bytes", config.max_frame_bytes, LEAST_FRAME_BYTES)


def check_seconds(setting: str, value_s: float) -> None:
    """Raises `ConfigError` for a duration that is none, or that the wire does not carry."""
    if not 0 < value_s <= LONGEST_S:  # not a number is neither
        raise ConfigError(f"{setting} is {value_s}; it must be above 0 and at most {LONGEST_S:g} seconds")


def _check_least(setting: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{setting} is {value}; it must be at least {least}")


def _check_bounds(name: str, environment: EnvironmentConfig) -> None:
    where = f"environments.{name}"
    if environment.step_timeout_s is not None:
        check_seconds(f"{where}.step_timeout_s", environment.step_timeout_s)
    if environment.memory_bytes is not None:
        if environment.execution != "process":
            raise ConfigError(f"{where}.memory_bytes needs {where}.execution: process (threads share their memory)")
        if environment.memory_bytes < LEAST_MEMORY_BYTES:
            least = f"it must be at least {LEAST_MEMORY_BYTES}, which an empty process needs"
            raise ConfigError(f"{where}.memory_bytes is {environment.memory_bytes}; {least}")


def _check_numbers(config: ServerConfig) -> None:
    for name in config.rates:
        if name not in config.slots:
            raise ConfigError(f"rates.{name}: no such slot class{nearest(name, config.slots)}")
    for setting, least in (("workers", 0), ("max_queued", 1), ("max_frame_bytes", LEAST_FRAME_BYTES)):
        _check_least(setting, getattr(config, setting), least)
    for setting in ("worker_timeout_s", "stop_grace_s"):
        check_seconds(setting, getattr(config, setting))
    for setting in ("port", "worker_port", "metrics_port"):
        value = getattr(config, setting)
        if value is not None and not 0 <= value <= 65_535:
            raise ConfigError(f"{setting} is {value}; it must be between 0 and 65535")


def parse_config(text: str | bytes) -> ServerConfig:
    """A configuration from JSON. Raises `ConfigError` with the place that is wrong."""
    try:
        return msgspec.json.decode(text, type=ServerConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"environment server: {error}") from error
