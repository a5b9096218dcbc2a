"""What a job knows before a simulated batch: its last step, and perhaps earlier epochs of the same prompts.

A step's history is what the coordinator would have kept of it, with the times that its chains take alone: waiting,
which differs between policies, is left out, so that every policy begins with the same knowledge.
"""

from __future__ import annotations

from makespan.rollout.history import ChainRecord, History
from makespan.rollout.replay.trace import Trace
from makespan.rollout.simulation.cost import InferenceCost

LAST_STEP = "last-step/"
"""Prefixed to the groups of the last step: it had other prompts."""


def chain_records(trace: Trace, cost: InferenceCost, prefix: str = "") -> list[ChainRecord]:
    """The chains of a trace as the coordinator keeps them."""
    records = []
    for chain in trace.trajectories:
        inference_s, computed = 0.0, 0
        for turn in chain.turns:
            inference_s += cost.alone_s(turn.prompt_tokens - computed, turn.prompt_tokens, turn.generated_tokens)
            computed = turn.prompt_tokens + turn.generated_tokens - 1
        first, last = chain.turns[0], chain.turns[-1]
        grown = last.prompt_tokens + last.generated_tokens - first.prompt_tokens - first.generated_tokens
        environment_s = sum(turn.environment_s or 0.0 for turn in chain.turns)
        records.append(ChainRecord(prefix + chain.group, len(chain.turns), inference_s, environment_s, grown))
    return records


def history(last_step: Trace, cost: InferenceCost, epochs: tuple[Trace, Trace] | None = None) -> History:
    """The memory of a job that has just run `last_step`.

    Args:
        epochs: two earlier batches of the prompts that come next, the older first: from two it can be told whether a
            prompt's record predicts.
    """
    memory = History()
    for epoch in epochs or ():
        memory.learn(chain_records(epoch, cost))
    memory.steps = []  # an epoch ago is long ago: its lengths count for nothing any more
    memory.learn(chain_records(last_step, cost, LAST_STEP))
    return memory
