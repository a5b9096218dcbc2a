"""A virtual clock: an event loop whose time jumps to the next timer instead of waiting for it.

Nothing of the simulated world happens outside the loop, so between two timers there is nothing to wait for. Everything
that takes its time from the running loop (`asyncio.sleep`, `asyncio.timeout`, this package's policies and logs) runs
unchanged, and the same coroutines always run in the same order. There are no sockets and no other processes here; when
nobody is ready and no timer is set, nothing can ever happen again, and that is an error (`SimulationStalled`) rather
than a hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import selectors
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from makespan.rollout.errors import MakespanError

T = TypeVar("T")


class SimulationStalled(MakespanError):
    """Every task of a simulation waits for another one, and no timer is set."""


class _JumpingSelector(selectors.SelectSelector):
    """The loop's point of rest: where a real loop would sleep, the clock moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise SimulationStalled(
                f"at {self.now_s:.3f} s of virtual time every task waits and no timer is set, so none will ever go on"
            )
        if timeout > 0:
            self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that starts at time 0 and never waits."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time, on a loop of its own.

    Raises `SimulationStalled` where a real loop would hang.
    """
    with _no_collections(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without the cyclic collector: a simulation makes millions of objects that live to its end and no cycles to speak
    of, and looking for cycles among them would take longer with every one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
