"""What readings of a core's speed add up to, and the process that takes them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from makespan.rollout.errors import FormatError
from makespan.rollout.resources import core_speed
from makespan.rollout.resources.core_speed import CoreSpeed, Reading, metered, parse

TWO_CORES = [
    Reading(at_s=1.0, core=0, seconds=0.001),
    Reading(at_s=1.0, core=1, seconds=0.004),
    Reading(at_s=2.0, core=0, seconds=0.003),
    Reading(at_s=3.0, core=0, seconds=0.008),
]


def test_the_mean_of_a_time_is_that_of_its_readings():
    speed = CoreSpeed(TWO_CORES)
    assert speed.seconds([0], 0.5, 2.5) == pytest.approx(0.002)
    assert speed.seconds([0], 1.5, 9.0) == pytest.approx(0.0055)


def test_every_core_counts_the_same_however_often_it_was_read():
    assert CoreSpeed(TWO_CORES).seconds([0, 1], 0.5, 3.5) == pytest.approx((0.004 + 0.004) / 2)


def test_between_two_readings_their_mean_holds_and_beyond_the_last_one_it():
    speed = CoreSpeed(TWO_CORES)
    assert speed.seconds([0], 2.2, 2.7) == pytest.approx(0.0055)
    assert speed.seconds([0], 4.0, 5.0) == pytest.approx(0.008)


def test_a_core_that_was_never_read_has_no_speed():
    assert CoreSpeed(TWO_CORES).seconds([0, 2], 0.0, 9.0) is None
    assert CoreSpeed(TWO_CORES).seconds([], 0.0, 9.0) is None


def test_the_process_reads_every_core_and_ends_with_the_block():
    cores = sorted(os.sched_getaffinity(0))[:2]

    async def read() -> float | None:
        async with metered(cores) as speed:
            for _ in range(500):
                if (seconds := speed.seconds(cores, 0.0, 1e18)) is not None:
                    return seconds
                await asyncio.sleep(0.02)
        return None

    seconds = asyncio.run(read())
    assert seconds is not None
    assert 1e-5 < seconds < 1.0  # 4 million multiplications
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    assert f"{os.getpid()} {sys.executable} -m {core_speed.__name__}" not in listed.replace("  ", " ")


def test_without_cores_nothing_is_started():
    async def read() -> float | None:
        async with metered([]) as speed:
            return speed.seconds([], 0.0, 1.0)

    assert asyncio.run(read()) is None


def test_a_process_that_ends_at_once_is_told():
    async def read() -> None:
        async with metered([10_000]):  # no machine has this core
            pass

    with pytest.raises(FormatError, match="instead of a reading"):
        asyncio.run(read())


@pytest.mark.parametrize("line", [b"", b"1.0 0\n", b"now 0 0.1\n"])
def test_what_is_no_reading_is_refused(line):
    with pytest.raises(FormatError, match="instead of a reading"):
        parse(line)


def test_a_reading_is_read():
    assert parse(b"12.500000 3 0.001000000\n") == Reading(12.5, 3, 0.001)
