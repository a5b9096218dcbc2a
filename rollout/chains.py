"""The chains of a batch as arrays: an entry a trajectory, so that a forecast sweeps over all of them at once.

`ChainTable` is a table with growing columns and nothing more: what the numbers mean for scheduling is the
coordinator's.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from makespan.rollout.forecast import Floats, Ints

Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]

_FIRST_ROOM = 256

_COUNTS = ("group", "environment", "turns")
_SECONDS = ("inference_s", "action_s", "first_tokens", "tokens")
"""And tokens: whole numbers, kept as floats because they are only ever divided."""
_FLAGS = ("running", "waiting", "over", "counted")
_STATE = ("turns", *_SECONDS, *_FLAGS)


class ChainState(msgspec.Struct, kw_only=True):
    """All that there is to know of one chain: what a process that runs trajectories tells one that does not.

    It is a state and not an event, so that telling it twice, or only the last of several, comes to the same.
    """

    trajectory_id: str
    group: str
    environment: str
    turns: int = 0
    inference_s: float = 0.0
    action_s: float = 0.0
    first_tokens: int = 0
    tokens: int = 0
    running: bool = False
    waiting: bool = False
    over: bool = False
    counted: bool = False


class ChainTable:
    """Columns of shape (chains,), in the order in which the chains joined.

    Attributes:
        group, environment: numbers into `groups` and `environments`.
        turns: steps that are over.
        inference_s, action_s: seconds so far, waiting at replicas included and waiting for slots excluded.
        first_tokens, tokens: of the context with its first generated turn, and now; 0 before.
        running: admitted and not over. waiting: an action waits or runs. over: ended, however.
        counted: over, and its length says how long chains are.
    """

    group: Ints
    environment: Ints
    turns: Ints
    inference_s: Floats
    action_s: Floats
    first_tokens: Floats
    tokens: Floats
    running: Flags
    waiting: Flags
    over: Flags
    counted: Flags

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.number: dict[str, int] = {}
        self.groups: dict[str, int] = {}
        self.group_names: list[str] = []
        self.environments: dict[str, int] = {}
        self._columns: dict[str, np.ndarray[Any, np.dtype[Any]]] = {
            name: np.zeros(_FIRST_ROOM, dtype=np.int64) for name in _COUNTS
        }
        self._columns |= {name: np.zeros(_FIRST_ROOM) for name in _SECONDS}
        self._columns |= {name: np.zeros(_FIRST_ROOM, dtype=bool) for name in _FLAGS}
        self._expose()

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, trajectory_id: str) -> bool:
        return trajectory_id in self.number

    def add(self, trajectory_id: str, group: str, environment: str) -> int:
        """A chain joins; gives its number. Amortised O(1)."""
        number = len(self.ids)
        if number == len(self._columns["turns"]):
            self._columns = {name: np.concatenate([c, np.zeros_like(c)]) for name, c in self._columns.items()}
        self.ids.append(trajectory_id)
        self.number[trajectory_id] = number
        if group not in self.groups:
            self.groups[group] = len(self.groups)
            self.group_names.append(group)
        self._columns["group"][number] = self.groups[group]
        self._columns["environment"][number] = self.environments.setdefault(environment, len(self.environments))
        self._expose()
        return number

    def group_of(self, trajectory_id: str) -> str:
        return self.group_names[int(self.group[self.number[trajectory_id]])]

    def put(self, state: ChainState) -> None:
        """Write a chain's row; it joins if it is new."""
        number = self.number.get(state.trajectory_id)
        if number is None:
            number = self.add(state.trajectory_id, state.group, state.environment)
        for name in _STATE:
            self._columns[name][number] = getattr(state, name)

    def get(self, number: int) -> ChainState:
        """A chain's row."""
        trajectory_id = self.ids[number]
        values = {name: self._columns[name][number].item() for name in _STATE}
        values |= {name: int(values[name]) for name in ("first_tokens", "tokens")}
        environment = list(self.environments)[int(self.environment[number])]
        group = self.group_of(trajectory_id)
        return ChainState(trajectory_id=trajectory_id, group=group, environment=environment, **values)

    def _expose(self) -> None:
        """Columns show the chains there are: views, so that writing to them writes to the table."""
        for name, column in self._columns.items():
            setattr(self, name, column[: len(self.ids)])
