"""Sessions of the `agentic-bench` package (`abench-session-jsonl-v1`): one JSON object a line.

Only lengths and times are read: `{"session_id", "source": {…}, "turns": [{"input_tokens", "output_tokens",
"cached_tokens", "pre_gap_ms"}, …]}`, where `pre_gap_ms` is the wait for tools before a turn. Its published files are
compressed with Zstandard: unpack them first.
"""

from __future__ import annotations

import msgspec

from makespan.rollout.replay.growth import Recorded, grown
from makespan.rollout.replay.trace import TraceError, TraceTrajectory

GAP_CAP_S = 30.0
"""The cap that agentic-bench itself replays with."""

ASSUMPTIONS = (
    f"the gap before a turn is the environment time of the turn before it, at most {GAP_CAP_S:g} s",
    "an observation is what the next prompt gained beyond the output; a prompt that shrank gains nothing",
    "each session is a task of its own, and starting its environment takes no time",
)


class AbenchTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn; lengths in tokens."""

    input_tokens: int
    output_tokens: int
    pre_gap_ms: float = 0.0
    cached_tokens: int | None = None


class AbenchSession(msgspec.Struct, frozen=True, kw_only=True):
    """One session, without its texts."""

    session_id: str
    turns: tuple[AbenchTurn, ...]


def parse_session(line: bytes) -> list[TraceTrajectory]:
    """A line as a trajectory. Raises `TraceError`."""
    session = msgspec.json.decode(line, type=AbenchSession)
    for number, turn in enumerate(session.turns):
        if not turn.pre_gap_ms >= 0:
            raise TraceError(f"turns[{number}].pre_gap_ms", f"time goes backwards: {turn.pre_gap_ms} ms")
    gaps_s = [min(GAP_CAP_S, turn.pre_gap_ms / 1000) for turn in session.turns[1:]]
    recorded = [
        Recorded(
            prompt_tokens=turn.input_tokens,
            generated_tokens=turn.output_tokens,
            environment_s=seconds,
            cached_tokens=turn.cached_tokens,
        )
        for turn, seconds in zip(session.turns, [*gaps_s, None], strict=False)
    ]
    turns = grown(recorded, fields=("input_tokens", "output_tokens"))
    name = session.session_id
    return [TraceTrajectory(trajectory_id=name, task_id=name, group=name, turns=turns)]
