"""In which order a replica serves the requests that wait there (smaller first, then by arrival).

A turn of a trajectory that is under way goes before the first turn of a new one: its cache is there now and may be gone
later, and its trajectory will end sooner. A chain that is expected to outlast the batch's horizon goes before both.
"""

from __future__ import annotations

THREATENING = -1
RETURNING = 0
NEW = 1


def request_priority(turn: int, threatens: bool) -> int:
    """The priority of a request.

    Args:
        turn: how many turns its trajectory has behind it.
        threatens: whether its trajectory is expected to end after the batch's horizon.
    """
    if turn == 0:
        return NEW
    return THREATENING if threatens else RETURNING
