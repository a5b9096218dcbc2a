"""Ways to keep the cache, judged by what they cost the workload.

Three settings of `align` differ in what the next turn finds and in how many blocks they turn over: the default keeps
the state at the last whole block of the prompt; `prefix_match_unit` keeps one nearer to the prompt's end, for one more
state a group and turn; retention of everything also keeps those of generated tokens. A candidate's score is what it
computes at the reference concurrency. The block pool's model plays the whole sample; vLLM's own scheduler, where there
is one, plays a smaller batch in a pool that is as scarce, and its word counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from makespan.rollout.resources import pool
from makespan.rollout.resources.footprint import CacheSettings, ModelFootprint
from makespan.rollout.resources.profile import Turns, contexts
from makespan.rollout.resources.vllm_wire import Play, Played
from makespan.rollout.simulation.cost import InferenceCost

WORTH = 0.97
"""A candidate replaces vLLM's default when it computes less than this share of the tokens: fewer knobs are better."""

SMALL_CONCURRENCY = 4
SMALL_TOKENS = 3_000
"""Size of the batch that vLLM's scheduler plays: enough to be scarce, a second or two of its time."""

MATCH_UNIT_TOKENS = 64
"""The finest unit that is proposed: finer ones cost hashing and find little more."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One setting and what it would do."""

    name: str
    settings: CacheSettings
    computed_tokens: int
    """Prompt tokens that the sample computes at the reference concurrency, by the pool's model."""
    cached_share_of_prompts: float
    scheduler_computed_tokens: int | None = None
    """What vLLM's own scheduler computed of the small batch; None: it was not asked, or did not get through it."""
    chosen: bool = False


def settings_of(footprint: ModelFootprint) -> dict[str, CacheSettings]:
    """The candidates for a model, the default first."""
    base = footprint.settings
    candidates = {"default": base}
    if base.mamba_cache_mode != "align" or not footprint.recurrent_groups:
        return candidates
    if base.match_unit is not None or base.retain_all:
        return candidates
    unit = match_unit(footprint.block_tokens)
    if unit is not None:
        candidates[f"prefix_match_unit={unit}"] = msgspec.structs.replace(base, match_unit=unit)
    candidates["prefix_cache_retention_interval=None"] = msgspec.structs.replace(base, retain_all=True)
    return candidates


def match_unit(block_tokens: int) -> int | None:
    """The coarsest divisor of a block that is at most `MATCH_UNIT_TOKENS`, a multiple of 16; None where the block is no
    larger than that."""
    if block_tokens <= MATCH_UNIT_TOKENS:
        return None
    return next((unit for unit in range(MATCH_UNIT_TOKENS, 15, -16) if block_tokens % unit == 0), None)


def score(
    footprint: ModelFootprint,
    candidates: dict[str, CacheSettings],
    num_blocks: int,
    sample: Sequence[Turns],
    concurrency: int,
    cost: InferenceCost,
) -> list[Candidate]:
    """What the pool's model says of each."""
    scored = []
    for name, settings in candidates.items():
        found = msgspec.structs.replace(footprint, settings=settings)
        outcome = pool.play(found, num_blocks, pool.batch(sample, concurrency), concurrency, cost)
        scored.append(
            Candidate(
                name=name,
                settings=settings,
                computed_tokens=outcome.prompt_tokens - outcome.cached_tokens,
                cached_share_of_prompts=outcome.cached_tokens / outcome.prompt_tokens,
            )
        )
    return scored


def small_plays(
    footprint: ModelFootprint,
    candidates: dict[str, CacheSettings],
    sample: Sequence[Turns],
    blocks_a_trajectory: float,
    cost: InferenceCost,
    limit_s: float,
) -> list[Play]:
    """The batch that vLLM's scheduler plays for every candidate: the sample's first trajectories, with as many blocks
    each as at the reference concurrency."""
    chosen: list[Turns] = []
    generated = 0
    for turns in sample:
        tokens = sum(turn.generated_tokens for turn in turns)
        if chosen and (generated + tokens > SMALL_TOKENS or len(chosen) == pool.WAVES * SMALL_CONCURRENCY):
            break
        chosen.append(turns)
        generated += tokens
    concurrency = min(SMALL_CONCURRENCY, len(chosen))
    largest = max(footprint.blocks_held(contexts(turns)[-1]) for turns in chosen) + footprint.states_held
    blocks = max(math.ceil(concurrency * blocks_a_trajectory), largest) + 1
    return [
        Play(
            settings=settings,
            num_blocks=blocks,
            trajectories=tuple(chosen),
            concurrency=concurrency,
            cost=cost,
            limit_s=limit_s,
        )
        for settings in candidates.values()
    ]


def choose(scored: Sequence[Candidate], played: Sequence[Played]) -> list[Candidate]:
    """The candidates with vLLM's word and the choice: the one that computes least, if that is worth a knob."""
    judged = list(scored)
    if played and all(one.complete for one in played):
        judged = [
            msgspec.structs.replace(
                candidate, scheduler_computed_tokens=sum(turn.prompt_tokens - turn.cached_tokens for turn in one.turns)
            )
            for candidate, one in zip(scored, played, strict=True)
        ]

    def cost(candidate: Candidate) -> int:
        told = candidate.scheduler_computed_tokens
        return candidate.computed_tokens if told is None else told

    best = min(judged, key=cost)
    if cost(best) >= WORTH * cost(judged[0]):
        best = judged[0]
    return [msgspec.structs.replace(candidate, chosen=candidate is best) for candidate in judged]
