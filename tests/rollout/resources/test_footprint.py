"""The closed form against figures worked out by hand, and against what it has to refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makespan.rollout.resources.footprint import CacheSettings, ModelFootprint, footprint, reference_concurrency
from makespan.rollout.resources.shape import (
    BadConfig,
    BadParallelism,
    ResourceError,
    UnknownArchitecture,
    group_layers,
)
from tests.rollout.resources.conftest import FAMILIES, config_of

# state bytes a sequence, KV bytes a token, block tokens, page bytes, bytes a block, A, M; one rank, bfloat16, a GPU
BY_HAND = {
    # 36 layers of conv 3 * (8192 + 2*128) * 2 + ssm 128*64*128 * 2; 4 layers of 2*8*128 * 2;
    # ceil(2,147,840 / (16 * 4096)) = 33 kernel blocks of 16
    "granite-4-h-small": (77_322_240, 16_384, 528, 2_162_688, 8_650_752, 1, 9),
    "granite-4-h-tiny": (29_030_400, 8_192, 400, 819_200, 3_276_800, 1, 9),
    # 36 layers of conv 3 * (2*16*128 + 32*128) * 2 + 32*128*128 * 2; 12 layers of 2*2*256 * 2
    "qwen3-next-80b-a3b": (39_518_208, 24_576, 544, 1_114_112, 13_369_344, 1, 3),
    # 24 layers of conv 3 * 8192 * 2 + 32*128*128 * 4 (float32 by its config); 8 layers of 2*4*256 * 2;
    # ceil(2,146,304 / (16 * 4096)) = 33
    "qwen3.5-text": (51_511_296, 32_768, 528, 2_162_688, 17_301_504, 1, 3),
    # 24 layers of conv 3 * (8192 + 2*8*128) * 2 + ssm 128*64*128 * 4 (float32)
    "nemotron-h-8b": (102_137_856, 16_384, 1040, 4_259_840, 17_039_360, 1, 6),
    "falcon-h1-7b": (70_152_192, 45_056, 1568, 1_605_632, 70_647_808, 1, 1),
    # 28 layers of 8192 channels * (3 + 16) * 2
    "jamba": (8_716_288, 16_384, 80, 327_680, 1_310_720, 1, 7),
    # 54 layers of conv 3 * (5120 + 2*64) * 2 + 80*64*64 * 2; 9 layers of 2*32*160 * 2; ceil(686,848 / 327,680) = 3
    "zamba2-2.7b": (37_089_792, 184_320, 48, 983_040, 8_847_360, 1, 6),
    # 10 layers of 2 * 2048 * 2
    "lfm2-1.2b": (81_920, 12_288, 16, 32_768, 196_608, 1, 2),
    # 24 layers of conv 3 * (2*30*96 + 30*192) * 2 + 30*96*192 * 2; 8 layers of 2*30*128 * 2; 5 kernel blocks
    "olmo-hybrid-7b": (28_200_960, 122_880, 80, 1_228_800, 9_830_400, 1, 3),
    # 20 layers of conv 3 * 3*4096 * 2 + 32*128*128 * 4; 7 layers of (512 + 64) * 2
    "kimi-linear-48b-a3b": (43_417_600, 8_064, 1920, 2_211_840, 15_482_880, 1, 3),
    # 16 layers of 16*128*128 * 2; 4 layers of (512 + 64) * 2
    "bailing-v2.5": (8_388_608, 4_608, 512, 589_824, 2_359_296, 1, 4),
    "bailing-v3": (17_367_040, 4_608, 1024, 1_179_648, 4_718_592, 1, 4),
    # no states: FlashAttention's block of 16, 36 layers of 2*8*128 * 2
    "qwen3-8b": (0, 147_456, 16, 65_536, 2_359_296, 1, 0),
}


def figures(found: ModelFootprint) -> tuple[int, ...]:
    return (
        found.state_bytes_per_sequence,
        found.kv_bytes_per_token,
        found.block_tokens,
        found.page_bytes,
        found.bytes_per_block,
        found.attention_groups,
        found.recurrent_groups,
    )


@pytest.mark.parametrize("name", BY_HAND)
def test_a_family_has_the_footprint_that_was_worked_out_by_hand(name):
    assert figures(footprint(config_of(name))) == BY_HAND[name]


def test_a_published_ling_3_has_the_kv_cache_of_its_six_attention_layers(tmp_path):
    """24 layers in groups of KDA, KDA, KDA, MLA: (512 + 64) * 2 bytes in each of 6 layers."""
    small = json.loads(config_of("bailing-v3").read_text())
    small |= {"num_hidden_layers": 24, "layer_group_size": 4, "hidden_size": 1536}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small))
    found = footprint(tmp_path)
    assert (found.attention_layers, found.recurrent_layers, found.kv_bytes_per_token) == (6, 18, 6_912)


def test_ranks_divide_heads_and_copy_kv_heads_that_are_too_few():
    """Qwen3-Next has 2 KV heads: two ranks keep one each, eight keep a copy each. Its states always divide."""
    by_ranks = {ranks: footprint(config_of("qwen3-next-80b-a3b"), tensor_parallel=ranks) for ranks in (1, 2, 4, 8)}
    assert {ranks: found.kv_bytes_per_token for ranks, found in by_ranks.items()} == {
        1: 24_576,
        2: 12_288,
        4: 12_288,
        8: 12_288,
    }
    assert {ranks: found.state_bytes_per_sequence for ranks, found in by_ranks.items()} == {
        1: 39_518_208,
        2: 19_759_104,
        4: 9_879_552,
        8: 4_939_776,
    }
    # 1,097,728 / ranks bytes of a layer's state over 16 * 1024 bytes of 16 tokens of one head
    assert {ranks: found.block_tokens for ranks, found in by_ranks.items()} == {1: 544, 2: 544, 4: 272, 8: 144}


def test_ranks_copy_the_one_group_of_mamba2():
    """Granite has one group of B and C: on 8 ranks each keeps 8192/8 + 2*128 channels of convolution and 16 heads."""
    found = footprint(config_of("granite-4-h-small"), tensor_parallel=8)
    assert found.state_bytes_per_sequence == 36 * (3 * (1024 + 256) * 2 + 16 * 64 * 128 * 2)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_number_of_ranks_gives_a_footprint_or_a_reason(name, ranks):
    try:
        found = footprint(config_of(name), tensor_parallel=ranks)
    except BadParallelism as error:
        says = str(error)
        assert "--tp" in says  # which would do
        assert ranks > 1
    else:
        assert found.page_bytes * found.recurrent_layers >= found.state_bytes_per_sequence
        assert found.bytes_per_block % found.page_bytes == 0


def test_the_state_at_every_block_is_aligned_to_the_kernels_chunk():
    """`all`: chunk 256 and kernel block 16 have the common multiple 256; 2,147,840 / 4,096 = 524.4 tokens, so 768."""
    found = footprint(config_of("granite-4-h-small"), settings=CacheSettings(mamba_cache_mode="all"))
    assert found.block_tokens == 768
    assert found.blocks_held(1536) == 10 * 2


def test_fp8_keys_stretch_the_block():
    """Half the bytes a token: ceil(2,147,840 / (16 * 2048)) = 66 kernel blocks."""
    found = footprint(config_of("granite-4-h-small"), settings=CacheSettings(kv_cache_dtype="fp8"))
    assert (found.kv_bytes_per_token, found.block_tokens) == (8_192, 66 * 16)


@pytest.mark.parametrize(("bfloat16", "state"), [(True, 3 * 640 * 2 + 16 * 32 * 64 * 4), (False, 69_376)])
def test_on_a_cpu_blocks_are_larger_and_states_may_be_float32(embedded_model, bfloat16, state):
    found = footprint(embedded_model, platform="cpu", cpu_flags={"avx512_bf16"} if bfloat16 else set())
    assert found.state_bytes_per_sequence == 3 * state
    assert found.block_tokens == {True: 384, False: 256}[bfloat16]  # ceil(state / (128 * 512 bytes)) * 128


def test_a_sequence_holds_blocks_for_its_tokens_and_its_states():
    align = footprint(config_of("granite-4-h-small"))
    none = footprint(config_of("granite-4-h-small"), settings=CacheSettings(mamba_cache_mode="none"))
    assert [align.blocks_held(tokens) for tokens in (1, 528, 529, 5280)] == [19, 19, 20, 28]
    assert [none.blocks_held(tokens) for tokens in (1, 528, 529, 5280)] == [10, 10, 11, 19]
    assert align.bytes_held(529) == 20 * 8_650_752
    assert align.num_blocks(10 * 8_650_752 + 5) == 10
    assert align.sequences_that_fit(101, 5280) == 3  # 100 blocks beside the null block, 28 each


def test_the_reference_concurrency_counts_what_a_turn_holds_and_leaves():
    """60 blocks of 384 tokens, A=1, M=3, contexts 332, 964, 1,596, 2,228 and 2,860: (1 + 3 + 5 + 6 + 8) / 5 + 9 = 13.6
    blocks a trajectory, of 59: 4; of 119: 8."""
    found = msgspec_replace(footprint(config_of("granite-4-h-tiny")), block_tokens=384, recurrent_groups=3)
    contexts = [332, 964, 1_596, 2_228, 2_860]
    assert reference_concurrency(found, 60, contexts) == 4
    assert reference_concurrency(found, 120, contexts) == 8
    assert reference_concurrency(found, 10, contexts) == 1  # never 0: something has to run


def msgspec_replace(found: ModelFootprint, **changes: object) -> ModelFootprint:
    import msgspec

    return msgspec.structs.replace(found, **changes)


@given(st.integers(1, 200_000), st.integers(1, 4_000))
def test_a_hit_is_a_whole_number_of_blocks_of_what_was_computed(prompt, generated):
    for name in ("granite-4-h-tiny", "qwen3-8b"):
        found = footprint(config_of(name))
        hit = found.next_hit_tokens(prompt, generated)
        assert hit % found.block_tokens == 0
        assert 0 <= hit <= prompt + generated - 1


def test_layers_are_grouped_by_the_smaller_kind_unless_the_kinds_are_close():
    assert [group_layers(*counts) for counts in ((4, 36), (44, 44), (7, 20), (10, 14), (10, 15), (36, 0))] == [
        4,
        44,
        7,
        14,
        10,
        36,
    ]


# What is refused


def write(tmp_path: Path, name: str, **changes: object) -> Path:
    document = json.loads(config_of(name).read_text())
    for key, value in changes.items():
        if value is ...:
            del document[key]
        else:
            document[key] = value
    (tmp_path / "config.json").write_text(json.dumps(document))
    return tmp_path


def test_an_unknown_architecture_is_refused_with_what_would_help(tmp_path):
    model = write(tmp_path, "granite-4-h-tiny", architectures=["GraniteMoeHybridForCausalLN"])
    with pytest.raises(UnknownArchitecture, match="did you mean 'GraniteMoeHybridForCausalLM'") as caught:
        footprint(model)
    assert "vLLM is installed" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mamba_n_heads": ...}, "needs `mamba_n_heads`"),
        ({"mamba_n_heads": "many"}, "`mamba_n_heads` must be a whole number of at least 0, not 'many'"),
        ({"layer_types": ["mamba"]}, "the type of each of 40 layers, not 1"),
        ({"architectures": []}, "must name a model class"),
        ({"layer_types": ["mamba"] * 40}, "without attention layers"),
    ],
)
def test_a_configuration_that_lacks_something_is_refused_by_name(tmp_path, changes, says):
    with pytest.raises(BadConfig, match=says):
        footprint(write(tmp_path, "granite-4-h-tiny", **changes))


def test_what_is_no_configuration_is_refused(tmp_path):
    with pytest.raises(BadConfig, match="cannot read the model's configuration"):
        footprint(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadConfig, match="is not JSON"):
        footprint(tmp_path)


def test_windows_of_attention_are_not_covered(tmp_path):
    model = write(tmp_path, "qwen3-8b", sliding_window=4096, use_sliding_window=True)
    with pytest.raises(UnknownArchitecture, match="window"):
        footprint(model)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        (
            "qwen3-next-80b-a3b",
            CacheSettings(mamba_cache_mode="all"),
            "cannot keep a state at every block of Qwen3-Next",
        ),
        ("granite-4-h-small", CacheSettings(match_unit=100), "must divide the block of 528 tokens"),
        ("granite-4-h-small", CacheSettings(kv_cache_dtype="int3"), "kv_cache_dtype: unknown dtype 'int3'"),
        ("granite-4-h-small", CacheSettings(mamba_cache_mode="none", match_unit=16), "contradict"),
        ("granite-4-h-small", CacheSettings(mamba_cache_mode="all", retain_all=True), "contradict"),
    ],
)
def test_settings_that_cannot_be_are_refused(name, settings, says):
    with pytest.raises(ResourceError, match=says):
        footprint(config_of(name), settings=settings)
