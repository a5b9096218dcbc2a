"""Where one agent-loop worker's trajectories wait for admission: to start and, while they are parked, to go on.

Who may go is decided in the coordinator's actor, because only all workers together fill the replicas. But nobody waits
*there*: a Ray actor runs a limited number of calls at a time, and calls that wait would keep out those that wake them.
A worker tells who waits and hears who may go in its exchange with the actor (`reporter.py`), which returns at once. The
waiting is done here, on a local future, and a cancelled trajectory leaves nothing behind.

When the actor falls silent the room decides by itself: as many of its trajectories work as did when the actor was last
heard, and at least one; the parked ones go on first. So nothing stops, and nobody floods the replicas.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec


class _Guest(msgspec.Struct):
    """A trajectory that waits."""

    context_tokens: int
    """Of its next prompt; 0: it waits to start."""
    turn: asyncio.Future[None]
    parked: Callable[[], None] | None


class WaitingRoom:
    """One worker's trajectories, as admission sees them.

    Args:
        limit: how many work if the actor is never heard; None: all.
    """

    def __init__(self, limit: int | None) -> None:
        self._share = limit
        self._alone = self._ever_heard = False
        self._waiting: OrderedDict[str, _Guest] = OrderedDict()
        self._untold: dict[str, int] = {}
        self._working: set[str] = set()
        self.knocked = asyncio.Event()
        """Set when somebody begins to wait."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def wait(self, trajectory_id: str, context_tokens: int = 0, parked: Callable[[], None] | None = None) -> None:
        """Wait to start (0 tokens) or, before an inference with so long a prompt, to go on.

        Args:
            parked: called when the actor has heard of it and does not let it go on at once.
        """
        guest = _Guest(context_tokens, asyncio.get_running_loop().create_future(), parked)
        self._working.discard(trajectory_id)
        self._waiting[trajectory_id] = guest
        self._untold[trajectory_id] = context_tokens
        self.knocked.set()
        self._let_in()
        await guest.turn

    def leave(self, trajectory_id: str) -> None:
        """The trajectory is over, also if it was cancelled while it waited."""
        self._waiting.pop(trajectory_id, None)
        self._untold.pop(trajectory_id, None)
        self._working.discard(trajectory_id)
        self._let_in()

    # What the actor is told, and what it answers

    def asks(self) -> dict[str, int]:
        """Who began to wait since this was last asked for, with the tokens of the next prompt."""
        self.knocked.clear()
        asks, self._untold = self._untold, {}
        return asks

    def answered(self, asks: Iterable[str], going: Iterable[str]) -> None:
        """The actor answered: these of all that wait may go. Of `asks`, it has heard with this."""
        self._alone, self._ever_heard = False, True
        for trajectory_id in going:
            self._go(trajectory_id)
        for trajectory_id in asks:
            guest = self._waiting.get(trajectory_id)
            if guest is not None and guest.parked is not None:
                guest.parked()

    def retell(self) -> None:
        """The actor knows nothing of what it was told, or perhaps nothing of it: it will be told of everybody again."""
        self._untold = {trajectory_id: guest.context_tokens for trajectory_id, guest in self._waiting.items()}

    def unanswered(self, *, give_up: bool) -> None:
        """The actor did not answer. `give_up`: do not wait for it any longer, even if it was never heard."""
        self.retell()
        if (give_up or self._ever_heard) and not self._alone:
            self._alone = True
            if self._ever_heard:
                self._share = max(1, len(self._working))
        self._let_in()

    def _let_in(self) -> None:
        while self._alone and self._waiting and (self._share is None or len(self._working) < self._share):
            parked = (trajectory_id for trajectory_id, guest in self._waiting.items() if guest.context_tokens)
            self._go(next(parked, None) or next(iter(self._waiting)))

    def _go(self, trajectory_id: str) -> None:
        guest = self._waiting.pop(trajectory_id, None)
        if guest is None:
            return
        self._untold.pop(trajectory_id, None)
        self._working.add(trajectory_id)
        if not guest.turn.done():
            guest.turn.set_result(None)
