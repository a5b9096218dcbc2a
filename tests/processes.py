"""Looking at processes from outside, for tests of what a run leaves behind."""

from __future__ import annotations

import time
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Processes started by `pid`, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = set(), [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.add(child)
            todo.append(child)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that run (a zombie does not)."""
    living = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            living.add(pid)
    return living


def wait_until_gone(pids: set[int], timeout_s: float = 60.0) -> set[int]:
    """Wait for processes to end; gives those that have not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (left := alive(pids)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def mapped_shared_memory(pids: set[int]) -> set[str]:
    """Names of the POSIX shared memory segments that processes have mapped."""
    names = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        names |= {
            line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/psm_" in line or "/dev/shm/sem.mp-" in line
        }
    return names
