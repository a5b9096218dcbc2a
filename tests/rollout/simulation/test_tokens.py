import pytest
from hypothesis import given
from hypothesis import strategies as st

from makespan.rollout.simulation.tokens import CountedTokens


def test_counted_tokens_have_a_length_and_grow_by_other_sequences():
    tokens = CountedTokens(5)
    tokens.extend([1, 2, 3])
    tokens.extend(CountedTokens(10**9))
    assert len(tokens) == 10**9 + 8


@given(st.integers(0, 50), st.slices(50))
def test_a_slice_is_as_long_as_a_lists(length, part):
    assert len(CountedTokens(length)[part]) == len(list(range(length))[part])


def test_an_index_beyond_the_end_is_an_error_as_for_a_list():
    assert CountedTokens(3)[2] == 0
    with pytest.raises(IndexError):
        CountedTokens(3)[3]


def test_a_limit_keeps_the_last_tokens_and_counts_the_others():
    tokens = CountedTokens(limit=100)
    tokens.extend(range(90))
    assert (len(tokens), tokens.dropped) == (90, 0)
    tokens.extend(range(30))
    assert (len(tokens), tokens.dropped) == (100, 20)


def test_a_negative_length_is_refused():
    with pytest.raises(ValueError, match="-1"):
        CountedTokens(-1)


def test_iteration_ends():
    assert list(CountedTokens(3)) == [0, 0, 0]
