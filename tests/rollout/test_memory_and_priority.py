"""What admission and routing know of memory, and the order of requests at a replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from makespan.commands.memory import check_blocks, replica_memory
from makespan.rollout.errors import ConfigError
from makespan.rollout.memory import BlockMemory, LinearMemory
from makespan.rollout.priority import request_priority
from makespan.rollout.replicas.wire import Ready


def ready(num_blocks: int | None, block_tokens: int = 100) -> Ready:
    return Ready(block_tokens=block_tokens, num_blocks=num_blocks, version="", shared_memory=())


def test_memory_in_tokens_and_in_blocks():
    assert LinearMemory(capacity=1000, sequence=50).held(200) == 250
    hybrid = BlockMemory(capacity=59, block_tokens=384, attention=1, states=6)
    assert [hybrid.held(tokens) for tokens in (0, 1, 384, 385, 2828)] == [6, 7, 7, 8, 14]
    # The concurrency at which a hybrid of this shape was seen to begin to lose its caches.
    assert hybrid.capacity // hybrid.held(2828) == 4


def test_what_waits_between_turns_is_whole_blocks_and_one_state():
    """Of 1,000 prompt tokens and 500 generated, in blocks of 384: a hybrid finds the 2 whole blocks of the prompt and
    keeps 3 states of its 6; attention alone finds 3 of the 1,499 computed tokens, in two groups of layers each."""
    hybrid = BlockMemory(capacity=59, block_tokens=384, attention=1, states=6)
    assert hybrid.kept(1_000, 1_500) == (768, 2 + 3)
    assert hybrid.kept(383, 500) == (0, 0)
    attention = BlockMemory(capacity=59, block_tokens=384, attention=2)
    assert attention.kept(1_000, 1_500) == (1_152, 6)
    assert attention.kept(1_000, 1_537) == (1_536, 8)
    assert attention.kept(1_000, 1_536) == (1_152, 6)  # the last token was sampled, not computed
    assert LinearMemory(capacity=1000, sequence=50).kept(100, 200) == (200, 250)


def test_an_unknown_model_counts_as_attention_alone(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyKnowsForCausalLM"]}')
    memory = replica_memory(tmp_path, ready(60), on_gpu=False, prefix_caching=True)
    assert memory == BlockMemory(capacity=59, block_tokens=100, attention=1, states=0)
    assert replica_memory(tmp_path, ready(None), on_gpu=False, prefix_caching=True) is None
    uncached = replica_memory(tmp_path, ready(60), on_gpu=False, prefix_caching=False)
    assert uncached is not None
    assert uncached.kept(1_000, 1_500) == (0, 0)


def test_blocks_that_do_not_hold_one_longest_context_are_refused_before_an_engine_starts(
    embedded_model: Path, tmp_path
):
    """The embedded hybrid has blocks of 384 tokens, one group of attention and three of recurrent layers, of two states
    each: 3,300 tokens take 9 and 6 blocks, and vLLM keeps one for itself."""
    check_blocks(16, embedded_model, 3_300, on_gpu=False, prefix_caching=True)
    with pytest.raises(ConfigError, match=r"15 cache blocks cannot hold one context of 3,300 tokens .* at least 16"):
        check_blocks(15, embedded_model, 3_300, on_gpu=False, prefix_caching=True)
    check_blocks(13, embedded_model, 3_300, on_gpu=False, prefix_caching=False)  # one state each
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyKnowsForCausalLM"]}')
    check_blocks(1, tmp_path, 3_300, on_gpu=False, prefix_caching=True)  # the engine will say


def test_a_returning_turn_goes_before_a_new_sample_and_a_threatening_chain_before_both():
    assert request_priority(3, threatens=True) < request_priority(3, threatens=False) < request_priority(0, False)
    assert request_priority(0, threatens=True) == request_priority(0, threatens=False)
