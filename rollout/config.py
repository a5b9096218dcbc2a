"""The configuration of a run: one typed tree, checked once, at the edge.

`load` reads a YAML file, applies `--set a.b=value` overrides, and answers with a `RunConfig` or a `ConfigError` that
names the setting, the value and what would be right. Every setting has its unit in its name or docstring, and the
reason for its default where one is needed.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from makespan.rollout.errors import ConfigError, FormatError, nearest
from makespan.rollout.yaml_document import NOT_YAML, format_yaml, parse_yaml

CONFIG_VERSION = 1

Count = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of the tree."""


class ModelConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = "embedded"
    """`embedded`, `smollm2` or a model's directory."""


class ReplicasConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: Count = 2
    backend: Literal["vllm"] = "vllm"
    max_num_seqs: Count = 32
    """Sequences that one replica runs at once (vLLM's setting)."""
    max_num_batched_tokens: Count = 2048
    """Tokens of one engine step: the chunk in which long prompts are prefilled (vLLM's setting)."""
    max_model_len: Count = 32_768
    """Longest context in tokens (vLLM's setting); the model's own limit must allow it."""
    kv_cache_gib: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = 1.0
    """Memory of one replica for KV cache and recurrent states. Null: what vLLM finds free (on a GPU)."""
    num_blocks: Count | None = None
    """Overrides the number of cache blocks, to study scarce memory."""
    prefix_caching: bool = True
    start_timeout_s: Seconds = 300.0
    """A replica needs about 30 s on two CPU cores; a large model on a GPU needs minutes."""


class LatencyConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time added to each environment step: lognormal, seeded by task and step, so the same under every policy."""

    median_s: NonNegative = 0.3
    sigma: NonNegative = 1.0
    cap_s: NonNegative = 10.0


class EnvironmentConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "bfcl"
    """A bundled environment, or `module:attribute` of your own."""
    category: str = "multi_turn_base"
    """Which of `bfcl`'s four multi-turn task sets."""
    tasks_file: str | None = None
    """JSON lines `{"task_id": …, "payload": {…}, "script": ["…"]}`, for any environment; null: `bfcl`'s own tasks."""
    address: str | None = None
    """`tcp://host:port` of a running server. Null: one is started for this run and stopped with it."""
    slots: dict[str, int] = msgspec.field(default_factory=lambda: {"start": 16, "step": 8})
    """Slots of the server that is started here: how many sessions reset, and how many actions run, at once."""
    latency: LatencyConfig | None = None
    """Null: steps take what they take. Function-calling back ends here answer in 0.1 ms, real ones do not."""
    connect_timeout_s: Seconds = 5.0
    request_timeout_s: Seconds = 120.0
    """An action that has not answered by then, its wait for a slot included, fails."""


class SamplingConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    temperature: NonNegative = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    max_tokens: Count = 128
    """Generated tokens of one turn."""


class AdmissionConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str = "parking"
    """`parking` (as many at work as fit into the replicas' memory), or a baseline: `fixed` (a number alone),
    `everything`, `coupled`."""
    concurrency: Count | None = 16
    """Trajectories that run at once at most, parked ones included; null: as many as there are, or as fit."""
    reference: Count | None = None
    """For `parking`: so many trajectories the memory of all replicas is meant for (`makespan plan` says it for one). As
    much of it may start as the limit leaves of the memory (0.9, corrected by what caches lose), unless lengths are so
    alike that all advance evenly; null: no such limit."""
    order: str = "forecast"
    """Who starts next: `forecast` (what the coordinator expects to take longest) or `arrival`."""


class RoutingConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str = "cost"
    """Which replica serves a turn: `cost`, or the baseline `sticky-least-inflight`."""


class SchedulingConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: str = "caas"
    """Whose action gets the next slot: `caas`, or a baseline: `fifo`, `progress`, `least-progress`."""


class LimitsConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_turns: Count = 100
    """Inferences of one trajectory."""
    trajectory_timeout_s: Seconds | None = 600.0
    """From a trajectory's admission to its end."""
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 0
    """How often a trajectory begins again from its reset when a worker died under it; 0: it fails. What its actions did
    outside of the environment is not undone."""


class WandbConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    project: str = "makespan"
    mode: Literal["online", "offline", "disabled"] | None = None
    """Null: what `WANDB_MODE` says, else online."""


class TrackingConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    report: bool = True
    """Leave `report.html` in the run's directory; written when the batch is over."""
    wandb: WandbConfig | None = None
    """Null: no W&B. Needs the package `wandb`; a W&B that fails costs its figures and nothing else."""
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None
    """Where the engine's figures for Prometheus are served while the batch runs; 0 chooses a free port."""
    metrics_host: str = "127.0.0.1"


class RunConfig(_Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that `makespan run` can be told."""

    version: int = CONFIG_VERSION
    name: str = "run"
    """The run's directory is `runs_directory/name`, with a number added when that exists."""
    runs_directory: str = "runs"
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    tasks: Count = 64
    samples_per_task: Count = 1
    """Trajectories of each task; they form a group."""
    history: str | None = None
    """A file with what earlier runs of this job taught (lengths, costs, prompts): read first, replaced at the end.
    Null: nothing is known beforehand."""
    actions: Literal["model", "script"] = "model"
    """`script`: the benchmark's own solution is played with real inference of the same length."""
    model: ModelConfig = ModelConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sampling: SamplingConfig = SamplingConfig()
    admission: AdmissionConfig = AdmissionConfig()
    routing: RoutingConfig = RoutingConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    limits: LimitsConfig = LimitsConfig()
    tracking: TrackingConfig = TrackingConfig()


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file and apply `a.b=value` overrides in order (values are YAML: `8`, `null`, `[1, 2]`).

    Raises `ConfigError` for what cannot be used, and `FormatError` for a file of another version.
    """
    try:
        document = parse_yaml(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error.strerror}") from error
    except NOT_YAML as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold settings by name, not a {type(document).__name__}")
    for override in overrides:
        apply_override(document, override)
    return check(document, str(path))


def apply_override(document: dict[str, Any], override: str) -> None:
    """Set one value in the tree. Raises `ConfigError` for what is not `a.b=value`."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r}: expected NAME=VALUE, for example --set admission.concurrency=4")
    try:
        value = parse_yaml(text)
    except NOT_YAML as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML") from error
    node = document
    for depth, key in enumerate(keys[:-1], start=1):
        inner = node.setdefault(key, {})
        if inner is None:
            inner = node[key] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(keys[:depth])} is a value, not a group of settings")
        node = inner
    node[keys[-1]] = value


def check(document: Mapping[str, Any], where: str) -> RunConfig:
    """A validated configuration out of plain data. `where` names the source in errors."""
    version = document.get("version", CONFIG_VERSION)
    if version != CONFIG_VERSION:
        raise FormatError(f"{where}: configuration of version {version!r}; this makespan reads {CONFIG_VERSION}")
    _check_keys(document, RunConfig, "", where)
    try:
        config = msgspec.convert(document, RunConfig)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        setting = place.rstrip("`") or "the document"
        raise ConfigError(f"{where}: {setting}: {message}{_seen(document, setting)}") from error
    for name, count in config.environment.slots.items():
        if count < 1:
            raise ConfigError(f"{where}: environment.slots.{name}: at least 1 slot is needed, not {count}")
    return config


def _seen(document: Mapping[str, Any], setting: str) -> str:
    value: Any = document
    for key in setting.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return ""
        value = value[key]
    return f" (seen: {value!r})"


def _section_of(annotation: Any) -> type[_Section] | None:
    candidates = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else ()
    for candidate in candidates or (annotation,):
        if isinstance(candidate, type) and issubclass(candidate, _Section):
            return candidate
    return None


def _check_keys(document: Mapping[str, Any], section: type[_Section], prefix: str, where: str) -> None:
    """Refuse unknown settings with the nearest known one (msgspec's own message names no alternative)."""
    known = typing.get_type_hints(section)
    known = {name: known[name] for name in section.__struct_fields__}
    for key, value in document.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown setting {prefix}{key}{nearest(str(key), known)}")
        inner = _section_of(known[key])
        if inner is not None and isinstance(value, Mapping):
            _check_keys(value, inner, f"{prefix}{key}.", where)


def to_yaml(config: RunConfig) -> str:
    """The resolved configuration, every setting spelled out."""
    return format_yaml(msgspec.to_builtins(config))
