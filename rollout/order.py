"""Who starts next, among the trajectories that wait for admission.

`ArrivalOrder` is the baseline. `ForecastOrder` goes by what the coordinator expects. Without a memory of these prompts
it goes breadth first: the first chains of every group, one group after the other, because a group's first finished
chain tells most about its siblings; after that it takes the group that is expected to take longest. With a memory that
predicts, the longest goes first from the start; but where everything fits at once nothing is gained by that, and
breadth first decides in which order the first actions arrive. `OracleOrder` knows every trajectory's time from a trace;
beside the oracle of actions it bounds what any forecast can gain.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol

from makespan.rollout.coordinator import Coordinator
from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.scheduling import RemainingSeconds

BREADTH = 2
"""At least so many chains of every group start before any group goes first."""


class AdmissionOrder(Protocol):
    """The trajectories that wait, in the order in which they are to start."""

    def submit(self, trajectory_id: str) -> None: ...

    def withdraw(self, trajectory_id: str) -> None:
        """It does not wait any more; nothing happens if it did not."""
        ...

    def next(self) -> str:
        """The one to start now; it waits no longer. Raises `IndexError` when nobody waits."""
        ...

    def evenly(self) -> bool:
        """Whether those that have come least far should go on first, where memory does not hold all of them."""
        ...

    def __len__(self) -> int: ...


class ArrivalOrder:
    """First come, first served."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, None] = OrderedDict()

    def submit(self, trajectory_id: str) -> None:
        self._waiting[trajectory_id] = None

    def withdraw(self, trajectory_id: str) -> None:
        self._waiting.pop(trajectory_id, None)

    def next(self) -> str:
        if not self._waiting:
            raise IndexError("nobody waits")
        return self._waiting.popitem(last=False)[0]

    def evenly(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self._waiting)


class ForecastOrder:
    """By the coordinator's forecast.

    Args:
        coordinator: knows the group of every trajectory that is submitted.
        concurrency: how many run at once; None: all.
    """

    def __init__(self, coordinator: Coordinator, concurrency: int | None) -> None:
        self._coordinator = coordinator
        self._concurrency = concurrency
        self._group_of: dict[str, str] = {}
        self._waiting: dict[str, OrderedDict[str, None]] = {}
        self._started: dict[str, int] = {}

    def submit(self, trajectory_id: str) -> None:
        if not self._group_of:
            self._started.clear()  # another batch
        group = self._coordinator.group_of(trajectory_id)
        self._group_of[trajectory_id] = group
        self._waiting.setdefault(group, OrderedDict())[trajectory_id] = None
        self._started.setdefault(group, 0)

    def withdraw(self, trajectory_id: str) -> None:
        group = self._group_of.pop(trajectory_id, None)
        if group is not None:
            self._leave(group, trajectory_id)

    def next(self) -> str:
        if not self._waiting:
            raise IndexError("nobody waits")
        group = self._next_group()
        trajectory_id = next(iter(self._waiting[group]))
        del self._group_of[trajectory_id]
        self._started[group] += 1
        self._leave(group, trajectory_id)
        return trajectory_id

    def evenly(self) -> bool:
        return self._coordinator.lengths_alike() and not self._coordinator.predicts_costs()

    def __len__(self) -> int:
        return len(self._group_of)

    def _next_group(self) -> str:
        fits = self._concurrency is None or len(self) + sum(self._started.values()) <= self._concurrency
        groups = list(self._waiting)
        if fits:
            return min(groups, key=self._started.__getitem__)
        if not self._coordinator.predicts():
            breadth = max(BREADTH, (self._concurrency or 0) // max(1, len(self._started)))
            group = min(groups, key=self._started.__getitem__)
            if self._started[group] < breadth:
                return group
        expected_s = self._coordinator.expected_s(groups)
        return groups[max(range(len(groups)), key=expected_s.__getitem__)]

    def _leave(self, group: str, trajectory_id: str) -> None:
        waiting = self._waiting[group]
        del waiting[trajectory_id]
        if not waiting:
            del self._waiting[group]


class OracleOrder:
    """The longest true time first, by times that nobody knows outside a replay; ties go by arrival.

    Args:
        remaining_s: as the oracle of actions is given them; the time from the first action on counts.
    """

    def __init__(self, remaining_s: RemainingSeconds) -> None:
        self._remaining_s = remaining_s
        self._waiting: set[str] = set()
        self._heap: list[tuple[float, int, str]] = []
        self._submitted = 0

    def submit(self, trajectory_id: str) -> None:
        self._waiting.add(trajectory_id)
        self._submitted += 1
        heapq.heappush(self._heap, (-self._remaining_s(trajectory_id, 0), self._submitted, trajectory_id))

    def withdraw(self, trajectory_id: str) -> None:
        self._waiting.discard(trajectory_id)

    def next(self) -> str:
        while self._heap:
            trajectory_id = heapq.heappop(self._heap)[-1]
            if trajectory_id in self._waiting:
                self._waiting.remove(trajectory_id)
                return trajectory_id
        raise IndexError("nobody waits")

    def evenly(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self._waiting)


def smaller_limit(concurrency: int | None, reference: int | None) -> int | None:
    """How many are to run at once, by a limit and by what memory is meant for; None: nobody says."""
    return min((number for number in (concurrency, reference) if number is not None), default=None)


ORDERS = ("arrival", "forecast", "oracle")
"""Orders of admission by the name that a configuration uses."""


def make_order(
    name: str, coordinator: Coordinator, concurrency: int | None, remaining_s: RemainingSeconds | None = None
) -> AdmissionOrder:
    """The order of this name. `remaining_s` is what `oracle` knows, where a trace tells it.

    Raises `ConfigError` for an unknown name, and for the oracle without a trace.
    """
    if name not in ORDERS:
        raise ConfigError(f"admission.order: unknown order {name!r}{nearest(name, ORDERS)}")
    if name == "oracle":
        if remaining_s is None:
            raise ConfigError("admission.order: 'oracle' knows the future from a trace; a live run has none")
        return OracleOrder(remaining_s)
    return ForecastOrder(coordinator, concurrency) if name == "forecast" else ArrivalOrder()
