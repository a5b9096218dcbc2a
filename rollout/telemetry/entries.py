"""What the engine writes into its log of a trajectory: one function an entry, so each shape stands in one place."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import msgspec

from makespan.rollout.coordinator import RERANK_DISPATCHES, Outlook
from makespan.rollout.environment import ActionTiming
from makespan.rollout.replicas.base import Completion
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.trajectory import Trajectory


def inference(
    events: EventLog, trajectory: Trajectory, turn: int, replica_id: str, completion: Completion, start_s: float
) -> None:
    """A turn was generated. To be written before the completion joins the context."""
    cached, prompt_tokens = completion.cached_tokens, len(trajectory.context_ids)
    computed_tokens = min(trajectory.computed_tokens, prompt_tokens)  # a context may have dropped some of its history
    events.emit(
        "generate",
        trajectory.trajectory_id,
        turn=turn,
        replica=replica_id,
        start_s=start_s,
        prompt_tokens=prompt_tokens,
        generated_tokens=len(completion.token_ids),
        cached_tokens=cached,
        recomputed_tokens=None if cached is None else max(0, computed_tokens - cached),
        preemptions=completion.preemptions,
        queue_s=completion.queue_s,
        prefill_s=completion.prefill_s,
        decode_s=completion.decode_s,
    )


def action(
    events: EventLog,
    kind: str,
    trajectory: Trajectory,
    timing: ActionTiming,
    start_s: float,
    turn: int,
    key: float,
    why: Outlook | None = None,
) -> None:
    """The environment was reset (`kind` is `reset`) or an action ran (`act`).

    `key` is what the action was submitted with, and `why` the forecast that it was made from, where there is one.
    """
    events.emit(
        kind,
        trajectory.trajectory_id,
        turn=turn,
        start_s=start_s,
        slot_class=timing.slot_class,
        queue_s=timing.queue_s,
        service_s=timing.service_s,
        outcome="ok",
        key=key,
        **({} if why is None else {"why": msgspec.to_builtins(why)}),
        **({} if timing.grant is None else {"grant": msgspec.to_builtins(timing.grant)}),
    )


RANKED = 2 * RERANK_DISPATCHES
"""How many of a pass's keys are logged: until the next pass is due only half as many are granted by rank, and the rest
of a long queue would fill the log and explain nothing."""


def rekeyed(events: EventLog, keys: Mapping[str, float], why: Callable[[str], Outlook | None]) -> None:
    """A pass gave the waiting actions new keys: the smallest ones and their reasons."""
    first = heapq.nsmallest(RANKED, keys, key=keys.__getitem__)
    events.emit("rekey", waiting=len(keys), first={name: msgspec.to_builtins(why(name)) for name in first})


def failed_action(events: EventLog, kind: str, trajectory: Trajectory, outcome: str, start_s: float, turn: int) -> None:
    """A reset or an action did not succeed; `outcome` is the kind of failure, or `cancelled`.

    How long it waited and ran is not told to the engine: the broker's log has it.
    """
    events.emit(
        kind,
        trajectory.trajectory_id,
        turn=turn,
        start_s=start_s,
        slot_class=f"{trajectory.task.environment}.{'start' if kind == 'reset' else 'step'}",
        queue_s=None,
        service_s=None,
        outcome=outcome,
    )


def end(events: EventLog, trajectory: Trajectory) -> None:
    """A trajectory reached its terminal state."""
    result = trajectory.result()
    events.emit(
        "ended",
        trajectory.trajectory_id,
        state=result.state.value,
        reward=result.reward,
        turns=len(result.turns),
        generated_tokens=trajectory.generated_tokens,
        context_tokens=len(trajectory.context_ids),
        restarts=trajectory.restarts,
        failure=None if result.failure is None else msgspec.structs.asdict(result.failure),
    )
