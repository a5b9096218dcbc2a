from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makespan.envs.bfcl import CATEGORIES, BfclEnvironment, script, tasks
from makespan.envs.bfcl.data import function_docs, scenario
from makespan.envs.bfcl.environment import MAX_OBSERVATION_CHARS, STEPS_PER_TURN
from makespan.envs.bfcl.reward import judge
from makespan.rollout.environment import Action, StepResult, SyncEnvironment, TaskRefused
from makespan.rollout.errors import MakespanError
from makespan.rollout.trajectory import Task

from .mutations import MUTATIONS

FIRST = tasks("multi_turn_base", 1)[0]


def run(task: Task, actions: Sequence[str]) -> list[StepResult]:
    environment: SyncEnvironment = BfclEnvironment()
    environment.reset(task)
    results = [environment.step(Action(text)) for text in actions]
    environment.close()
    return results


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_scripted_ground_truth_of_every_task_earns_the_reward(category: str) -> None:
    for task in tasks(category):
        results = run(task, script(task))
        assert [result.terminated for result in results] == [False] * (len(results) - 1) + [True], task.task_id
        assert not any(result.truncated or result.info.get("malformed") for result in results)
        assert [result.reward for result in results] == [0.0] * (len(results) - 1) + [1.0], task.task_id


def test_a_script_with_one_argument_changed_earns_nothing() -> None:
    actions = list(script(FIRST))
    assert actions[2] == "[mv(source='final_report.pdf', destination='temp')]"
    actions[2] = "[mv(source='final_report.pdf', destination='archive')]"
    last = run(FIRST, actions)[-1]
    assert (last.terminated, last.reward) == (True, 0.0)
    assert last.info["verdict"] == {
        "valid": False,
        "user_turn": 0,
        "check": "state",
        "detail": "different: GorillaFileSystem.root",
    }


def test_the_reward_is_the_checks_verdict_on_the_calls_made() -> None:
    rewards = set()
    for task, mutate in zip(tasks("multi_turn_base"), MUTATIONS * 20, strict=False):
        chosen = scenario(task)
        turns = [list(turn) for turn in chosen.ground_truth]
        mutate(turns, list(chosen.classes), random.Random(task.task_id))
        actions = [action for turn in turns for action in [*(f"[{call}]" for call in turn), "Done."]]
        expected = judge(chosen, [[[call] for call in turn] for turn in turns])
        assert run(task, actions)[-1].reward == expected.reward, task.task_id
        rewards.add(expected.reward)
    assert rewards == {0.0, 1.0}


def test_the_first_observation_offers_the_functions_and_asks() -> None:
    observation = BfclEnvironment().reset(FIRST)
    system, user = observation.messages
    assert (system.role, user.role) == ("system", "user")
    lines = [msgspec.json.decode(line) for line in system.content.splitlines() if line.startswith("{")]
    assert [line["name"] for line in lines] == [
        doc.name for name in ("TwitterAPI", "GorillaFileSystem") for doc in function_docs(name)
    ]
    assert next(line for line in lines if line["name"] == "cat")["parameters"]["required"] == ["file_name"]
    assert user.content.startswith("Move 'final_report.pdf' within document directory")
    assert observation.info == {"user_turns": 4}


def test_calls_are_answered_by_tools_and_the_end_of_a_turn_by_the_user() -> None:
    listed, nothing, asked = run(FIRST, ["[ls(), pwd()]", "[mkdir('a')]", "I am done."])
    assert [(message.role, message.content) for message in listed.observation.messages] == [
        ("tool", '{"current_directory_content": ["document", "archive"]}'),
        ("tool", '{"current_working_directory": "/workspace"}'),
    ]
    assert listed.info == {"user_turn": 0, "malformed": False}
    assert [message.content for message in nothing.observation.messages] == ["None"]
    (message,) = asked.observation.messages
    assert message.role == "user"
    assert message.content.startswith("Perform a detailed search using grep")
    assert asked.info == {"user_turn": 1, "malformed": False}


def test_a_malformed_call_is_an_observation_and_nothing_of_it_happens() -> None:
    malformed, *rest = run(FIRST, ["[mkdir('spoilt'), cd(folder=home)]", *script(FIRST)])
    assert malformed.info == {"user_turn": 0, "malformed": True}
    (message,) = malformed.observation.messages
    assert message.role == "tool"
    assert message.content == (
        "Malformed call: argument 'folder' of cd is not a literal value (Name). Nothing was executed."
    )
    assert rest[-1].reward == 1.0
    assert run(FIRST, ["[mkdir('spoilt'), cd('home')]", *script(FIRST)])[-1].reward == 0.0  # read, it counts


def test_functions_held_out_are_offered_in_their_turn_and_not_before() -> None:
    for task in tasks("multi_turn_miss_func"):
        chosen = scenario(task)
        ((turn, names),) = chosen.held_out.items()
        environment = BfclEnvironment()
        shown = [environment.reset(task).messages]
        shown += [environment.step(Action("Done.")).observation.messages for _ in range(turn)]
        texts = ["".join(message.content for message in messages) for messages in shown]
        for name in names:
            offers = [f'"name":"{name}"' in text for text in texts]
            assert offers == [False] * turn + [True], (task.task_id, name)


def test_the_benchmarks_number_of_steps_in_a_turn_is_allowed_and_one_more_truncates() -> None:
    calls = ["[pwd()]"] * (STEPS_PER_TURN - 3)
    assert STEPS_PER_TURN == 20
    assert run(FIRST, [*calls, *script(FIRST)])[-1].reward == 1.0
    results = run(FIRST, [*calls, *script(FIRST)[:3], "[pwd(]"])
    assert not any(result.truncated for result in results[:-1])
    assert (results[-1].truncated, results[-1].terminated, results[-1].reward) == (True, False, 0.0)
    assert results[-1].info["verdict"]["check"] == "truncated"


