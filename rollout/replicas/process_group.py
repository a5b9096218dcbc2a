"""Ending a group of processes for good, shared memory included.

vLLM's engine and worker exchange messages through POSIX shared memory. A process that is killed, or that dies while its
machine is busy, leaves its segments behind, and nobody else knows their names; so they are noted while it lives and
removed once the whole group is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.1

_MARKS = tuple(f" {SHARED_MEMORY}/{prefix}" for prefix in ("psm_", "sem.mp-"))
"""How lines of /proc/PID/maps name the segments and semaphores of Python's multiprocessing."""


def shared_memory_of(group: int) -> tuple[str, ...]:
    """Names of the POSIX shared memory segments that processes of a group have mapped now (Linux; else none)."""
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if os.getpgid(int(maps.parent.name)) != group:
                continue
            lines = maps.read_text().splitlines()
        except OSError:  # it ended meanwhile, or is another user's
            continue
        names |= {Path(line.split(maxsplit=5)[5]).name for line in lines if any(mark in line for mark in _MARKS)}
    return tuple(sorted(names))


def unlink_shared_memory(names: Iterable[str]) -> None:
    """Remove segments; those that are gone already are fine."""
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            (SHARED_MEMORY / name).unlink()


def signal_group(group: int, number: int) -> bool:
    """Send a signal to every process of a group; False when there is none left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


async def end_group(group: int, grace_s: float) -> None:
    """SIGTERM to what is left of a group, SIGKILL to what is left after `grace_s`; returns when it is gone."""
    deadline_s = asyncio.get_running_loop().time() + grace_s
    left = signal_group(group, signal.SIGTERM)
    while left:
        await asyncio.sleep(POLL_S)
        late = asyncio.get_running_loop().time() > deadline_s
        left = signal_group(group, signal.SIGKILL if late else 0)
