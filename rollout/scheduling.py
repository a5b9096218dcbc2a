"""Which waiting action gets the next environment slot: the key that it carries.

A key is a number computed where the batch is known (the engine's side) from a trajectory's progress; the gate serves
the smallest key first and, among equal keys, the one that came first.

The baselines. `fifo` is first come, first served. `progress` serves the chain with the most turns behind it, which is
right when the longer a chain has run the longer it still will (a decreasing hazard), and `least-progress` the one with
the fewest, which is right in the opposite case (R. Weber, J. Appl. Prob. 19:167-182, 1982). `oracle` knows how long
every chain still takes and serves the longest first; it needs a trace, and bounds what ordering alone can gain.

`caas` asks the coordinator, whose forecast knows the whole batch (`coordinator.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from makespan.rollout.coordinator import Coordinator, Outlook
from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.trajectory import Progress

ActionKey = Callable[[str, Progress], float]
"""An action policy: the key of the next action of the trajectory of this id."""

RemainingSeconds = Callable[[str, int], float]
"""True seconds that a trajectory would still take alone, from the action of this turn on."""


def fifo(trajectory_id: str, progress: Progress) -> float:
    """First come, first served: all keys are equal."""
    return 0.0


def most_progress(trajectory_id: str, progress: Progress) -> float:
    """The trajectory with the most turns goes first."""
    return -float(progress.turns)


def least_progress(trajectory_id: str, progress: Progress) -> float:
    """The trajectory with the fewest turns goes first."""
    return float(progress.turns)


def oracle(remaining_s: RemainingSeconds) -> ActionKey:
    """The longest remaining processing time first, by times that nobody knows outside a replay."""

    def key(trajectory_id: str, progress: Progress) -> float:
        return -remaining_s(trajectory_id, progress.turns)

    return key


ACTION_KEYS: dict[str, ActionKey] = {"fifo": fifo, "progress": most_progress, "least-progress": least_progress}
"""Keys of progress alone, by the name that a configuration uses."""

ORACLE = "oracle"
CAAS = "caas"
POLICIES = (*ACTION_KEYS, CAAS, ORACLE)
"""All action policies by name."""


class ActionPolicy(Protocol):
    """What the engine asks of a policy."""

    def key(self, trajectory_id: str, progress: Progress) -> float:
        """The key of an action that begins to wait."""
        ...

    def rekeys(self, now_s: float) -> dict[str, float]:
        """New keys for the actions that wait, by trajectory; empty while the old ones stand."""
        ...

    def pass_took(self, seconds: float) -> None:
        """How long it took to make and to pass on the last new keys."""
        ...

    def why(self, trajectory_id: str) -> Outlook | None:
        """What the key of the trajectory's action was made from; None for a policy that forecasts nothing."""
        ...


class ProgressKeys:
    """A policy whose keys follow from a trajectory's progress, and stand."""

    def __init__(self, key: ActionKey) -> None:
        self._key = key

    def key(self, trajectory_id: str, progress: Progress) -> float:
        return self._key(trajectory_id, progress)

    def rekeys(self, now_s: float) -> dict[str, float]:
        return {}

    def pass_took(self, seconds: float) -> None: ...

    def why(self, trajectory_id: str) -> Outlook | None:
        return None


class ChainAdvancing:
    """`caas`: scarce slots go to the chains whose observed progress says that they will end the batch."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def key(self, trajectory_id: str, progress: Progress) -> float:
        return self._coordinator.key(trajectory_id, progress)

    def rekeys(self, now_s: float) -> dict[str, float]:
        return self._coordinator.rekeys(now_s)

    def pass_took(self, seconds: float) -> None:
        self._coordinator.pass_took(seconds)

    def why(self, trajectory_id: str) -> Outlook | None:
        return self._coordinator.outlook(trajectory_id)


def action_policy(name: str, coordinator: Coordinator, remaining_s: RemainingSeconds | None = None) -> ActionPolicy:
    """The policy of this name. `remaining_s` is what `oracle` knows, where a trace tells it.

    Raises `ConfigError` for an unknown name, and for the oracle without a trace.
    """
    if name == CAAS:
        return ChainAdvancing(coordinator)
    if name == ORACLE:
        if remaining_s is None:
            raise ConfigError("scheduling.policy: 'oracle' knows the future from a trace; a live run has none")
        return ProgressKeys(oracle(remaining_s))
    if name not in ACTION_KEYS:
        raise ConfigError(f"scheduling.policy: unknown policy {name!r}{nearest(name, POLICIES)}")
    return ProgressKeys(ACTION_KEYS[name])
