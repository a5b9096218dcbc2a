import asyncio
import time

import pytest

from makespan.rollout.simulation.loop import SimulationStalled, run_virtual


def test_an_hour_of_sleep_takes_no_time_and_moves_the_clock_by_an_hour():
    async def main():
        loop = asyncio.get_running_loop()
        assert loop.time() == 0.0
        await asyncio.sleep(3600)
        return loop.time()

    began_s = time.monotonic()
    assert run_virtual(main()) == pytest.approx(3600)
    assert time.monotonic() - began_s < 5


def test_sleepers_wake_in_the_order_of_their_times():
    woken = []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        woken.append((seconds, asyncio.get_running_loop().time()))

    async def main():
        await asyncio.gather(*(sleeper(seconds) for seconds in (3, 1, 2, 100_000)))

    run_virtual(main())
    assert [seconds for seconds, _ in woken] == [1, 2, 3, 100_000]
    assert [at_s for _, at_s in woken] == pytest.approx([1, 2, 3, 100_000])


def test_a_timeout_expires_in_virtual_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.sleep(11)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10)


def test_waiting_for_nothing_is_an_error_and_not_a_hang():
    async def main():
        await asyncio.sleep(5)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationStalled, match=r"at 5\.000 s"):
        run_virtual(main())


def test_a_stalled_simulation_still_runs_its_clean_up():
    cleaned = []

    async def main():
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append(True)

    with pytest.raises(SimulationStalled):
        run_virtual(main())
    assert cleaned == [True]
