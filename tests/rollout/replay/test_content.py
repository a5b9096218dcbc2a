"""The token ids of a replay: which of them are equal, and whose they are."""

import msgspec
import pytest

from makespan.rollout.errors import ConfigError
from makespan.rollout.replay.content import ReplayConversation, check_lengths, check_vocabulary, context_tokens
from makespan.rollout.replay.plan import plan
from makespan.rollout.replay.playback import FIRST_PROMPT, Stretch

from .recordings import recording

SIBLINGS = (
    recording("a", "g", 40, (3, 20, 0.1), (3, 0, 0.1)),
    recording("b", "g", 40, (3, 20, 0.1), (3, 0, 0.1)),
    recording("longer", "g", 60, (3, 20, 0.1), (3, 0, 0.1)),
    recording("c", "other", 40, (3, 20, 0.1), (3, 0, 0.1)),
)


def ids(trajectories, name, turn, tokens, *, seed=0, vocabulary=1000):
    _, plays = plan(trajectories)
    conversation = ReplayConversation(plays, vocabulary=vocabulary, seed=seed)
    return conversation.first_prompt([Stretch(trajectory_id=name, turn=turn, tokens=tokens).message()])


def test_siblings_share_their_first_prompt_and_a_longer_one_begins_with_it():
    first = ids(SIBLINGS, "g#0", FIRST_PROMPT, 40)
    assert len(first) == 40
    assert ids(SIBLINGS, "g#1", FIRST_PROMPT, 40) == first
    assert ids(SIBLINGS, "g#2", FIRST_PROMPT, 60)[:40] == first
    assert ids(SIBLINGS, "other#0", FIRST_PROMPT, 40) != first


def test_observations_of_siblings_and_of_turns_differ():
    drawn = [tuple(ids(SIBLINGS, name, turn, 20)) for name in ("g#0", "g#1") for turn in (0, 1)]
    assert len(set(drawn)) == 4
    assert {len(tokens) for tokens in drawn} == {20}


def test_the_same_seed_draws_the_same_and_another_one_does_not():
    assert ids(SIBLINGS, "g#0", 0, 20, seed=5) == ids(SIBLINGS, "g#0", 0, 20, seed=5)
    assert ids(SIBLINGS, "g#0", 0, 20, seed=5) != ids(SIBLINGS, "g#0", 0, 20, seed=6)


def test_drawn_ids_keep_off_both_ends_of_the_vocabulary():
    drawn = ids(SIBLINGS, "g#0", 0, 5000, vocabulary=400)
    assert min(drawn) == 100
    assert max(drawn) == 299


def test_recorded_ids_are_used_where_there_are_any():
    first, last = SIBLINGS[0].turns
    kept = msgspec.structs.replace(
        SIBLINGS[0],
        prompt_ids=list(range(40)),
        turns=(msgspec.structs.replace(first, observation_ids=[7] * 20), last),
    )
    assert ids((kept,), "g#0", FIRST_PROMPT, 40) == list(range(40))
    assert ids((kept,), "g#0", 0, 20) == [7] * 20


def test_a_context_that_is_too_long_is_named_with_its_turn_and_length():
    assert [context_tokens(recorded) for recorded in SIBLINGS] == [66, 66, 86, 66]  # prompt + 3 + 20 + 3
    check_lengths(SIBLINGS, 86, "tiny")
    with pytest.raises(ConfigError, match=r"1 of 4 .* 85 tokens of tiny.*'longer', passes .* turn 1 and reaches 86"):
        check_lengths(SIBLINGS, 85, "tiny")


def test_recorded_ids_beyond_the_vocabulary_are_named():
    turn = msgspec.structs.replace(SIBLINGS[0].turns[0], observation_ids=[5] * 19 + [100])
    foreign = msgspec.structs.replace(SIBLINGS[0], turns=(turn, SIBLINGS[0].turns[1]))
    check_vocabulary([foreign], 101, "tiny")
    with pytest.raises(ConfigError, match=r"'a', turns\[0\].observation_ids: token id 100 .* tiny's 100"):
        check_vocabulary([foreign], 100, "tiny")
    with pytest.raises(ConfigError, match=r"prompt_ids: token id -1"):
        check_vocabulary([msgspec.structs.replace(SIBLINGS[0], prompt_ids=[-1] * 40)], 100, "tiny")
