"""vLLM's general plugin of makespan: engines on shared CPU cores that sleep while they wait.

An engine core and its worker hand each step to each other through shared memory, and whoever waits spins, calling
`sched_yield`, until a second has passed without a message: from the first token to the last, as steps follow each other
within milliseconds. On a server with cores to spare that buys latency. Where replicas share the cores that they compute
on, each spinning engine core takes its part of a core away from somebody's arithmetic.

vLLM loads the plugin in each of its processes (entry-point group `vllm.general_plugins`). It does nothing unless
`MAKESPAN_VLLM_SPIN_S` says how long to spin, which makespan's own CPU replicas do (`vllm_host.py`).
"""

from __future__ import annotations

import math
import os
from typing import Any

from makespan.rollout.errors import ConfigError
from makespan.rollout.replicas.wire import SPIN_VARIABLE

RECHECK_MS = 5
"""A sleeper is woken by a message, and looks by itself this often: vLLM 0.30 loses some of the wake-up calls, and would
otherwise look again after 5 seconds."""


def register() -> None:
    """What vLLM calls. Raises `ConfigError` for a value that is no time."""
    text = os.environ.get(SPIN_VARIABLE)
    if text is None:
        return
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.wait = sleeping(SpinCondition.wait, spin_seconds(text))


def spin_seconds(text: str) -> float:
    """The value of the variable. Raises `ConfigError`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{SPIN_VARIABLE} must be seconds, 0 or more, not {text!r}")
    return seconds


def sleeping(wait: Any, spin_s: float) -> Any:
    """A `SpinCondition.wait` that spins for `spin_s` after a message and then sleeps."""

    def sleep(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = spin_s
        wait(condition, RECHECK_MS if timeout_ms is None else min(timeout_ms, RECHECK_MS))

    return sleep