def test_the_steps_of_one_user_turn_do_not_count_in_the_next() -> None:
    actions = ["[pwd()]"] * 15
    for action in script(FIRST):
        actions += [action, *["[pwd()]"] * 15] if action == "Done." else [action]
    assert run(FIRST, actions[:-15])[-1].reward == 1.0


@pytest.mark.parametrize("used", [False, True])
def test_a_step_without_a_task_in_progress_is_an_error(used: bool) -> None:
    environment = BfclEnvironment()
    if used:
        environment.reset(FIRST)
        for action in script(FIRST):
            environment.step(Action(action))
    with pytest.raises(MakespanError, match="call reset"):
        environment.step(Action("[ls()]"))


def test_an_environment_can_be_reset_to_another_task() -> None:
    environment = BfclEnvironment()
    for task in (FIRST, FIRST, tasks("multi_turn_miss_param", 1)[0]):
        environment.reset(task)
        environment.step(Action("[mkdir('left_behind')]"))
        environment.reset(task)
        assert [environment.step(Action(action)) for action in script(task)][-1].reward == 1.0


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(TaskRefused, match="multi_turn_base_0 to multi_turn_base_199"):
        BfclEnvironment().reset(Task(task_id="multi_turn_base_4711", environment="bfcl"))


def test_long_results_are_shown_up_to_a_limit() -> None:
    write = "[touch('f'), echo(content='" + "x" * 30_000 + "', file_name='f')]"
    results = run(FIRST, [write, f"[{', '.join(['cat(file_name=f)'] * 10)}]".replace("=f", "='f'")])
    messages = results[1].observation.messages
    assert len(messages) == 10
    shown = [len(message.content) for message in messages]
    assert shown[0] == len('{"file_content": ""}') + 30_000
    assert MAX_OBSERVATION_CHARS <= sum(shown) <= MAX_OBSERVATION_CHARS + 10 * 40
    assert messages[-1].content == " … (30,020 characters more)"


def test_what_an_agent_escapes_can_be_sent() -> None:
    (result,) = run(
        FIRST, ["[mkdir('\\ud800'), mkdir('\\ud800'), cp('\\ud800', 'document'), cp('\\ud800', 'document')]"]
    )
    sent = msgspec.json.decode(msgspec.json.encode(result), type=StepResult)
    assert sent.observation.messages[-1].content == (
        "Error during execution: Directory '\\ud800' already exists in directory 'document'."
    )


CALLISH = st.lists(
    st.sampled_from(
        ["[", "]", "(", ")", "cd", "ls", "find", "mv", "cp", "'a'", "'/'", "1", "-", "=", ",", "{", "}", " "]
    )
    | st.text(max_size=2),
    max_size=20,
).map("".join)
CALLS = st.lists(
    st.tuples(
        st.sampled_from([doc.name for name in ("GorillaFileSystem", "TwitterAPI") for doc in function_docs(name)]),
        st.lists(st.none() | st.integers(-3, 3) | st.sampled_from(["a", "document", "/", "..", "\udc00"]), max_size=3),
    ),
    max_size=6,
).map(lambda calls: f"[{', '.join(f'{name}({repr(args)[1:-1]})' for name, args in calls)}]")


@settings(deadline=None)
@given(st.lists(CALLISH | CALLS | st.just("Done."), max_size=8))
def test_no_text_makes_the_environment_raise(actions: list[str]) -> None:
    environment = BfclEnvironment()
    environment.reset(FIRST)
    for text in actions:
        result = environment.step(Action(text))
        msgspec.json.encode(result)
        if result.terminated:
            return


def test_two_sessions_of_one_task_do_not_see_each_other() -> None:
    one, other = BfclEnvironment(), BfclEnvironment()
    one.reset(FIRST)
    other.reset(FIRST)
    assert "Error" not in one.step(Action("[mkdir('mine')]")).observation.messages[0].content
    assert "mine" in one.step(Action("[ls()]")).observation.messages[0].content
    assert "mine" not in other.step(Action("[ls()]")).observation.messages[0].content
    assert [other.step(Action(action)) for action in script(FIRST)][-1].reward == 1.0
    assert [one.step(Action(action)) for action in script(FIRST)][-1].reward == 0.0


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_100_sessions_in_threads_go_as_each_would_alone(frequent_switches: None) -> None:
    # What shares state inside the benchmark: precision (MathAPI), weather (VehicleControlAPI), default lists
    # (TwitterAPI) and credit cards (TravelAPI).
    shared = {
        "MathAPI": [f"[logarithm(10, 3, {digits}), square_root(7, {digits})]" for digits in range(3, 12)],
        "VehicleControlAPI": ["[get_outside_temperature_from_google()]"] * 9,
        "TwitterAPI": ["[post_tweet('a'), mention(0, ['@b']), mention(3, ['@c']), post_tweet('d')]"] * 3,
        "TravelAPI": ["[get_all_credit_cards(), list_all_airports()]"] * 3,
    }

    def attempt(task: Task) -> list[StepResult]:
        extra = [action for name in scenario(task).classes for action in shared.get(name, [])]
        random.Random(task.task_id).shuffle(extra)
        return run(task, [*extra[:17], *script(task)])

    chosen = [task for name in CATEGORIES for task in tasks(name)]
    sample = random.Random(1).sample(chosen, 50) * 2
    alone = [attempt(task) for task in sample]
    with ThreadPoolExecutor(100) as pool:
        together = list(pool.map(attempt, sample))
    assert together == alone
