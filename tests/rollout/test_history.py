import json
import math

import pytest

from makespan.rollout.errors import FormatError
from makespan.rollout.history import ChainRecord, History, read_history, write_history


def chain(group, turns, inference_s=1.0, environment_s=2.0, tokens=100):
    return ChainRecord(group, turns, inference_s * turns, environment_s * turns, tokens * turns)


def test_a_step_leaves_lengths_costs_and_prompts():
    history = History()
    history.learn([chain("a", 2), chain("a", 4), chain("b", 10, environment_s=5.0)])
    assert history.steps[0].counts == {2: 1.0, 4: 1.0, 10: 1.0}
    # 16 turns: 6 of 3 s and 10 of 6 s, of which 2 s and 5 s in the environment.
    assert history.turn_s == pytest.approx((6 * 3 + 10 * 6) / 16)
    assert history.action_s == pytest.approx((6 * 2 + 10 * 5) / 16)
    assert history.turn_tokens == 100
    assert history.prompts["a"].log_turns == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert history.prompts["b"].turn_s == pytest.approx(6.0)
    assert not history.predicts()  # nothing was predicted yet


def test_older_steps_fade_and_are_forgotten():
    history = History()
    for length in (10, 20, 30):
        history.learn([chain("a", length)])
    assert [(step.weight, step.counts) for step in history.steps] == [(1.0, {30: 1.0}), (0.2, {20: 1.0})]


def test_a_step_without_a_finished_chain_changes_nothing():
    history = History()
    history.learn([chain("a", 3)])
    before = history.turn_s, len(history.steps)
    history.learn([])
    history.learn([ChainRecord("a", 0, 1.0, 0.0, 0)])
    assert (history.turn_s, len(history.steps)) == before


def test_records_of_prompts_are_trusted_only_if_they_ranked_the_prompts_right():
    lengths = {f"prompt-{n}": 2 + n for n in range(10)}
    same, reverse = History(), History()
    for history in (same, reverse):
        history.learn([chain(name, length) for name, length in lengths.items()])
    same.learn([chain(name, length + 1) for name, length in lengths.items()])
    assert same.prompt_correlation == pytest.approx(1.0)
    assert same.predicts()
    reverse.learn([chain(name, 20 - length) for name, length in lengths.items()])
    assert reverse.prompt_correlation == pytest.approx(-1.0)
    assert not reverse.predicts()


def test_what_records_tell_of_costs_is_judged_apart_from_what_they_tell_of_lengths():
    """Ten prompts whose lengths come again. The ranks of what a turn takes do, too, or those of the last six or seven
    are reversed, or all: squared differences of ranks sum to 70 and 112, 1 − 6 · 70 / 990 = 0.58 and 0.32."""
    for same, correlation, told in (
        (10, 1.0, True),
        (4, 1 - 420 / 990, True),
        (3, 1 - 672 / 990, False),
        (0, -1.0, False),
    ):
        ranks = [*range(same), *reversed(range(same, 10))]
        history = History()
        history.learn([chain(f"p{n}", 5 + n, environment_s=1.0 + n) for n in range(10)])
        assert not history.predicts_costs()  # nothing was predicted yet
        history.learn([chain(f"p{n}", 5 + n, environment_s=1.0 + rank) for n, rank in enumerate(ranks)])
        assert history.predicts()
        assert history.prompt_cost_correlation == pytest.approx(correlation)
        assert history.predicts_costs() is told


def test_a_prompts_record_counts_as_eight_siblings_at_most_and_the_newest_count_first():
    history = History()
    history.learn([chain("a", 4)] * 6)
    history.learn([chain("a", 16)] * 6)
    record = history.prompts["a"]
    assert record.chains == 8
    # Six new ones and the two that are left of the old: (2 ln 4 + 6 ln 16) / 8.
    assert record.log_turns == pytest.approx((2 * math.log(4) + 6 * math.log(16)) / 8)
    history.learn([chain("a", 8)] * 20)
    assert history.prompts["a"].log_turns == pytest.approx(math.log(8))


def test_a_written_history_reads_back_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "deep" / "history.json"
    assert read_history(path) == History()
    history = History()
    history.learn([chain("a", 3), chain("b", 5)])
    write_history(path, history)
    write_history(path, history)
    assert read_history(path) == history
    assert [entry.name for entry in path.parent.iterdir()] == ["history.json"]


@pytest.mark.parametrize(("text", "says"), [("[1]", "not a history"), ("{", "not a history"), ('{"version": 9}', "9")])
def test_a_file_that_is_no_history_is_refused(tmp_path, text, says):
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=says):
        read_history(path)


def test_the_file_holds_no_more_prompts_than_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr("makespan.rollout.history.PROMPTS", 3)
    history = History()
    for n in range(5):
        history.learn([chain(f"prompt-{n}", 3)])
    history.learn([chain("prompt-3", 3)])
    write_history(tmp_path / "h.json", history)
    assert list(json.loads((tmp_path / "h.json").read_text())["prompts"]) == ["prompt-2", "prompt-4", "prompt-3"]
