"""Which waiting action gets the next environment slot: the key that it carries.

A key is a number computed where the batch is known (the engine's side) from a trajectory's progress; the gate serves
the smallest key first and, among equal keys, the one that came first.
"""

from __future__ import annotations

from collections.abc import Callable

from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.trajectory import Progress

ActionKey = Callable[[Progress], float]
"""An action policy: the key of a trajectory's next action."""


def fifo(progress: Progress) -> float:
    """First come, first served: all keys are equal."""
    return 0.0


ACTION_KEYS: dict[str, ActionKey] = {"fifo": fifo}
"""Action policies by the name that a configuration uses."""


def action_key(name: str) -> ActionKey:
    """The policy of this name. Raises `ConfigError` for an unknown one."""
    if name not in ACTION_KEYS:
        raise ConfigError(f"scheduling.policy: unknown policy {name!r}{nearest(name, ACTION_KEYS)}")
    return ACTION_KEYS[name]
