"""The closed form against vLLM's own specs and vLLM's own scheduler, for models that are too large to run here."""

from __future__ import annotations

import random

import msgspec
import pytest

from makespan.rollout.resources.footprint import CacheSettings, footprint
from makespan.rollout.resources.profile import ProfileTurn, Turns
from makespan.rollout.resources.shape import ResourceError
from makespan.rollout.resources.vllm_wire import (
    Answer,
    Play,
    Played,
    Question,
    Refusal,
    VllmUnavailable,
    ask,
    ask_all,
)
from tests.rollout.resources.conftest import FAMILIES, config_of

pytestmark = pytest.mark.vllm

SETTINGS = (
    CacheSettings(),
    CacheSettings(mamba_cache_mode="none"),
    CacheSettings(mamba_cache_mode="all"),
    CacheSettings(block_size=256),
    CacheSettings(mamba_ssm_cache_dtype="float32"),
    CacheSettings(mamba_cache_dtype="float32"),
)
FIGURES = (
    "attention_layers",
    "recurrent_layers",
    "state_bytes_per_sequence",
    "kv_bytes_per_token",
    "block_tokens",
    "page_bytes",
    "bytes_per_block",
    "attention_groups",
    "recurrent_groups",
    "hidden",
    "vocabulary",
)


def known(name: str, ranks: int) -> tuple[CacheSettings, ...]:
    """The settings that the closed form accepts."""
    accepted = []
    for settings in SETTINGS:
        try:
            footprint(config_of(name), tensor_parallel=ranks, settings=settings)
        except ResourceError:
            continue
        accepted.append(settings)
    return tuple(accepted)


def question(
    name: str, ranks: int, settings: tuple[CacheSettings, ...], plays: tuple[Play, ...] = (), context: int = 4_096
) -> Question:
    return Question(
        model=str(config_of(name)),
        tensor_parallel=ranks,
        platform="cuda",
        settings=settings,
        max_model_len=context,
        max_num_batched_tokens=2_048,
        plays=plays,
    )


def test_every_family_has_vllms_own_footprint_with_every_number_of_ranks():
    """One child process builds them all on the meta device, under a GPU's rules."""
    asked = [(name, ranks, known(name, ranks)) for name in FAMILIES for ranks in range(1, 9)]
    answers = ask_all([question(name, ranks, settings or SETTINGS[:1]) for name, ranks, settings in asked], 500.0)
    wrong = []
    for (name, ranks, settings), answer in zip(asked, answers, strict=True):
        if isinstance(answer, Refusal) or not settings:
            if isinstance(answer, Answer) or settings:  # refused by one of the two only
                wrong.append((name, ranks, answer if isinstance(answer, Refusal) else "vLLM accepts it"))
            continue
        for one, told in zip(settings, answer.footprints, strict=True):
            own = footprint(config_of(name), tensor_parallel=ranks, settings=one)
            wrong += [
                (name, ranks, one, figure, getattr(own, figure), getattr(told, figure))
                for figure in FIGURES
                if getattr(own, figure) != getattr(told, figure)
            ]
            if ranks == 1:
                assert own.weights_bytes == pytest.approx(told.weights_bytes, rel=0.002)
    assert wrong == []
    assert sum(len(settings) for _, _, settings in asked) > 200  # most families accept 1, 2, 4 and often 8 ranks


def test_fp8_keys_and_a_model_that_vllm_does_not_serve(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NothingForCausalLM"], "model_type": "nothing"}')
    settings = CacheSettings(kv_cache_dtype="fp8")
    good = question("granite-4-h-tiny", 1, (settings,))
    told, refused = ask_all([good, msgspec.structs.replace(good, model=str(tmp_path))])
    own = footprint(config_of("granite-4-h-tiny"), settings=settings)
    assert isinstance(told, Answer)
    assert told.footprints[0].block_tokens == own.block_tokens
    assert told.footprints[0].bytes_per_block == own.bytes_per_block
    assert own.block_tokens == 800  # by hand: ceil(806,400 / (16 * 1,024)) = 50 kernel blocks of 16
    assert isinstance(refused, Refusal)
    assert "nothing" in refused.refusal


def test_a_vllm_that_does_not_answer_in_time_is_given_up_on():
    with pytest.raises(VllmUnavailable, match="vLLM did not answer in 0 s"):
        ask(question("granite-4-h-tiny", 1, (CacheSettings(),)), 0.01)


# vLLM's scheduler

PLAYED = (
    CacheSettings(),
    CacheSettings(retain_all=True),
    CacheSettings(match_unit=16),
    CacheSettings(mamba_cache_mode="none"),
)
BLOCK = 400


def conversation(rng: random.Random) -> Turns:
    """A few turns; a third of the prompts end on the boundary of a block, where the rules differ."""
    turns: list[ProfileTurn] = []
    held = 0
    for number in range(5):
        new = rng.choice([1, rng.randrange(1, 900)]) if number else rng.choice([rng.randrange(30, 1_800), BLOCK])
        if rng.random() < 1 / 3:
            new += -(held + new) % BLOCK
        turns.append(ProfileTurn(new_tokens=new, generated_tokens=rng.choice([1, 2, 90]), environment_s=1.0))
        held += new + turns[-1].generated_tokens
    return tuple(turns)


def expected_hits(settings: CacheSettings, played: Played) -> list[int]:
    found = footprint(config_of("granite-4-h-tiny"), settings=settings)
    hit = known_tokens = 0
    hits = []
    for turn in played.turns:
        hits.append(hit)
        hit = found.next_hit_tokens(
            turn.prompt_tokens,
            turn.generated_tokens,
            found_tokens=turn.cached_tokens,
            known_tokens=known_tokens,
            chunk_tokens=2_048,
        )
        known_tokens = turn.prompt_tokens + turn.generated_tokens - 1
    return hits


def test_vllms_scheduler_finds_and_holds_what_the_footprint_says():
    rng = random.Random(5)
    conversations = [conversation(rng) for _ in range(25)]
    plays = [
        (settings, Play(settings=settings, num_blocks=5_000, trajectories=(turns,), concurrency=1))
        for settings in PLAYED
        for turns in conversations
    ]
    hurried = msgspec.structs.replace(plays[0][1], limit_s=0.0)
    asked = (*(play for _, play in plays), hurried)
    answer = ask(question("granite-4-h-tiny", 1, (CacheSettings(),), asked, 8_192), 300.0)
    assert [played.complete for played in answer.played] == [True] * len(plays) + [False]
    found_some = 0
    for (settings, _), played in zip(plays, answer.played[:-1], strict=True):
        assert [turn.cached_tokens for turn in played.turns] == expected_hits(settings, played)
        longest = played.turns[-1].prompt_tokens + played.turns[-1].generated_tokens - 1
        assert played.peak_blocks == footprint(config_of("granite-4-h-tiny"), settings=settings).blocks_held(longest)
        found_some += sum(turn.cached_tokens > 0 for turn in played.turns)
    assert found_some > 100  # else this would test nothing
