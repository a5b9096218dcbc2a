"""`Recorder`: a trace out of any run's event log, live or simulated.

What is kept is what a replay needs: lengths, the seconds that actions ran (never how long they waited), what starting
took, the caps and the reward. Waiting, caching and the replica's speed are the run's, not the work's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.replay.plan import UNLIMITED
from makespan.rollout.replay.trace import Trace, TraceError, TraceHeader, TraceTrajectory, TraceTurn, check, write_trace
from makespan.rollout.telemetry.events import Event
from makespan.rollout.telemetry.merge import MergedLog
from makespan.rollout.trajectory import TrajectoryResult

_KEPT = ("finished", "truncated")


class Recorder:
    """Turns one merged log into a trace.

    Trajectories that did not end by themselves (failed, cancelled, still running) are left out and counted by state;
    so are those whose context did not grow turn by turn (`inconsistent`).
    """

    def __init__(self, log: MergedLog, source: str = "") -> None:
        self._log = log
        self._source = source
        self._dropped: dict[str, int] = defaultdict(int)

    def write(self, path: Path) -> Trace:
        """Write the trace to a file, gzipped if it is named so, and give it back."""
        trace = self.trace()
        write_trace(path, trace)
        return trace

    def trace(self) -> Trace:
        """The trace, in the order in which the trajectories were submitted. Raises `FormatError` without a batch."""
        start = next(self._log.of("batch_start"), None)
        if start is None:
            raise FormatError("the event log holds no batch: there is nothing to record")
        by_trajectory: dict[str, list[Event]] = defaultdict(list)
        for _, event in self._log.events:
            if event.trajectory_id:
                by_trajectory[event.trajectory_id].append(event)
        trajectories = []
        for submitted in self._log.of("submitted"):
            recorded = self._trajectory(submitted, by_trajectory[submitted.trajectory_id], start)
            if recorded is not None:
                trajectories.append(recorded)
        return Trace(TraceHeader(source=self._source, dropped=dict(self._dropped)), tuple(trajectories))

    def _trajectory(self, submitted: Event, events: list[Event], start: Event) -> TraceTrajectory | None:
        of: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            if event.kind == "restarted":  # what came before led nowhere
                of = defaultdict(list, admitted=of["admitted"])
            else:
                of[event.kind].append(event)
        state = of["ended"][-1].data["state"] if of["ended"] else "running"
        if state not in _KEPT or not of["generate"] or not of["reset"]:
            self._dropped[state if state not in _KEPT else "without a turn"] += 1
            return None
        recorded = TraceTrajectory(
            trajectory_id=submitted.trajectory_id,
            task_id=submitted.data["task_id"],
            group=submitted.data["group"],
            turns=_turns(of["generate"], of["act"], of["admitted"][0].monotonic_s),
            reset_s=of["reset"][-1].data["service_s"],
            max_turns=_cap(start, "max_turns"),
            max_tokens=_cap(start, "max_context_tokens"),
            reward=of["ended"][-1].data["reward"],
        )
        try:
            check(recorded)
        except TraceError:
            self._dropped["inconsistent"] += 1
            return None
        return recorded


def _cap(start: Event, name: str) -> int | None:
    value = start.data.get(name)
    return None if value is None or value >= UNLIMITED else int(value)


def _turns(generations: list[Event], actions: list[Event], admitted_s: float) -> tuple[TraceTurn, ...]:
    action_of = {event.data["turn"]: event for event in actions}
    turns = []
    for event, following in zip(generations, [*generations[1:], None], strict=True):
        data = event.data
        observation = 0
        if following is not None:
            observation = following.data["prompt_tokens"] - data["prompt_tokens"] - data["generated_tokens"]
        action = action_of.get(data["turn"])
        turns.append(
            TraceTurn(
                prompt_tokens=data["prompt_tokens"],
                generated_tokens=data["generated_tokens"],
                observation_tokens=observation,
                environment_s=action.data["service_s"] if action is not None and action.data["slot_class"] else None,
                cached_tokens=data["cached_tokens"],
                start_s=data["start_s"] - admitted_s,
            )
        )
    return tuple(turns)


def with_ids(trace: Trace, results: Iterable[TrajectoryResult]) -> Trace:
    """A recorded trace with the token ids that its environments gave, out of the batch's results.

    A log has lengths alone, and so does not tell which prompts begin alike (a system prompt that all tasks share, say),
    which decides what a cache is worth. What the agent said stays out: a replay generates anew.
    """
    given = {
        result.trajectory_id: [list(segment.token_ids) for segment in result.segments if not segment.generated]
        for result in results
    }
    return Trace(trace.header, tuple(_with_ids(one, given.get(one.trajectory_id, [])) for one in trace.trajectories))


def _with_ids(recorded: TraceTrajectory, given: list[list[int]]) -> TraceTrajectory:
    """`given`: the first prompt and the observations in order; one more of those may stand after the last turn."""
    if not given:
        return recorded
    prompt_ids, *observations = given
    turns = [
        msgspec.structs.replace(turn, observation_ids=ids)
        for turn, ids in zip(recorded.turns[:-1], observations, strict=False)
    ]
    rest = recorded.turns[len(turns) :]
    return msgspec.structs.replace(recorded, prompt_ids=prompt_ids, turns=(*turns, *rest))
