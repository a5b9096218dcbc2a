"""Coding regimes: batches drawn from recorded sessions, which are not shipped (`makespan.rollout.replay.sessions`).

Chains are the recorded sessions, whole or cut where a person took over. They are sorted by length, and a drawn chain is
the one at the quantile of its `z`, so that siblings are alike in length and everything else is as recorded.
"""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.replay.sessions import ASSUMPTIONS, TOOL_USE, SessionStep, read_sessions, session_turns
from makespan.rollout.replay.trace import Trace, TraceHeader, TraceTrajectory
from makespan.rollout.simulation.regimes import CHAINS, GROUP_SIZE, RHO, draw_chains

FIRST_PROMPT_TOKENS = 12_000
"""Recorded first prompts are those of sessions that go on from earlier ones (median above 70k); a task's is shorter."""
OBSERVATION_CLIP = (20, 6000)
RESET_S = 10.0


class CodingRegime(msgspec.Struct, frozen=True, kw_only=True):
    """How chains are made of sessions."""

    name: str
    segments: bool = False
    """Cut after every turn that did not stop for a tool: a chain is what an agent does without a person."""
    max_turns: int | None = None


CODING: dict[str, CodingRegime] = {
    regime.name: regime
    for regime in (
        CodingRegime(name="coding-sessions"),
        CodingRegime(name="coding-segments", segments=True),
        CodingRegime(name="coding-sessions-cap60", max_turns=60),
    )
}
"""The coding regimes by name."""

Chains = tuple[tuple[SessionStep, ...], ...]


def coding_chains(regime: CodingRegime, path: Path) -> Chains:
    """All chains of a file of sessions, sorted by length. Raises `FormatError`."""
    chains: list[tuple[SessionStep, ...]] = []
    for session in read_sessions(path):
        if not regime.segments:
            chains.append(session.steps[: regime.max_turns])
            continue
        begin = 0
        for number, step in enumerate(session.steps, start=1):
            if step.stop != TOOL_USE or number == len(session.steps):
                chains.append(session.steps[begin:number])
                begin = number
    if not chains:
        raise FormatError(f"{path}: no session in it")
    return tuple(sorted((chain for chain in chains if chain), key=len))


def generate_coding(
    regime: CodingRegime,
    source: Chains,
    seed: int,
    *,
    chains: int = CHAINS,
    group_size: int = GROUP_SIZE,
    rho: float = RHO,
    epoch: int = 0,
) -> Trace:
    """A batch of `chains` chains drawn from `source`; the same seed and epoch give the same batch, the same seed the
    same prompts."""
    numbers: dict[str, int] = {}
    trajectories = []
    normal = NormalDist()
    for group, draw in draw_chains(seed, chains, group_size, rho, epoch):
        number = numbers[group] = numbers.get(group, -1) + 1
        steps = source[min(len(source) - 1, int(normal.cdf(draw.z) * len(source)))]
        turns = session_turns(steps, observation_clip=OBSERVATION_CLIP, first_prompt_tokens=FIRST_PROMPT_TOKENS)
        trajectories.append(
            TraceTrajectory(
                trajectory_id=f"{group}#{number}",
                task_id=group,
                group=group,
                turns=turns,
                reset_s=RESET_S * draw.environment_scale,
                max_turns=regime.max_turns,
            )
        )
    name = f"regime {regime.name}, seed {seed}, {chains} chains in groups of {group_size}, correlation {rho}"
    return Trace(TraceHeader(source=name, assumptions=ASSUMPTIONS), tuple(trajectories))
