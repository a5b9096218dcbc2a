from __future__ import annotations

import pytest

from makespan.envs.bfcl import script, tasks
from makespan.rollout.environment import TaskRefused
from makespan.rollout.trajectory import Task


def test_each_call_is_an_action_and_each_user_turn_ends() -> None:
    assert script(tasks("multi_turn_miss_func", 1)[0]) == (
        "[cd(folder='document')]",
        "[mkdir(dir_name='temp')]",
        "[mv(source='final_report.pdf', destination='temp')]",
        "Done.",
        "[cd(folder='temp')]",
        "[grep(file_name='final_report.pdf',pattern='budget analysis')]",
        "Done.",
        "Done.",  # the function is held out: nothing can be done
        "[sort('final_report.pdf')]",
        "Done.",
        "[cd(folder='..')]",
        "[mv(source='previous_report.pdf',destination='temp')]",
        "[cd(folder='temp')]",
        "[diff(file_name1='final_report.pdf',file_name2='previous_report.pdf')]",
        "Done.",
    )


def test_a_user_turn_of_more_calls_than_steps_takes_two_calls_an_action() -> None:
    long_turn = [
        action for action in script(tasks("multi_turn_long_context", 1, 38)[0]) if action.count("(") > action.count("[")
    ]
    assert len(long_turn) == 17  # of 34 calls


def test_the_script_of_an_unknown_task_is_refused() -> None:
    with pytest.raises(TaskRefused):
        script(Task(task_id="multi_turn_base_900", environment="bfcl"))
