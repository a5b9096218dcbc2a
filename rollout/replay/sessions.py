"""Recorded coding sessions: `{"id", "steps": [{"prompt_tokens", "completion_tokens", "gap_s", "stop", …}]}` a line.

`gap_s` is the time between the end of the previous turn's inference and this turn's request: the environment's when the
previous turn stopped for a tool (`stop` is `tool_use`), a person's when it had ended its turn (`end_turn`). A person is
no environment, so that time is left out; and a long gap after a tool can hide a person who had to approve it, so gaps
are capped. What is assumed is in the header of every trace that is made of sessions (`ASSUMPTIONS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.replay.growth import Recorded, grown
from makespan.rollout.replay.trace import TraceError, TraceTrajectory, TraceTurn, read_lines

TOOL_USE = "tool_use"

GAP_CAP_S = 30.0
"""Longest time that a tool is believed to have run; the median gap is 9 s, and 1% are above 10 minutes."""
AFTER_END_TURN_S = 0.5
"""Stands for a person's thinking between two turns of a session."""

ASSUMPTIONS = (
    f"the gap after a turn that stopped for a tool is its environment time, at most {GAP_CAP_S:g} s",
    f"the gap after any other turn was a person's, and counts {AFTER_END_TURN_S} s; so does one that was not recorded",
    "an observation is what the next prompt gained beyond the completion; one that shrank (compaction) gains nothing",
    "a completion of 0 tokens counts as 1",
    "each session is a task of its own, and starting its environment takes no time",
)


class SessionStep(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a session; lengths in tokens."""

    prompt_tokens: int
    completion_tokens: int
    gap_s: float | None
    """None: not recorded."""
    stop: str
    inference_s: float | None = None


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded session."""

    id: str
    steps: tuple[SessionStep, ...]


def session_turns(
    steps: Sequence[SessionStep],
    *,
    observation_clip: tuple[int, int] = (0, 1 << 40),
    first_prompt_tokens: int = 1 << 40,
) -> tuple[TraceTurn, ...]:
    """The turns of consecutive steps. Raises `TraceError`."""
    for number, step in enumerate(steps):
        if step.gap_s is not None and not step.gap_s >= 0:
            raise TraceError(f"steps[{number}].gap_s", f"time goes backwards: {step.gap_s} s")
    recorded = []
    for number, step in enumerate(steps):
        seconds = None
        if number + 1 < len(steps):
            gap_s = steps[number + 1].gap_s
            seconds = AFTER_END_TURN_S if gap_s is None or step.stop != TOOL_USE else min(GAP_CAP_S, gap_s)
        recorded.append(
            Recorded(
                prompt_tokens=step.prompt_tokens,
                generated_tokens=1 if step.completion_tokens == 0 else step.completion_tokens,
                environment_s=seconds,
            )
        )
    return grown(
        recorded,
        fields=("prompt_tokens", "completion_tokens"),
        turns_field="steps",
        observation_clip=observation_clip,
        first_prompt_tokens=first_prompt_tokens,
    )


def parse_session(line: bytes) -> list[TraceTrajectory]:
    """A line as a trajectory."""
    session = msgspec.json.decode(line, type=Session)
    turns = session_turns(session.steps)
    return [TraceTrajectory(trajectory_id=session.id, task_id=session.id, group=session.id, turns=turns)]


def read_sessions(path: Path) -> list[Session]:
    """All sessions of a file, plain or gzipped. Raises `FormatError` naming the line."""
    sessions = []
    for number, line in read_lines(path):
        try:
            sessions.append(msgspec.json.decode(line, type=Session))
        except msgspec.MsgspecError as error:
            raise FormatError(f"{path}, line {number}: {error}") from error
    return sessions
