from __future__ import annotations

import asyncio
import statistics
import time

import msgspec
import pytest

from makespan.envs.latency import Latency, WithLatency
from makespan.rollout.environment import Action, Environment, Message, Observation, StepResult
from makespan.rollout.errors import ConfigError
from makespan.rollout.trajectory import Task

TASK = Task(task_id="t7", environment="echo")


class Echo:
    """Answers an action with its text; raises for `boom`."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.closed = 0

    async def reset(self, task: Task) -> Observation:
        return Observation(messages=(Message("user", task.task_id),))

    async def step(self, action: Action) -> StepResult:
        self.seen.append(action.text)
        if action.text == "boom":
            raise ValueError("boom")
        return StepResult(Observation(messages=(Message("tool", action.text),)), reward=0.5)

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Durations passed to `asyncio.sleep`, which returns at once."""
    durations: list[float] = []

    async def sleep(delay: float) -> None:
        durations.append(delay)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return durations


async def episode(environment: Environment, task: Task, actions: list[str]) -> list[StepResult]:
    await environment.reset(task)
    return [await environment.step(Action(text)) for text in actions]


def durations(latency: Latency, count: int) -> list[float]:
    return [latency.step_s(f"task_{number % 97}", number // 97) for number in range(count)]


def test_durations_have_the_stated_median_and_spread() -> None:
    drawn = durations(Latency(median_s=0.2, sigma=0.8, cap_s=1e9, seed=3), 20_000)
    # Quantiles of a lognormal: median * exp(sigma * z) with z = 0 and -1, +1 for 50%, 15.87% and 84.13%. The tolerance
    # is over 4 standard errors of a sample quantile: 1.25 * sigma / sqrt(20,000) = 0.7% at the median, 0.9% elsewhere.
    low, middle, high = (sorted(drawn)[int(20_000 * share)] for share in (0.1587, 0.5, 0.8413))
    assert middle == pytest.approx(0.2, rel=0.03)
    assert low == pytest.approx(0.2 / 2.2255, rel=0.05)
    assert high == pytest.approx(0.2 * 2.2255, rel=0.05)
    assert statistics.median(drawn) != pytest.approx(0.2 * 1.05, rel=0.03)  # the tolerance would notice 5%


def test_the_cap_cuts_off_the_tail_and_leaves_the_median() -> None:
    drawn = durations(Latency(median_s=0.2, sigma=0.8, cap_s=0.3, seed=3), 20_000)
    assert max(drawn) == 0.3
    assert statistics.median(drawn) == pytest.approx(0.2, rel=0.03)
    # Above ln(1.5)/0.8 = 0.507 standard deviations lie 30.6% of a normal distribution.
    assert drawn.count(0.3) / 20_000 == pytest.approx(0.306, abs=0.015)


def test_sigma_zero_is_a_constant_and_median_zero_no_latency() -> None:
    assert set(durations(Latency(median_s=0.25, sigma=0, cap_s=9, seed=0), 50)) == {0.25}
    assert set(durations(Latency(median_s=0, sigma=1, cap_s=9, seed=0), 50)) == {0}


def test_durations_depend_on_seed_task_and_step_only() -> None:
    latency = Latency(median_s=1, sigma=1, cap_s=100, seed=1)
    assert latency.step_s("a", 0) == Latency(median_s=1, sigma=1, cap_s=100, seed=1).step_s("a", 0)
    others = [
        latency.step_s("b", 0),
        latency.step_s("a", 1),
        Latency(median_s=1, sigma=1, cap_s=100, seed=2).step_s("a", 0),
    ]
    assert len({latency.step_s("a", 0), *others}) == 4


def test_steps_sleep_their_durations_in_whatever_order_trajectories_run(slept: list[float]) -> None:
    latency = Latency(median_s=0.1, sigma=1, cap_s=5, seed=9)
    a, b = Task(task_id="a", environment="echo"), Task(task_id="b", environment="echo")

    async def one_after_the_other() -> None:
        for task in (a, b):
            await episode(WithLatency(Echo(), latency), task, ["x", "y"])

    async def interleaved() -> None:
        first, second = WithLatency(Echo(), latency), WithLatency(Echo(), latency)
        await second.reset(b)
        await first.reset(a)
        for environment in (second, first, first, second):
            await environment.step(Action("x"))

    asyncio.run(one_after_the_other())
    expected = list(slept)
    slept.clear()
    asyncio.run(interleaved())
    # Sequences: reset a, a0, a1, reset b, b0, b1; then reset b, reset a, b0, a0, a1, b1.
    assert [slept[i] for i in (1, 3, 4, 0, 2, 5)] == expected
    assert expected[0] == expected[3] == 0
    assert len(set(expected)) == 5


def test_a_reset_starts_the_count_of_steps_again(slept: list[float]) -> None:
    environment = WithLatency(Echo(), Latency(median_s=0.1, sigma=1, cap_s=5, seed=9))
    for _ in range(2):
        asyncio.run(episode(environment, TASK, ["x", "y"]))
    assert slept[:3] == slept[3:]


def test_reset_sleeps_when_it_has_a_median(slept: list[float]) -> None:
    latency = Latency(median_s=0, sigma=0, cap_s=5, seed=9, reset_median_s=1.5)
    asyncio.run(episode(WithLatency(Echo(), latency), TASK, ["x"]))
    assert slept == [1.5, 0]


def test_a_step_takes_its_duration_in_real_time() -> None:
    environment = WithLatency(Echo(), Latency(median_s=0.05, sigma=0, cap_s=1, seed=0))

    async def timed() -> float:
        await environment.reset(TASK)
        started = time.perf_counter()
        await environment.step(Action("x"))
        return time.perf_counter() - started

    assert 0.045 <= asyncio.run(timed()) < 1


def test_results_exceptions_and_close_are_handed_through(slept: list[float]) -> None:
    inner = Echo()
    environment = WithLatency(inner, Latency(median_s=0.1, sigma=1, cap_s=5, seed=9))

    async def use() -> None:
        assert (await environment.reset(TASK)).messages == (Message("user", "t7"),)
        result = await environment.step(Action("hello"))
        assert (result.observation.messages, result.reward) == ((Message("tool", "hello"),), 0.5)
        with pytest.raises(ValueError, match="boom"):
            await environment.step(Action("boom"))
        await environment.close()

    asyncio.run(use())
    assert inner.closed == 1
    assert len(slept) == 3


def test_a_step_cancelled_in_its_latency_has_not_happened() -> None:
    inner = Echo()
    environment = WithLatency(inner, Latency(median_s=60, sigma=0, cap_s=60, seed=0))

    async def cancel_early() -> None:
        await environment.reset(TASK)
        async with asyncio.timeout(0.01):
            await environment.step(Action("x"))

    with pytest.raises(TimeoutError):
        asyncio.run(cancel_early())
    assert inner.seen == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"median_s": -0.1}, r"latency.median_s is -0.1; it must be a finite number, 0 or more"),
        ({"median_s": float("nan")}, "latency.median_s is nan"),
        ({"sigma": -1.0}, "latency.sigma is -1.0"),
        ({"sigma": float("inf")}, "latency.sigma is inf"),
        ({"cap_s": -1.0}, "latency.cap_s is -1.0"),
        ({"reset_median_s": -1.0}, "latency.reset_median_s is -1.0"),
        ({"median_s": 6.0}, "cap_s is 5.0, below the median 6.0"),
        ({"reset_median_s": 7.0}, "cap_s is 5.0, below the median 7.0"),
    ],
)
def test_values_that_define_no_distribution_are_config_errors(change: dict[str, float], message: str) -> None:
    settings: dict[str, float] = {"median_s": 0.1, "sigma": 1.0, "cap_s": 5.0, "seed": 0}
    with pytest.raises(ConfigError, match=message):
        msgspec.convert(settings | change, Latency)
