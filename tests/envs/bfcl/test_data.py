from __future__ import annotations

import subprocess
import sys

import pytest

from makespan.envs.bfcl import data
from makespan.envs.bfcl.data import CATEGORIES, BfclNotInstalled, api_class, function_docs, scenario, tasks
from makespan.rollout.environment import TaskRefused
from makespan.rollout.errors import ConfigError
from makespan.rollout.trajectory import Task


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_category_has_200_tasks_in_order(category: str) -> None:
    found = tasks(category)
    assert [task.task_id for task in found] == [f"{category}_{number}" for number in range(200)]
    assert {task.environment for task in found} == {"bfcl"}
    assert all(task.payload == {"category": category} for task in found)


def test_tasks_can_be_counted_off_from_any_start() -> None:
    assert [task.task_id for task in tasks("multi_turn_base", 2, 7)] == ["multi_turn_base_7", "multi_turn_base_8"]
    assert [task.task_id for task in tasks("multi_turn_base", start=199)] == ["multi_turn_base_199"]


@pytest.mark.parametrize(
    ("category", "count", "start", "message"),
    [
        ("multi_turn_bas", None, 0, "did you mean 'multi_turn_base'"),
        ("multi_turn_base", 0, 0, "count is 0; multi_turn_base has 1 to 200 tasks from task 0 on"),
        ("multi_turn_base", -1, 0, "count is -1"),
        ("multi_turn_base", 3, 198, "1 to 2 tasks from task 198 on"),
        ("multi_turn_base", None, 200, "start is 200; multi_turn_base has tasks 0 to 199"),
        ("multi_turn_base", None, -1, "start is -1"),
    ],
)
def test_a_range_outside_the_benchmark_is_a_config_error(
    category: str, count: int | None, start: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tasks(category, count, start)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(task_id="multi_turn_base_200", environment="bfcl"), "multi_turn_base_0 to multi_turn_base_199"),
        (Task(task_id="simple_python_3", environment="bfcl"), "of category 'simple_python'"),
        (Task(task_id="", environment="bfcl"), "of category ''"),
        (
            Task(task_id="multi_turn_base_1", environment="bfcl", payload={"category": "multi_turn_miss_func"}),
            "no task 'multi_turn_base_1' in multi_turn_miss_func",
        ),
        (Task(task_id="multi_turn_base_1", environment="bfcl", payload={"category": ["x"]}), "has not"),
    ],
)
def test_a_task_that_the_benchmark_has_not_is_refused(task: Task, message: str) -> None:
    with pytest.raises(TaskRefused, match=message):
        scenario(task)


def test_a_scenario_is_what_the_benchmark_says() -> None:
    first = scenario(tasks("multi_turn_base", 1)[0])
    assert first.classes == ("TwitterAPI", "GorillaFileSystem")
    assert [len(messages) for messages in first.user_turns] == [1, 1, 1, 1]
    assert first.user_turns[1][0].role == "user"
    assert first.user_turns[1][0].content.startswith("Perform a detailed search using grep")
    assert first.ground_truth[2] == ("sort('final_report.pdf')",)
    assert not first.held_out
    assert not first.long_context
    held_out = scenario(tasks("multi_turn_miss_func", 1)[0])
    assert held_out.held_out == {3: ("sort",)}
    assert held_out.user_turns[3] == ()


def test_the_files_are_read_once() -> None:
    task = tasks("multi_turn_base", 1)[0]
    assert scenario(task) is scenario(task)
    assert function_docs("MathAPI") is function_docs("MathAPI")


def test_without_the_wheel_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)  # makes its import fail as if it were not there
    data._category.cache_clear()
    with pytest.raises(BfclNotInstalled, match=r"'bfcl_eval' is missing.*makespan\[bfcl\]") as caught:
        tasks("multi_turn_base")
    assert isinstance(caught.value, TaskRefused)


def test_without_a_package_that_the_api_classes_need_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"{data._API_PACKAGE}.math_api", raising=False)
    monkeypatch.setitem(sys.modules, "mpmath", None)
    with pytest.raises(BfclNotInstalled, match=r"'mpmath' is missing.*makespan\[bfcl\]"):
        api_class("MathAPI")


def test_a_wheel_with_other_contents_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(data._CLASS_FILES, "MathAPI", "no_such_file")
    function_docs.cache_clear()
    with pytest.raises(BfclNotInstalled, match="no data file multi_turn_func_doc/no_such_file"):
        function_docs("MathAPI")


def test_importing_the_package_imports_neither_the_wheel_nor_what_it_needs() -> None:
    code = "import sys, makespan.envs.bfcl; print([m for m in ('bfcl_eval', 'mpmath') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
