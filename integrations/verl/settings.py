"""The settings of the shells, each checked once when verl hands them over.

verl passes plain mappings: the router's YAML file, the extra keys of an agent loop, the sampler's keyword arguments.
They become the structs below, and an unknown key or a wrong type is a `ConfigError` that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.memory import BlockMemory

Settings = TypeVar("Settings", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=1)]


class MemorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The memory of one replica, by the names that `makespan plan MODEL --json PATH` writes them under."""

    num_blocks: Annotated[int, msgspec.Meta(ge=2)]
    """vLLM's cache blocks, the null block included. vLLM logs the number when it starts, and that one is exact."""
    block_tokens: Count
    attention_groups: Count = 1
    """Groups of attention layers: each has its own blocks for the same tokens."""
    recurrent_groups: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Groups of recurrent layers (Mamba and the like); a model without them has none."""
    prefix_caching: bool = True
    """As `rollout.enable_prefix_caching` of verl, whose default it is."""

    def memory(self) -> BlockMemory:
        """As admission and routing use it."""
        copies = 2 if self.prefix_caching else 1  # a running state, and the checkpoint that it was copied from
        return BlockMemory(
            capacity=self.num_blocks - 1,
            block_tokens=self.block_tokens,
            attention=self.attention_groups,
            states=copies * self.recurrent_groups,
            prefix_caching=self.prefix_caching,
        )


class RouterSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The router's YAML file, without verl's own key `router_class`."""

    policy: str = "cost"
    """`cost`, or `sticky-least-inflight`: verl's own balancer, decision for decision."""
    memory: MemorySettings | None = None
    """Of each replica, for `cost`. Null: it takes memory for endless, and prompts for cached where they were last."""
    seed: int = 0
    """For the random choice between equally loaded replicas."""
    ticket_ttl_s: float = 3600.0
    """A turn that is still not released after this time counts as lost. Longer than any generation takes."""


class AdmissionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many trajectories of the whole job run at once: `admission` in the agent-loop YAML."""

    policy: Literal["everything", "fixed", "parking"] = "everything"
    """`everything`: all at once, as verl does. `fixed`: at most `concurrency`. `parking`: as many at work as fit into
    the replicas' memory, asked again before every inference."""
    concurrency: Count | None = None
    """Of all agent-loop workers together, parked ones included; null with `parking`: memory alone decides."""
    reference: Count | None = None
    """For `parking`: so many trajectories the memory of all replicas is meant for (`makespan plan` says it for one). As
    much of it may start as the limit leaves of the memory (0.9, corrected by what caches lose), unless lengths are so
    alike that all advance evenly; null: no such limit."""
    order: Literal["forecast", "arrival"] = "forecast"
    """Who starts next: what the coordinator expects to take longest, or first come, first served."""
    memory: MemorySettings | None = None
    """Of one replica, for `parking`."""
    replicas: Count | None = None
    """How many there are, for `parking`."""

    def __post_init__(self) -> None:
        if self.policy == "everything" and self.concurrency is not None:
            raise ValueError(
                f"admission.policy 'everything' admits all at once, so concurrency must be null, not "
                f"{self.concurrency}; with a number take 'fixed' or 'parking'"
            )
        if self.policy == "fixed" and self.concurrency is None:
            raise ValueError("admission.policy 'fixed' needs admission.concurrency")
        if self.policy != "parking" and self.reference is not None:
            raise ValueError(
                f"admission.reference: only 'parking' goes by it, so it must be null with {self.policy!r}, not "
                f"{self.reference}"
            )
        if self.policy == "parking" and (self.memory is None or self.replicas is None):
            raise ValueError(
                "admission.policy 'parking' needs admission.memory (of one replica; `makespan plan MODEL --json PATH` "
                "has the figures) and admission.replicas"
            )

    @property
    def limits(self) -> bool:
        """Whether anybody ever waits."""
        return self.policy != "everything"


class LoopSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The keys of the `makespan_env` entry in the agent-loop YAML."""

    address: str
    """The environment server's address, e.g. `tcp://10.0.0.7:5757`."""
    environment: str = ""
    """The environment's name on the server, for rows of the dataset whose task does not name one."""
    max_turns: int = 64
    """Turns of the assistant after which a trajectory is cut (truncated, not failed)."""
    max_turn_tokens: int | None = None
    """Generated tokens in one turn. By default a turn may use what is left of the response."""
    trajectory_deadline_s: float = 3600.0
    """Seconds after which a trajectory fails: the last resort against an environment or a replica that hangs. Waiting
    for admission is not counted."""
    action_deadline_s: float = 600.0
    """The longest an environment action may take, waiting for its slot included."""
    connect_timeout_s: float = 30.0
    """How long the first trajectory of a process waits for the environment server to answer."""
    scheduling: Literal["caas", "fifo"] = "caas"
    """Whose action gets the next environment slot: the chains that will end the batch, by the forecast of a coordinator
    that all agent-loop workers report to, or first come, first served."""
    admission: AdmissionSettings = AdmissionSettings()
    history: str | None = None
    """A file in which the coordinator keeps what it learnt (lengths, costs, prompts) for the next start of this job. It
    is read and written on the node where the coordinator runs: use a shared directory. Null: it ends with the job."""
    reward: Literal["environment", "trainer"] = "environment"
    """`environment`: the sum of the steps' rewards is the reward. `trainer`: verl's own reward function gives it and
    finds the environment's in `extra_info["environment_reward"]`."""


class SamplerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`trainer.v1.sampler.sampler_kwargs`."""

    deadline_s: float = 7200.0
    """Seconds after which a step stops waiting: groups that are not finished then count as failed."""
    poll_interval_s: float = 0.25
    """How often the queue is read, and so the resolution of `makespan/makespan_s`."""


def parse(kind: type[Settings], mapping: Mapping[str, Any], where: str) -> Settings:
    """`mapping` as settings of this kind. `where` names its origin in the error, e.g. `router.yaml`."""
    known = {field.name for field in msgspec.structs.fields(kind)}
    for key in mapping:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, known)}")
    try:
        return msgspec.convert(_plain(mapping), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error


def _plain(value: Any) -> Any:
    """OmegaConf's mappings as dictionaries: of others, msgspec does not look at unknown keys."""
    return {key: _plain(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
