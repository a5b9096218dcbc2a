from __future__ import annotations

import random
from collections import Counter

import pytest

from makespan.envs.bfcl import reward
from makespan.envs.bfcl.apis import ApiSession
from makespan.envs.bfcl.calls import Call
from makespan.envs.bfcl.data import CATEGORIES, Scenario, scenario, tasks
from makespan.envs.bfcl.reward import RewardCheck, judge, parse_call, state_differences
from makespan.rollout.errors import FormatError

from .conftest import Oracle
from .mutations import MUTATIONS

Steps = list[list[list[str]]]


def steps_of(turns: list[list[str]], rng: random.Random | None = None) -> Steps:
    """One call a step, or, at random, all calls of a turn in one step."""
    return [[turn] if turn and rng and rng.random() < 0.3 else [[call] for call in turn] for turn in turns]


def first_task() -> tuple[Scenario, list[list[str]]]:
    chosen = scenario(tasks("multi_turn_base", 1)[0])
    return chosen, [list(turn) for turn in chosen.ground_truth]


def disagreements(category: str, every: int, oracle: Oracle) -> tuple[Counter[bool], Counter[str], list[object]]:
    """Runs each mutation on each `every`-th task; counts the oracle's verdicts, and lists where ours is another."""
    verdicts: Counter[bool] = Counter()
    checks: Counter[str] = Counter()
    different: list[object] = []
    for task in tasks(category)[::every]:
        chosen = scenario(task)
        for mutate in MUTATIONS:
            rng = random.Random(f"{task.task_id} {mutate.__name__}")
            turns = [list(turn) for turn in chosen.ground_truth]
            mutate(turns, list(chosen.classes), rng)
            steps = steps_of(turns, rng)
            expected, failed_check = oracle(chosen, steps)
            ours = judge(chosen, steps)
            verdicts[expected] += 1
            checks[failed_check or "valid"] += 1
            if (ours.valid, ours.check) != (expected, failed_check):
                different.append((task.task_id, mutate.__name__, expected, failed_check, ours))
    return verdicts, checks, different


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_ground_truth_solves_its_task_as_the_benchmarks_checker_says(category: str, oracle: Oracle) -> None:
    for task in tasks(category):
        chosen = scenario(task)
        steps = steps_of([list(turn) for turn in chosen.ground_truth])
        assert oracle(chosen, steps) == (True, None)
        verdict = judge(chosen, steps)
        assert (verdict.valid, verdict.reward, verdict.check) == (True, 1.0, None), task.task_id


@pytest.mark.parametrize(("category", "every"), [(name, 1 if name == "multi_turn_base" else 4) for name in CATEGORIES])
def test_mutated_ground_truths_are_judged_as_by_the_benchmarks_checker(
    category: str, every: int, oracle: Oracle
) -> None:
    verdicts, checks, different = disagreements(category, every, oracle)
    assert different == []
    total = sum(verdicts.values())
    assert total == len(MUTATIONS) * 200 // every
    assert min(verdicts[True], verdicts[False]) > total / 4  # both verdicts are common, so agreement means something
    assert min(checks[check] for check in ("no_call", "state", "response")) > total / 100


def test_a_checker_without_the_state_check_would_be_found_out(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "state_differences", lambda session, truth: [])
    assert len(disagreements("multi_turn_base", 10, oracle)[2]) >= 10


def test_a_checker_without_the_response_check_would_be_found_out(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward, "_first_missing", lambda expected, responses: None)
    assert len(disagreements("multi_turn_base", 10, oracle)[2]) >= 10


def test_a_wrong_state_is_named_with_its_turn_and_attribute() -> None:
    chosen, turns = first_task()
    turns[0][2] = "mv(source='final_report.pdf', destination='elsewhere')"
    verdict = judge(chosen, steps_of(turns))
    assert (verdict.valid, verdict.reward, verdict.user_turn, verdict.check) == (False, 0.0, 0, "state")
    assert verdict.detail == "different: GorillaFileSystem.root"


def test_a_missing_response_is_named_with_its_turn_and_text() -> None:
    chosen, turns = first_task()
    turns[2] = ["ls()"]
    verdict = judge(chosen, steps_of(turns))
    assert (verdict.valid, verdict.user_turn, verdict.check) == (False, 2, "response")
    assert verdict.detail.startswith('missing: {"sorted_content": "Year2024 This is the final report')


def test_a_turn_without_a_call_fails_even_if_everything_was_done_before() -> None:
    chosen, turns = first_task()
    turns[1].append(turns[2].pop())
    verdict = judge(chosen, steps_of(turns))
    assert (verdict.valid, verdict.user_turn, verdict.check) == (False, 2, "no_call")


def test_a_repeated_result_must_be_obtained_as_often_as_in_the_ground_truth() -> None:
    base, _ = first_task()
    chosen = Scenario(
        task_id="t",
        category="multi_turn_base",
        classes=("MathAPI",),
        initial_config={},
        user_turns=base.user_turns[:1],
        held_out={},
        ground_truth=(("add(1, 2)", "add(2, 1)"),),
    )
    once = judge(chosen, [[["add(0, 3)"], ["add(5, 5)"]]])
    assert (once.valid, once.check, once.detail) == (False, "response", 'missing: {"result": 3}')
    assert judge(chosen, [[["add(0, 3)", "add(5, 5)", "add(3, 0)"]]]).valid


def test_the_first_failed_turn_decides() -> None:
    chosen, turns = first_task()
    verdict = judge(chosen, steps_of([[], [], [], turns[3]]))
    assert (verdict.valid, verdict.user_turn, verdict.check) == (False, 0, "no_call")


def test_an_attempt_that_ends_early_is_truncated() -> None:
    chosen, turns = first_task()
    verdict = judge(chosen, steps_of(turns[:3]))
    assert (verdict.valid, verdict.user_turn, verdict.check) == (False, 3, "truncated")
    assert verdict.detail == "ended after 3 of 4 user turns"


def test_a_failed_verdict_survives_truncation() -> None:
    chosen, _ = first_task()
    check = RewardCheck(chosen)
    assert check.end_turn(ApiSession(chosen)).check == "no_call"
    assert check.truncate("late").check == "no_call"


def test_directories_that_contain_themselves_are_compared_without_end() -> None:
    chosen, _ = first_task()
    session, other = ApiSession(chosen), ApiSession(chosen)
    assert state_differences(session, other) == []
    for each in (session, other):
        each.execute(Call("cp", ("document", "document")))
    assert state_differences(session, other) == ["GorillaFileSystem.root"]


def test_a_ground_truth_that_is_not_one_call_is_a_format_error() -> None:
    for text in ("ls", "ls(), pwd()", "cd(folder=x)", ""):
        with pytest.raises(FormatError, match="not one call with literal arguments"):
            parse_call(text)
