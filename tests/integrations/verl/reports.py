"""Reports to a coordinator without Ray, for the tests of what it makes of them."""

from __future__ import annotations

import itertools

from makespan.integrations.verl.coordinator import Exchange, Report, SharedCoordinator
from makespan.rollout.admission_policy import ReturningTurn
from makespan.rollout.chains import ChainState

SLOTS = {"env": 2}
NUMBERS = itertools.count(1)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def tell(
    coordinator: SharedCoordinator,
    worker: str,
    states: list[ChainState],
    asks: dict[str, int] | None = None,
    *,
    answered: bool = False,
    number: int | None = None,
    served: list[ReturningTurn] | None = None,
    replicas: int | None = None,
) -> Exchange:
    """A worker's report, later than all before it unless it has a number, and what it gets for it."""
    report = Report(
        worker=worker,
        number=next(NUMBERS) if number is None else number,
        answered=answered,
        slots=SLOTS,
        states=states,
        asks=asks or {},
        served=served or [],
        replicas=replicas,
    )
    return coordinator.exchange(report)
