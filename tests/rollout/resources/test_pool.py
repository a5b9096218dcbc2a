"""The block pool: small cases by hand, and its knees against vLLM's own scheduler."""

from __future__ import annotations

import random

import msgspec
import pytest

from makespan.rollout.resources import pool
from makespan.rollout.resources.footprint import CacheSettings, ModelFootprint, footprint
from makespan.rollout.resources.profile import ProfileTurn, Turns
from makespan.rollout.resources.shape import ResourceError
from makespan.rollout.resources.vllm_wire import Play, Question, ask
from makespan.rollout.simulation.cost import InferenceCost
from tests.rollout.resources.conftest import config_of

COST = InferenceCost(step_s=0.01, sequence_s=0.0, context_s=0.0, prefill_s=0.0001, chunk_tokens=1_000)


def hybrid(**changes: object) -> ModelFootprint:
    """Blocks of 400 tokens, one group of attention and three of states."""
    found = footprint(config_of("granite-4-h-tiny"))
    return msgspec.structs.replace(found, recurrent_groups=3, **changes)


def turns(*lengths: tuple[int, int], wait_s: float = 1.0) -> Turns:
    return tuple(
        ProfileTurn(new_tokens=new, generated_tokens=generated, environment_s=wait_s) for new, generated in lengths
    )


def test_one_trajectory_finds_the_whole_blocks_of_its_last_prompt():
    """Prompts of 1,000, 1,520 and 2,040 tokens: 0, then 800, then 1,200 found; all of it findable."""
    outcome = pool.play(hybrid(), 100, [turns((1_000, 20), (500, 20), (500, 20))], 1, COST)
    assert outcome.prompt_tokens == 1_000 + 1_520 + 2_040
    assert outcome.cached_tokens == outcome.reusable_tokens == 800 + 1_200
    assert outcome.cached_share == 1.0
    assert outcome.recomputed_tokens == 0


def test_a_turn_takes_its_prefill_and_its_steps():
    """2,500 tokens in 3 chunks of 1,000, 1,000 and 500, and 9 more steps: by hand 12 * 0.01 s + 2,500 * 0.0001 s."""
    outcome = pool.play(hybrid(), 100, [turns((2_500, 10))], 1, COST)
    assert outcome.seconds == pytest.approx(12 * 0.01 + 0.25)
    assert outcome.tokens_per_s == pytest.approx(10 / 0.37)


def test_the_first_block_that_is_lost_costs_the_whole_cache():
    """Each context of 1,020 tokens holds 3 + 6 blocks and keeps 2 + 3. A pool of 14 holds one that runs and one that
    waits; of 13 it does not, and the one that waits computes all 800 tokens again."""
    lengths = ((1_000, 20), (20, 20))
    pair = [turns(*lengths, wait_s=1.0), turns(*lengths, wait_s=1.0)]
    assert pool.play(hybrid(), 15, pair, 2, COST).cached_share == 1.0
    scarce = pool.play(hybrid(), 14, pair, 2, COST)
    assert scarce.cached_tokens < scarce.reusable_tokens
    assert scarce.cached_tokens % 800 == 0


def test_without_prefix_caching_nothing_is_found_and_nothing_can_be():
    found = hybrid(settings=CacheSettings(mamba_cache_mode="none"))
    outcome = pool.play(found, 100, [turns((1_000, 20), (500, 20))], 1, COST)
    assert (outcome.cached_tokens, outcome.reusable_tokens) == (0, 0)


def test_turns_wait_for_blocks_instead_of_overrunning_them():
    """Two contexts of 9 blocks each, and 12 blocks: one runs after the other."""
    pair = [turns((1_000, 20)), turns((1_000, 20))]
    together, apart = pool.play(hybrid(), 30, pair, 2, COST), pool.play(hybrid(), 13, pair, 2, COST)
    assert together.queued_turns == 0
    assert apart.queued_turns > 0
    assert apart.seconds > together.seconds


def test_a_context_that_can_never_fit_is_refused():
    with pytest.raises(ResourceError, match="needs 16 blocks, and there are 12"):
        pool.play(hybrid(), 13, [turns((4_000, 1))], 1, COST)


def test_more_at_once_never_find_more():
    rng = random.Random(3)
    chains = [
        turns(*((rng.randrange(100, 900), 30) for _ in range(6)), wait_s=rng.uniform(0.5, 2.0)) for _ in range(24)
    ]
    shares = [pool.play(hybrid(), 80, chains, concurrency, COST).cached_share for concurrency in (2, 4, 8, 16)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1.0
    assert shares[-1] < 0.5


def test_the_knee_is_the_last_concurrency_that_finds_nearly_everything():
    chains = [turns((300, 32), *((600, 32),) * 4, wait_s=1.5)]
    at = pool.knee(hybrid(), 80, chains, COST, guess=4)

    def share(concurrency: int) -> float:
        return pool.play(hybrid(), 80, pool.batch(chains, concurrency), concurrency, COST).cached_share

    assert share(at) >= pool.FALLEN > share(at + 1)
    assert all(share(concurrency) >= pool.FALLEN for concurrency in range(1, at))
    assert pool.knee(hybrid(), 80, chains, COST, guess=2) == pool.knee(hybrid(), 80, chains, COST, guess=11) == at


@pytest.mark.vllm
def test_the_knee_is_that_of_vllms_scheduler_within_one_trajectory():
    """Unlike trajectories, the real pool's rules: where vLLM's scheduler starts to lose tokens, the pool does too."""
    found = footprint(config_of("granite-4-h-tiny"))
    rng = random.Random(4)
    chains = tuple(
        tuple(
            ProfileTurn(new_tokens=rng.randrange(200, 700), generated_tokens=20, environment_s=rng.uniform(0.75, 2.25))
            for _ in range(5)
        )
        for _ in range(24)
    )
    blocks = 151
    range_ = range(3, 11)
    plays = tuple(
        Play(
            settings=found.settings,
            num_blocks=blocks,
            trajectories=chains,
            concurrency=concurrency,
            cost=COST,
        )
        for concurrency in range_
    )
    answer = ask(
        Question(
            model=str(config_of("granite-4-h-tiny")),
            tensor_parallel=1,
            platform="cuda",
            settings=(found.settings,),
            max_model_len=8_192,
            max_num_batched_tokens=COST.chunk_tokens,
            plays=plays,
        ),
        200.0,
    )
    most = sum(turn.cached_tokens for turn in answer.played[0].turns)
    theirs = [sum(turn.cached_tokens for turn in played.turns) / most for played in answer.played]
    ours = [pool.play(found, blocks, chains, concurrency, COST).cached_share for concurrency in range_]

    def fallen(shares: list[float]) -> int:
        return next(number for number, share in zip(range_, shares, strict=True) if share < pool.FALLEN)

    assert abs(fallen(theirs) - fallen(ours)) <= 1
    assert min(theirs) < 0.7  # the range covers the fall
