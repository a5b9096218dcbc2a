"""An environment that takes its time: realistic action durations for environments that answer at once.

`WithLatency` sleeps before each step for a lognormal time, the usual shape of tool durations. The duration of a step is
a pure function of the seed, the task and the step's number, so that runs under different schedules, however they
interleave, meet the same durations.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from statistics import NormalDist

import msgspec

from makespan.rollout.environment import Action, Environment, Observation, StepResult
from makespan.rollout.errors import ConfigError
from makespan.rollout.trajectory import Task

_HASH_BITS = 52
"""As many as leave a float room for the middle of a slice."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Lognormal durations, in seconds, cut off at `cap_s`.

    `sigma` is the standard deviation of the logarithm: 0 is constant, and 84% of the durations are below
    `median_s * exp(sigma)`. Raises `ConfigError` for values that define no such distribution.
    """

    median_s: float
    sigma: float
    cap_s: float
    seed: int
    reset_median_s: float = 0.0
    """The same for `reset`, with the same `sigma` and cap; 0 is no latency."""

    def __post_init__(self) -> None:
        for name in ("median_s", "sigma", "cap_s", "reset_median_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"latency.{name} is {value}; it must be a finite number, 0 or more")
        largest = max(self.median_s, self.reset_median_s)
        if self.cap_s < largest:
            raise ConfigError(f"latency.cap_s is {self.cap_s}, below the median {largest}: every duration would be it")

    def reset_s(self, task_id: str) -> float:
        """How long the reset to a task takes."""
        return self._duration_s(self.reset_median_s, task_id, "reset")

    def step_s(self, task_id: str, step: int) -> float:
        """How long step number `step` (from 0) of a task takes."""
        return self._duration_s(self.median_s, task_id, str(step))

    def _duration_s(self, median_s: float, task_id: str, what: str) -> float:
        digest = hashlib.blake2b(f"{self.seed}\0{task_id}\0{what}".encode(), digest_size=8).digest()
        # The middle of one of 2**52 equal slices of (0, 1): never 0 or 1.
        quantile = ((int.from_bytes(digest, "big") >> (64 - _HASH_BITS)) + 0.5) / 2**_HASH_BITS
        return min(self.cap_s, median_s * math.exp(self.sigma * NormalDist().inv_cdf(quantile)))


class WithLatency:
    """An `Environment` that is another one with a latency before each step (and reset, if it has one).

    Cancelled while it sleeps, it has not passed the action on.
    """

    def __init__(self, environment: Environment, latency: Latency) -> None:
        self._environment = environment
        self._latency = latency
        self._task_id = ""
        self._steps = 0

    async def reset(self, task: Task) -> Observation:
        self._task_id, self._steps = task.task_id, 0
        await asyncio.sleep(self._latency.reset_s(task.task_id))
        return await self._environment.reset(task)

    async def step(self, action: Action) -> StepResult:
        duration_s = self._latency.step_s(self._task_id, self._steps)
        self._steps += 1
        await asyncio.sleep(duration_s)
        return await self._environment.step(action)

    async def close(self) -> None:
        await self._environment.close()
