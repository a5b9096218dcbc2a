"""What a workload asks of memory: how contexts grow, how much is generated, how long environments take.

A profile is a sample of trajectories, each a list of turns with lengths and times. It comes from a trace, from the
event log of a recorded step (which `rollout/replay/importers.py` reads as one), or from a few numbers.
"""

from __future__ import annotations

import random
import statistics

import msgspec

from makespan.rollout.replay.trace import Trace
from makespan.rollout.resources.shape import ResourceError

SAMPLE = 256
"""Trajectories kept of a larger trace: enough for means, few enough to simulate in seconds."""


class ProfileTurn(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One turn: lengths in tokens, then the environment's time."""

    new_tokens: int
    """Of the prompt, beyond what the trajectory already holds."""
    generated_tokens: int
    environment_s: float


Turns = tuple[ProfileTurn, ...]


class WorkloadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A sample of trajectories."""

    source: str
    trajectories: tuple[Turns, ...]
    group_size: float = 1.0
    """Trajectories a prompt, in the mean."""
    may_be_cut: float = 0.0
    """The share of trajectories that may be cut at a model's context: none of a trace, and of what is drawn from a few
    numbers the long end of the draw."""

    @property
    def contexts_tokens(self) -> list[int]:
        """The context at the end of each turn, of all trajectories together: long trajectories count more, as they are
        there longer."""
        return [context for turns in self.trajectories for context in contexts(turns)]

    @property
    def longest_tokens(self) -> int:
        """The longest context."""
        return max(self.contexts_tokens)

    def within(self, max_context_tokens: int) -> WorkloadProfile:
        """The same workload in a model's context: a trajectory ends before the turn that would outgrow it, as in a
        run, and at least a first turn with a shorter prompt is left of it.

        Raises `ResourceError` where more than `may_be_cut` of the trajectories would have to be cut.
        """
        over = [turns for turns in self.trajectories if contexts(turns)[-1] > max_context_tokens]
        if len(over) > self.may_be_cut * len(self.trajectories):
            raise ResourceError(
                f"{self.source}: {len(over)} of {len(self.trajectories)} trajectories outgrow the model's context of "
                f"{max_context_tokens:,} tokens, the longest by {self.longest_tokens - max_context_tokens:,}; cap the "
                "trajectories or take a model with a longer context"
            )
        if not over:
            return self
        return msgspec.structs.replace(
            self,
            source=f"{self.source}; {len(over)} of {len(self.trajectories)} trajectories end at the model's context",
            trajectories=tuple(_cut(turns, max_context_tokens) for turns in self.trajectories),
        )

    def summary(self) -> dict[str, float]:
        """Figures for people."""
        turns = [turn for one in self.trajectories for turn in one]
        ends = [contexts(one)[-1] for one in self.trajectories]
        return {
            "trajectories": len(self.trajectories),
            "turns_mean": len(turns) / len(self.trajectories),
            "generated_tokens_mean": statistics.fmean(turn.generated_tokens for turn in turns),
            "context_tokens_mean": statistics.fmean(self.contexts_tokens),
            "context_tokens_end_mean": statistics.fmean(ends),
            "context_tokens_longest": self.longest_tokens,
            "environment_s_mean": statistics.fmean(turn.environment_s for turn in turns),
            "group_size": self.group_size,
        }


def contexts(turns: Turns) -> list[int]:
    """A trajectory's context at the end of each of its turns."""
    held, ends = 0, []
    for turn in turns:
        held += turn.new_tokens + turn.generated_tokens
        ends.append(held)
    return ends


def _cut(turns: Turns, limit_tokens: int) -> Turns:
    """The turns that end within so many tokens; the last one leads to no action."""
    kept = tuple(turn for turn, end in zip(turns, contexts(turns), strict=True) if end <= limit_tokens)
    if kept:
        return (*kept[:-1], msgspec.structs.replace(kept[-1], environment_s=0.0))
    generated = min(turns[0].generated_tokens, max(1, limit_tokens // 2))
    first = msgspec.structs.replace(
        turns[0], new_tokens=max(1, limit_tokens - generated), generated_tokens=generated, environment_s=0.0
    )
    return (first,)


def from_trace(trace: Trace, source: str, *, sample: int = SAMPLE, seed: int = 0) -> WorkloadProfile:
    """The profile of a trace; of a larger one a random sample."""
    chosen = list(trace.trajectories)
    if len(chosen) > sample:
        chosen = random.Random(seed).sample(chosen, sample)
    trajectories = []
    for trajectory in chosen:
        turns, held = [], 0
        for turn in trajectory.turns:
            turns.append(
                ProfileTurn(
                    new_tokens=turn.prompt_tokens - held,
                    generated_tokens=turn.generated_tokens,
                    environment_s=turn.environment_s or 0.0,
                )
            )
            held = turn.prompt_tokens + turn.generated_tokens
        trajectories.append(tuple(turns))
    groups = {trajectory.group for trajectory in trace.trajectories}
    size = len(trace.trajectories) / max(1, len(groups))
    return WorkloadProfile(source=source, trajectories=tuple(trajectories), group_size=size)


def from_numbers(
    *,
    prompt_tokens: int = 2_000,
    turns: int = 20,
    generated_tokens: int = 200,
    observation_tokens: int = 500,
    environment_s: float = 2.0,
    spread: float = 0.5,
    group_size: float = 8.0,
    sample: int = 64,
    seed: int = 0,
) -> WorkloadProfile:
    """A profile from a few numbers: means of what each turn adds, and the mean number of turns.

    `spread` is the standard deviation of the logarithm of each length and time (0: all alike). The defaults are of no
    workload in particular; trajectories of software repair have about these lengths.

    Raises `ResourceError` for numbers that cannot be.
    """
    for name, value in (("prompt", prompt_tokens), ("turns", turns), ("generated", generated_tokens)):
        if value < 1:
            raise ResourceError(f"a workload's {name} must be at least 1, not {value}")
    if observation_tokens < 0 or environment_s < 0 or spread < 0:
        raise ResourceError("a workload's observation, environment time and spread must be 0 or more")
    rng = random.Random(seed)

    def drawn(mean: float) -> float:
        return mean * rng.lognormvariate(-spread * spread / 2, spread)

    trajectories = []
    for _ in range(sample):
        count = max(1, round(drawn(turns)))
        trajectories.append(
            tuple(
                ProfileTurn(
                    new_tokens=max(1, round(drawn(observation_tokens if turn else prompt_tokens))),
                    generated_tokens=max(1, round(drawn(generated_tokens))),
                    environment_s=drawn(environment_s) if turn + 1 < count else 0.0,
                )
                for turn in range(count)
            )
        )
    return WorkloadProfile(
        source="a few numbers", trajectories=tuple(trajectories), group_size=group_size, may_be_cut=0.5
    )


def unspecified() -> WorkloadProfile:
    """The workload of `from_numbers` by default, which nobody asked for: it fits into every context."""
    return msgspec.structs.replace(from_numbers(), source="a default workload", may_be_cut=1.0)
