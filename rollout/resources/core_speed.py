"""How fast CPU cores are just now: the seconds that a fixed piece of work takes on each of them, again and again.

Cores that are shared with other tenants of a machine get faster and slower by half and more, for seconds or for
minutes, whatever this process does. A calibration and a batch that ran at different speeds say nothing about each
other unless the speed is known. A process of its own (`python -m makespan.rollout.resources.core_speed CORE…`) goes
from core to core, does a millisecond's work on each and writes what it took: processor time, so waiting for a busy
core does not count, but slower arithmetic and memory do. It takes about half a percent of a core.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from makespan.rollout.errors import FormatError

INTERVAL_S = 0.25
"""Between two rounds over the cores."""

ROWS, COLUMNS = 4096, 1024
"""Of the matrix that a reading multiplies: 16 MiB, read from outside of a core's own caches, as a decode step's
weights are."""


class Reading(NamedTuple):
    """One measurement."""

    at_s: float
    """On `time.monotonic`'s clock."""
    core: int
    seconds: float


class CoreSpeed:
    """The readings so far; `metered` fills them."""

    def __init__(self, readings: Iterable[Reading] = ()) -> None:
        self._readings: dict[int, list[Reading]] = {}
        for reading in readings:
            self.add(reading)

    def add(self, reading: Reading) -> None:
        """Take the next reading; those of a core come in the order of time."""
        self._readings.setdefault(reading.core, []).append(reading)

    def seconds(self, cores: Sequence[int], from_s: float, to_s: float) -> float | None:
        """Mean seconds of the readings on `cores` from `from_s` to `to_s`, every core counting the same; where a core
        has none between them, of its last before and its first after. None without any reading of one of the cores."""
        means = []
        for core in cores:
            readings = self._readings.get(core)
            if not readings:
                return None
            within = [reading.seconds for reading in readings if from_s <= reading.at_s <= to_s]
            before = [reading.seconds for reading in readings if reading.at_s < from_s][-1:]
            after = [reading.seconds for reading in readings if reading.at_s > to_s][:1]
            means.append(fmean(within or before + after))
        return fmean(means) if means else None


@contextlib.asynccontextmanager
async def metered(cores: Sequence[int]) -> AsyncIterator[CoreSpeed]:
    """Readings of `cores` for the time of the block; none for no cores."""
    speed = CoreSpeed()
    if not cores:
        yield speed
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "makespan.rollout.resources.core_speed",
        *map(str, cores),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        start_new_session=True,  # a terminal's Ctrl-C ends it with the block, not before
    )
    assert process.stdout is not None
    speed.add(parse(await process.stdout.readline()))
    listening = asyncio.create_task(_listen(process.stdout, speed), name="core-speed")
    try:
        yield speed
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await asyncio.gather(listening, process.wait(), return_exceptions=True)


async def _listen(lines: asyncio.StreamReader, speed: CoreSpeed) -> None:
    async for line in lines:
        speed.add(parse(line))


def parse(line: bytes) -> Reading:
    """A reading from what the process writes. Raises `FormatError`, also for the empty line of one that has ended."""
    try:
        at_s, core, seconds = line.split()
        return Reading(float(at_s), int(core), float(seconds))
    except ValueError:
        raise FormatError(f"the process that measures the cores' speed wrote {line!r} instead of a reading") from None


def main(cores: Sequence[int]) -> None:
    """Write readings until nobody listens."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    vector = rng.standard_normal(COLUMNS, dtype=np.float32)
    with contextlib.suppress(BrokenPipeError):
        while True:
            for core in cores:
                os.sched_setaffinity(0, {core})
                began_ns = time.thread_time_ns()
                matrix @ vector
                seconds = (time.thread_time_ns() - began_ns) * 1e-9
                os.write(1, f"{time.monotonic():.6f} {core} {seconds:.9f}\n".encode())
            time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main([int(core) for core in sys.argv[1:]])
