"""The benchmark's own executor and checker, as oracles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from makespan.envs.bfcl.data import Scenario

CHECKS = {
    "multi_turn:empty_turn_model_response": "no_call",
    "multi_turn:instance_state_mismatch": "state",
    "multi_turn:execution_response_mismatch": "response",
}
"""The checker's error types and what `Verdict.check` calls them."""

Oracle = Callable[[Scenario, Sequence[Sequence[Sequence[str]]]], tuple[bool, str | None]]
Executor = Callable[[Scenario, Sequence[str]], list[str]]


@pytest.fixture
def fresh_names() -> Iterator[Iterator[str]]:
    """Names under which the executor has no instances yet: it keeps them in globals, removed afterwards."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

    before = set(vars(multi_turn_utils))
    yield (f"oracle{number}" for number in itertools.count())
    for name in set(vars(multi_turn_utils)) - before:
        delattr(multi_turn_utils, name)


@pytest.fixture
def oracle(fresh_names: Iterator[str]) -> Oracle:
    """The verdict of the benchmark's checker: whether it is valid and, if not, which check failed."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    def verdict(scenario: Scenario, turns: Sequence[Sequence[Sequence[str]]]) -> tuple[bool, str | None]:
        truth = [list(turn) for turn in scenario.ground_truth]
        result: dict[str, Any] = multi_turn_checker(turns, truth, _entry(scenario), "", next(fresh_names))
        return result["valid"], CHECKS.get(result.get("error_type", ""))

    return verdict


@pytest.fixture
def executor(fresh_names: Iterator[str]) -> Executor:
    """What the benchmark's executor answers to calls, in a fresh state."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

    def responses(scenario: Scenario, calls: Sequence[str]) -> list[str]:
        entry = _entry(scenario)
        answers, _ = execute_multi_turn_func_call(
            list(calls),
            entry["initial_config"],
            entry["involved_classes"],
            next(fresh_names),
            entry["id"],
            long_context="long_context" in entry["id"],
            is_evaL_run=True,
        )
        return list(answers)

    return responses


def _entry(scenario: Scenario) -> dict[str, Any]:
    return {
        "id": scenario.task_id,
        "initial_config": scenario.initial_config,
        "involved_classes": list(scenario.classes),
    }
