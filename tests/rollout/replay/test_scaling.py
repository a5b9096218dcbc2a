"""Batches made smaller."""

from __future__ import annotations

import math

import msgspec
import pytest

from makespan.rollout.errors import ConfigError
from makespan.rollout.replay.scaling import scaled_tokens
from makespan.rollout.replay.trace import check

from .recordings import recording

RECORDED = recording("a", "g", 1_000, (200, 31, 4.0), (4, 0, 2.0), (70, 0, None), reset_s=3.0, max_tokens=2_000)


def test_every_stretch_of_tokens_is_multiplied_and_the_context_still_adds_up():
    (smaller,) = scaled_tokens([RECORDED], 0.1)
    check(smaller)
    figures = [(turn.prompt_tokens, turn.generated_tokens, turn.observation_tokens) for turn in smaller.turns]
    # 1,000, 200 and 31; then 4 tokens, which stay at least 1, and nothing observed; then 70
    assert figures == [(100, 20, 3), (123, 1, 0), (124, 7, 0)]
    assert [turn.environment_s for turn in smaller.turns] == [4.0, 2.0, None]
    assert (smaller.reset_s, smaller.max_tokens) == (3.0, 200)


def test_a_cap_never_cuts_what_rounding_made_longer():
    full = recording("a", "g", 10, *[(6, 6, 1.0)] * 20, max_tokens=10 + 20 * 12)
    (smaller,) = scaled_tokens([full], 0.1)
    last = smaller.turns[-1]
    assert smaller.max_tokens is not None
    assert smaller.max_tokens >= last.prompt_tokens + last.generated_tokens > 26


def test_ids_stand_for_full_lengths_and_stay_only_at_a_scale_of_1():
    with_ids = msgspec.structs.replace(RECORDED, prompt_ids=[7] * 1_000)
    assert scaled_tokens([with_ids], 1.0) == (with_ids,)
    assert scaled_tokens([with_ids], 0.5)[0].prompt_ids is None


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_a_scale_that_is_none_is_refused(scale):
    with pytest.raises(ConfigError, match="--token-scale is"):
        scaled_tokens([RECORDED], scale)
