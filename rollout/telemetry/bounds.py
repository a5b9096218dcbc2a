"""What no schedule of the same work can beat.

Three bounds, each of another resource; the largest counts. *Slots*: the environment work of a class over its slots.
*Chain*: the longest trajectory alone on an idle system, its actions without waiting and its inference at uncontended
speed. *Inference*: the work that batching cannot share, over the replicas. Tokens that were computed twice count once:
computing them again was a decision. Actions that failed do not count: no other schedule has to fail.

Inference at uncontended speed needs a cost. A simulation writes its own into the log (`InferenceCost` in its `replica`
events), and the bounds are exact then. A live log has only rates: the best prefill and decode rate that any inference
of the run saw stand for an idle system, or what an inference took itself where that was less. The inference bound is
not known then, since no single request shows what a batch of them can do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import msgspec

from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog

RATE_SAMPLE_TOKENS = 256
"""Prefills of fewer uncached tokens say more of a step's fixed cost than of the rate, and are not used for it."""

AloneSeconds = Callable[[dict[str, Any]], float]
"""Seconds of an inference (a `generate` event's data) on an idle replica."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Lower bounds on the makespan, in seconds; None: not known."""

    slots: dict[str, float]
    """Environment work over slots, by class with a known number of slots."""
    inference: float | None
    chain: float | None

    def largest(self) -> float | None:
        """The bound that counts, None when there is none."""
        known = [*self.slots.values(), self.inference, self.chain]
        return max((value for value in known if value is not None), default=None)


def lower_bounds(
    log: MergedLog, actions: list[Event], generations: list[Event], slots: dict[str, int], replicas: int
) -> Bounds:
    """The bounds of a batch, from its events; `actions` are those that succeeded."""
    work: dict[str, float] = defaultdict(float)
    chain: dict[str, float] = defaultdict(float)
    for event in actions:
        work[event.data["slot_class"]] += event.data["service_s"]
        chain[event.trajectory_id] += event.data["service_s"]
    cost = _cost(log)
    alone_s = _at_best_rates(generations) if cost is None else _at_cost(cost.alone_s)
    for event in generations:
        chain[event.trajectory_id] += alone_s(event.data)
    inference_s = None
    if cost is not None and replicas:
        work_s = _at_cost(cost.work_s)
        inference_s = sum(work_s(event.data) for event in generations) / replicas
    return Bounds(
        slots={name: seconds / slots[name] for name, seconds in sorted(work.items()) if name in slots},
        inference=inference_s,
        chain=max(chain.values(), default=None),
    )


def _cost(log: MergedLog) -> InferenceCost | None:
    """The cost that the replicas say they have, where they are simulated."""
    found = next((event.data["cost"] for event in log.of("replica") if "cost" in event.data), None)
    return None if found is None else msgspec.convert(found, InferenceCost)


def _needed_tokens(data: dict[str, Any]) -> int | None:
    """Prompt tokens that had to be computed: not cached, and not computed before."""
    if data["cached_tokens"] is None:
        return None
    return max(0, int(data["prompt_tokens"] - data["cached_tokens"] - data["recomputed_tokens"]))


def _at_cost(seconds: Callable[[int, int, int], float]) -> AloneSeconds:
    def of(data: dict[str, Any]) -> float:
        return seconds(_needed_tokens(data) or 0, data["prompt_tokens"], data["generated_tokens"])

    return of


def _at_best_rates(generations: list[Event]) -> AloneSeconds:
    """Seconds at the fewest seconds a token that any inference of the run took in prefill and in decode, at most what
    the inference took itself: rates come from long ones, and a short one may have been quicker still."""

    def best(seconds: str, tokens: Callable[[dict[str, Any]], int], at_least: int) -> float:
        rates = [
            event.data[seconds] / tokens(event.data)
            for event in generations
            if event.data[seconds] is not None and tokens(event.data) >= at_least
        ]
        return min(rates, default=0.0)  # nothing is claimed of what was not measured

    prefill_s = best("prefill_s", lambda d: int(d["prompt_tokens"] - (d["cached_tokens"] or 0)), RATE_SAMPLE_TOKENS)
    decode_s = best("decode_s", lambda d: int(d["generated_tokens"]) - 1, 8)

    def of(data: dict[str, Any]) -> float:
        prefilled_s = (_needed_tokens(data) or 0) * prefill_s
        decoded_s = max(0, int(data["generated_tokens"]) - 1) * decode_s
        return min(prefilled_s, data["prefill_s"] or 0.0) + min(decoded_s, data["decode_s"] or 0.0)

    return of
