"""Where the makespan went: the batch's last trajectory, second by second.

A batch ends when its last trajectory does, so the life of that one, from the batch's start, *is* the makespan. Seconds
saved on any other trajectory that do not reach this one are not seconds of the batch. Its phases add up to its time;
what nobody measured is the rest (`overhead`: messages between processes and the engine's own work).
"""

from __future__ import annotations

from typing import Any

import msgspec

from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.telemetry.slot_use import slot_uses, total


class LastChain(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the trajectory that ended last, from the batch's start to its end, by phase.

    The phases of inference are None when a replica did not measure them; `inference` is their sum with its share of
    overhead then, as the engine saw it.
    """

    trajectory_id: str
    turns: int
    total: float
    admission: float
    """Until it was admitted, and parked later."""
    inference: float
    """All inferences as the engine saw them: the next four phases and what passed on the way."""
    replica_queue: float | None
    prefill: float | None
    """Of tokens that no replica had computed for this trajectory before."""
    recomputation: float | None
    """Prefill of tokens that had been computed before: the cache was lost, or the trajectory moved."""
    decode: float | None
    slot_queue: float | None
    environment: float | None
    """Actions that failed included; both None when nobody measured one of those."""
    overhead: float
    """`total` less all phases; where those of inference are not measured, less `inference`, and where those of actions
    are not, less the actions as the engine saw them."""


def last_chain(log: MergedLog, start: Event) -> LastChain | None:
    """The decomposition, None when no trajectory ended (cancelled ones do not count)."""
    ended = [event for event in log.of("ended") if event.data["state"] != "cancelled"]
    if not ended:
        return None
    last = max(ended, key=lambda event: event.monotonic_s)
    own = [event for _, event in log.events if event.trajectory_id == last.trajectory_id]
    generations = [event for event in own if event.kind == "generate"]
    actions = [use for use in slot_uses(log) if use.trajectory_id == last.trajectory_id]
    admitted_s = next((event.monotonic_s for event in own if event.kind == "admitted"), last.monotonic_s)
    total_s = last.monotonic_s - start.monotonic_s
    parked_s = sum(event.monotonic_s - event.data["start_s"] for event in own if event.kind == "parked")
    admission_s = admitted_s - start.monotonic_s + parked_s
    inference_s = sum(event.monotonic_s - event.data["start_s"] for event in generations)
    seconds = [use.seconds() or (None, None) for use in actions]
    slot_queue_s, environment_s = total([waited for waited, _ in seconds]), total([ran for _, ran in seconds])
    acting_s = total([slot_queue_s, environment_s])
    if acting_s is None:
        acting_s = sum(use.elapsed_s for use in actions)
    phases = _inference_phases(generations)
    inside_s = inference_s if phases is None else sum(phases)
    queue_s, prefill_s, recomputation_s, decode_s = phases or (None, None, None, None)
    return LastChain(
        trajectory_id=last.trajectory_id,
        turns=last.data["turns"],
        total=total_s,
        admission=admission_s,
        inference=inference_s,
        replica_queue=queue_s,
        prefill=prefill_s,
        recomputation=recomputation_s,
        decode=decode_s,
        slot_queue=slot_queue_s,
        environment=environment_s,
        overhead=total_s - admission_s - inside_s - acting_s,
    )


def _inference_phases(generations: list[Event]) -> tuple[float, float, float, float] | None:
    """(queue, prefill, recomputation, decode) in seconds; None as soon as one figure was not measured."""
    queue_s = prefill_s = recomputation_s = decode_s = 0.0
    for event in generations:
        data: dict[str, Any] = event.data
        measured = (data["queue_s"], data["prefill_s"], data["decode_s"], data["recomputed_tokens"])
        if any(value is None for value in measured):
            return None
        computed_tokens = data["prompt_tokens"] - data["cached_tokens"]
        again_s = data["prefill_s"] * data["recomputed_tokens"] / computed_tokens if computed_tokens else 0.0
        queue_s += data["queue_s"]
        prefill_s += data["prefill_s"] - again_s
        recomputation_s += again_s
        decode_s += data["decode_s"]
    return queue_s, prefill_s, recomputation_s, decode_s
