"""What earlier steps taught: lengths, costs, and what each prompt's chains were like.

A training run repeats nearly the same work step after step, so the last step says how long chains are. What it says
ages: each step's lengths count for `STEP_DECAY` of the next one's, and a step whose weight has fallen under 5% is
dropped, so a policy that learns to be brief is believed within a step or two. Prompts come back once an epoch; their
record counts as at most `PROMPT_SIBLINGS` siblings, the newer the more, and it is used only where last time it ranked
the prompts right (`prompt_correlation`, and apart from it `prompt_cost_correlation` for what a turn takes).

`History` is one JSON document. It is written to a new file that replaces the old one, so a kill leaves one or the
other.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from makespan.rollout.errors import FormatError
from makespan.rollout.forecast import PRIOR_CORRELATION, rank_correlation, sibling_correlation

HISTORY_VERSION = 1

STEP_DECAY = 0.2
"""Weight of a step's lengths in the step after the next: the last one decides, the ones before steady it."""
FORGOTTEN = 0.05
PROMPT_SIBLINGS = 8.0
"""As how many siblings a prompt's record counts at most: one group of eight, the field's usual size."""
PROMPTS = 100_000
"""Records kept, the most recently seen: some 10 MB."""
MIN_PROMPTS = 8
"""Fewer prompts that were seen before say nothing of whether their records predict."""
COSTS_PREDICTED = 0.5
"""Records tell what a turn takes if their rank correlation exceeds this: it is 0.8 to 0.95 on `swe`, whose prompts
differ by it, and −0.2 to 0.2 on `coding-sessions-cap60`, whose do not (32 prompts)."""


class ChainRecord(msgspec.Struct, frozen=True):
    """A chain that is over."""

    group: str
    turns: int
    inference_s: float
    """Of all its turns, waiting at the replicas included."""
    environment_s: float
    tokens: int
    """By which its context grew after the first prompt."""


class PromptRecord(msgspec.Struct):
    """What a prompt's chains were like: as how many siblings that counts, and their mean log length and step cost."""

    chains: float
    log_turns: float
    turn_s: float


class StepLengths(msgspec.Struct):
    """How many chains of a step had each length."""

    weight: float
    counts: dict[int, float]


class History(msgspec.Struct, kw_only=True):
    """The memory of a job. `learn` is its only way to change."""

    version: int = HISTORY_VERSION
    steps: list[StepLengths] = []
    """The newest first."""
    correlation: float = PRIOR_CORRELATION
    """Of siblings' log lengths, in the last step that had siblings."""
    turn_s: float | None = None
    """Inference and environment of one turn, mean of the last step; None before the first."""
    action_s: float | None = None
    """Environment seconds of one turn, mean of the last step."""
    turn_tokens: float | None = None
    """By which a turn lengthens the context, mean of the last step."""
    prompts: dict[str, PromptRecord] = {}
    prompt_correlation: float | None = None
    """Rank correlation between what the prompts' records said of lengths and what came, last time; None: never
    measured."""
    prompt_cost_correlation: float | None = None
    """The same of the seconds that a turn takes."""

    def learn(self, chains: Iterable[ChainRecord]) -> None:
        """A step is over: its chains replace what is older."""
        chains = [chain for chain in chains if chain.turns > 0]
        if not chains:
            return
        turns = sum(chain.turns for chain in chains)
        environment_s = sum(chain.environment_s for chain in chains)
        self.turn_s = (sum(chain.inference_s for chain in chains) + environment_s) / turns
        self.action_s = environment_s / turns
        self.turn_tokens = sum(chain.tokens for chain in chains) / turns
        for step in self.steps:
            step.weight *= STEP_DECAY
        counts: dict[int, float] = {}
        for chain in chains:
            counts[chain.turns] = counts.get(chain.turns, 0.0) + 1.0
        self.steps = [StepLengths(1.0, counts), *(step for step in self.steps if step.weight >= FORGOTTEN)]
        groups: dict[str, list[ChainRecord]] = {}
        for chain in chains:
            groups.setdefault(chain.group, []).append(chain)
        if len(groups) < len(chains):
            numbers = {group: number for number, group in enumerate(groups)}
            self.correlation = sibling_correlation(
                np.array([numbers[chain.group] for chain in chains]), np.log([float(chain.turns) for chain in chains])
            )
        self._learn_prompts(groups)

    def _learn_prompts(self, groups: Mapping[str, list[ChainRecord]]) -> None:
        seen = [group for group in groups if group in self.prompts]
        turn_seconds = {group: _turn_s(chains) for group, chains in groups.items()}
        log_turns = {g: float(np.mean(np.log([chain.turns for chain in chains]))) for g, chains in groups.items()}
        if len(seen) >= MIN_PROMPTS:
            said = np.array([self.prompts[group].log_turns for group in seen])
            self.prompt_correlation = rank_correlation(said, np.array([log_turns[group] for group in seen]))
            said = np.array([self.prompts[group].turn_s for group in seen])
            self.prompt_cost_correlation = rank_correlation(said, np.array([turn_seconds[group] for group in seen]))
        for group, chains in groups.items():
            count, turn_s = float(len(chains)), turn_seconds[group]
            old = self.prompts.pop(group, None)
            if old is not None:
                kept = max(0.0, min(old.chains, PROMPT_SIBLINGS - count))
                log_turns[group] = (kept * old.log_turns + count * log_turns[group]) / (kept + count)
                turn_s = (kept * old.turn_s + count * turn_s) / (kept + count)
                count += kept
            self.prompts[group] = PromptRecord(min(count, PROMPT_SIBLINGS), log_turns[group], turn_s)
        for group in list(self.prompts)[: max(0, len(self.prompts) - PROMPTS)]:
            del self.prompts[group]

    def predicts(self) -> bool:
        """Whether prompts' records ranked the last step's prompts by their lengths."""
        return (self.prompt_correlation or 0.0) > 0.0

    def predicts_costs(self) -> bool:
        """Whether prompts' records ranked the last step's prompts by what a turn takes, beyond doubt."""
        return (self.prompt_cost_correlation or 0.0) > COSTS_PREDICTED


def _turn_s(chains: Sequence[ChainRecord]) -> float:
    """Seconds of a turn, their mean over all turns."""
    return sum(chain.inference_s + chain.environment_s for chain in chains) / sum(chain.turns for chain in chains)


def read_history(path: Path) -> History:
    """A job's history; an empty one where there is no file yet. Raises `FormatError` for a file that is not one."""
    try:
        document = path.read_bytes()
    except FileNotFoundError:
        return History()
    except OSError as error:
        raise FormatError(f"cannot read the history {str(path)!r}: {error.strerror}") from error
    try:
        history = msgspec.json.decode(document, type=History)
    except msgspec.MsgspecError as error:
        message = f"{path} is not a history of earlier steps ({error}): name another file, or delete this one"
        raise FormatError(message) from error
    if history.version != HISTORY_VERSION:
        raise FormatError(
            f"{path}: history of version {history.version}; this makespan reads {HISTORY_VERSION}: name another file"
        )
    return history


def write_history(path: Path, history: History) -> None:
    """Replace the file by a new one, whole. Raises `OSError` where that cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(msgspec.json.encode(history))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
