"""A process group ends for good, and what its members left in shared memory goes with it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from makespan.rollout.replicas.process_group import end_group, shared_memory_of, signal_group, unlink_shared_memory

OWNER_OF_SHARED_MEMORY = """
import time
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *a: None  # as in a process whose tracker was killed with it
segment = shared_memory.SharedMemory(create=True, size=4096)
print(segment.name, flush=True)
time.sleep(600)
"""

DEAF_PARENT_AND_CHILD = "trap '' TERM; (trap '' TERM; echo child; sleep 600) & sleep 600"


def test_segments_are_found_while_their_owner_lives_and_removed_after_it_was_killed():
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER_OF_SHARED_MEMORY], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    assert name in shared_memory_of(process.pid)
    assert name not in shared_memory_of(process.pid + 1)
    process.kill()
    process.communicate()
    assert (Path("/dev/shm") / name).exists()  # a killed process leaves it
    unlink_shared_memory([name])
    assert not (Path("/dev/shm") / name).exists()
    unlink_shared_memory([name])  # once more does no harm


def test_a_group_that_ignores_sigterm_is_killed_after_its_grace():
    process = subprocess.Popen(["bash", "-c", DEAF_PARENT_AND_CHILD], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()

    async def go() -> float:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        ending = asyncio.create_task(end_group(process.pid, 0.5))
        await asyncio.to_thread(process.wait)  # a zombie would count as a member
        await ending
        return loop.time() - started_s

    assert 0.5 <= asyncio.run(go()) < 10
    assert process.returncode == -signal.SIGKILL
    assert not signal_group(process.pid, 0)


def test_a_group_that_is_gone_is_no_error():
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    asyncio.run(end_group(process.pid, 0.5))
