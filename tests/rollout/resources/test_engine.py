"""The footprint against running engines: a tiny hybrid that caches prefixes and one that does not, and plain attention.

What is compared are observations: the block size and number of blocks that an engine reports, the tokens that each turn
found, and the share of its blocks that are in use while a request runs.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from makespan.rollout.replicas.base import Completion, Request, Sampling
from makespan.rollout.replicas.vllm import VllmReplica
from makespan.rollout.resources.footprint import CacheSettings, ModelFootprint, footprint
from tests.conftest import Await, host_config

pytestmark = pytest.mark.vllm

CHUNK_TOKENS = 2048
CACHE_BYTES = 2**29


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory) -> Path:
    """Two layers of attention and no state, with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    directory = tmp_path_factory.mktemp("plain")
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def plain(on_loop: Await[VllmReplica], plain_model, tmp_path_factory) -> Iterator[VllmReplica]:
    log = tmp_path_factory.mktemp("plain-log") / "engine.log"
    replica = on_loop(VllmReplica.start("plain", host_config(plain_model), log, 300.0))
    yield replica
    on_loop(replica.close())


@pytest.fixture(params=["hybrid", "hybrid-uncached", "plain"])
def case(request, engines, embedded_model) -> tuple[VllmReplica, ModelFootprint]:
    """An engine and the footprint that it should have."""
    if request.param == "plain":
        model = request.getfixturevalue("plain_model")
        return request.getfixturevalue("plain"), footprint(model, platform="cpu")
    if request.param == "hybrid":
        return engines["cached"], footprint(embedded_model, platform="cpu")
    settings = CacheSettings(mamba_cache_mode="none")
    return engines["uncached"], footprint(embedded_model, platform="cpu", settings=settings)


def ask(name: str, prompt: list[int], tokens: int) -> Request:
    return Request(
        request_id=f"{name}-{random.getrandbits(48):x}",
        trajectory_id=name,
        turn=0,
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=tokens, min_tokens=tokens, temperature=0.0),
    )


def test_the_engine_has_the_blocks_that_the_footprint_says(case):
    replica, found = case
    assert replica.ready.block_tokens == found.block_tokens
    assert replica.ready.num_blocks == found.num_blocks(CACHE_BYTES)


def test_a_wrong_footprint_would_be_noticed(engines, embedded_model, tmp_path):
    """Half the heads of recurrent state: another block size and number of blocks than the engine's."""
    document = json.loads((embedded_model / "config.json").read_text())
    document["mamba_n_heads"] //= 2
    (tmp_path / "config.json").write_text(json.dumps(document))
    wrong = footprint(tmp_path, platform="cpu")
    assert engines["cached"].ready.block_tokens != wrong.block_tokens
    assert engines["cached"].ready.num_blocks != wrong.num_blocks(CACHE_BYTES)


def turns_of(rng: random.Random, block: int) -> list[tuple[int, int]]:
    """New and generated tokens of some turns. Every third prompt ends on a block's boundary, where the rules differ."""
    turns: list[tuple[int, int]] = []
    held = 0
    for number in range(4):
        new = rng.choice([1, rng.randrange(1, 250), rng.randrange(1, 900)]) if number else rng.randrange(20, 1_300)
        if rng.random() < 1 / 3:
            new += -(held + new) % block
        generated = rng.choice([1, 2, rng.randrange(1, 40)])
        turns.append((new, generated))
        held += new + generated
    return turns


async def converse(
    replica: VllmReplica, found: ModelFootprint, rng: random.Random, turns: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Tokens that each turn should have found and did find."""
    prompt: list[int] = []
    known = hit = 0
    pairs = []
    for new, generated in turns:
        prompt += [rng.randrange(3, 500) for _ in range(new)]
        answer: Completion = await replica.generate(ask("conversation", list(prompt), generated))
        assert answer.cached_tokens is not None
        pairs.append((hit, answer.cached_tokens))
        hit = found.next_hit_tokens(
            len(prompt), generated, found_tokens=answer.cached_tokens, known_tokens=known, chunk_tokens=CHUNK_TOKENS
        )
        known = len(prompt) + generated - 1
        prompt += answer.token_ids
    return pairs


def test_every_turn_of_random_conversations_finds_what_the_footprint_says(case, on_loop):
    replica, found = case
    on_loop(replica.reset_prefix_cache())
    rng = random.Random(20)
    pairs = []
    for _ in range(8 if found.prefix_caching else 2):
        pairs += on_loop(converse(replica, found, rng, turns_of(rng, found.block_tokens)))
    assert [told for told, _ in pairs] == [seen for _, seen in pairs]
    assert any(seen for _, seen in pairs) == found.prefix_caching  # else this would test nothing


async def blocks_in_use(replica: VllmReplica, prompt: list[int], tokens: int) -> set[int]:
    """Blocks in use at the moments when the engine reported a running request."""
    assert replica.ready.num_blocks is not None
    seen: set[int] = set()
    running = asyncio.create_task(replica.generate(ask("blocks", prompt, tokens)))
    await asyncio.sleep(0)
    before = replica.load()  # the last report of earlier requests
    while not running.done():
        load = replica.load()
        if load is not before and load is not None and load.running and load.kv_used_fraction is not None:
            seen.add(round(load.kv_used_fraction * (replica.ready.num_blocks - 1)))
        await asyncio.sleep(0.05)
    await running
    return seen


def test_a_decoding_request_holds_the_blocks_that_the_footprint_says(case, on_loop):
    """500 tokens of a prompt and 400 generated ones: it crosses a boundary at 768 tokens (or more of them)."""
    replica, found = case
    rng = random.Random(21)
    seen = on_loop(blocks_in_use(replica, [rng.randrange(3, 500) for _ in range(500)], 400))
    assert seen & {found.blocks_settled(tokens) for tokens in range(500, 900)}  # it was seen while it decoded
    # On a slow machine also while its prompt was prefilled, and for a step at a boundary at its peak.
    contexts = range(1, 900)
    assert seen <= {hold(tokens) for hold in (found.blocks_settled, found.blocks_held) for tokens in contexts}


def test_more_blocks_than_a_request_holds_would_be_noticed(engines, embedded_model, on_loop):
    found = footprint(embedded_model, platform="cpu")
    wrong = msgspec.structs.replace(found, recurrent_groups=found.recurrent_groups + 3)
    rng = random.Random(22)
    seen = on_loop(blocks_in_use(engines["cached"], [rng.randrange(3, 500) for _ in range(500)], 400))
    assert not seen & {wrong.blocks_settled(tokens) for tokens in range(500, 901)}
