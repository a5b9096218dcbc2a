"""A trajectory always comes back, with consistent tokens, whatever happens to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import ray
from verl.workers.rollout.replica import TokenOutput

from makespan.integrations.verl.reporter import Unreported
from makespan.rollout.environment import EnvironmentFailure
from makespan.rollout.errors import EnvironmentUnreachable
from makespan.rollout.trajectory import Task
from tests.integrations.verl.loop_fakes import (
    ROW,
    FakeClient,
    FakeEnvironment,
    ReportedTo,
    assert_failed,
    ids_of,
    make_loop,
    run,
)

PROMPT = ids_of("<open> user ask <end> <open> assistant")


def test_a_finished_trajectory_has_its_exact_tokens_mask_log_probabilities_and_reward() -> None:
    client, environment = FakeClient("one two <end>", "done <end>"), FakeEnvironment()
    output = run(lambda: make_loop(client, environment))
    told = ids_of("<open> tool told <end> <open> assistant")
    assert output.prompt_ids == PROMPT
    assert output.response_ids == [*ids_of("one two <end>"), *told, *ids_of("done <end>")]
    assert output.response_mask == [1] * 3 + [0] * len(told) + [1] * 2
    assert output.response_logprobs == [-0.5] * 3 + [0.0] * len(told) + [-0.5] * 2
    assert output.reward_score == 1.0
    assert output.extra_fields["reward_extra_info"] == {"score": 1.0, "finished": 1.0, "failed": 0.0}
    assert output.num_turns == 4  # user, assistant, tool, assistant
    assert environment.actions == ["one two", "done"]
    assert environment.tasks == [Task(task_id="t7", environment="x")]


def test_its_figures_are_the_sums_of_what_client_and_environment_said() -> None:
    output = run(lambda: make_loop(FakeClient("one two <end>", "done <end>"), FakeEnvironment()))
    figures = output.extra_fields["makespan"]
    assert (figures["state"], figures["turns"], figures["generated_tokens"]) == ("finished", 2, 5)
    assert (figures["slot_queue_s"], figures["environment_s"]) == (0.25 + 2 * 0.5, 0.5 + 2 * 1.0)
    assert figures["prompt_tokens"] == 6 + (6 + 3 + 6)
    assert figures["cached_tokens"] == 2 * 3
    # Turn 2: the replicas had computed 6 + 3 - 1 = 8 tokens of this context, and 3 of them were cached.
    assert figures["recomputed_tokens"] == 8 - 3


def test_each_turns_prompt_begins_with_the_last_turns_prompt_and_generated_ids() -> None:
    client = FakeClient("one <end>", "two <end>", "done <end>")
    run(lambda: make_loop(client, FakeEnvironment()))
    prompts = [request["prompt_ids"] for request in client.requests]
    for earlier, later, said in zip(prompts, prompts[1:], ("one <end>", "two <end>"), strict=False):
        assert later[: len(earlier) + 2] == earlier + ids_of(said)


def test_the_router_is_told_of_each_turn_without_its_prompt_and_of_the_end() -> None:
    client = FakeClient("one <end>", "done <end>")
    run(lambda: make_loop(client, FakeEnvironment()))
    assert [request["request_id"] for request in client.requests] == ["g_1|0", "g_1|1"]
    assert client.requests[1]["sampling_params"]["extra_args"] == {
        "makespan": {
            "trajectory": "g_1", "turn": 1, "context_tokens": 6 + 2 + 6, "group": "g", "worker": "", "reported": False,
        }
    }  # fmt: skip
    assert client.over == ["g_1"]


def test_our_router_hears_what_became_of_each_turn() -> None:
    client = ReportedTo("one <end>", "done <end>")
    run(lambda: make_loop(client, FakeEnvironment()))
    assert all(request["sampling_params"]["extra_args"]["makespan"]["reported"] for request in client.requests)
    assert client.reports == [("g_1|0", 6 + 2, 3, 4), ("g_1|1", (6 + 2 + 6) + 2, 3, 4)]


@pytest.mark.parametrize(("threatens", "returning"), [(False, 0), (True, -1)])
def test_where_vllm_orders_by_priority_turns_under_way_go_first_and_what_will_be_late_before_them(
    threatens: bool, returning: int
) -> None:
    client, told = FakeClient("one <end>", "done <end>"), Told()
    told.threatens = lambda trajectory_id: threatens and trajectory_id == "g_1"  # type: ignore[method-assign]

    def made(**rollout: Any) -> Any:
        loop = make_loop(client, FakeEnvironment(), rollout=rollout)
        loop._reporter = lambda *_: told
        return loop

    run(lambda: made(scheduling_policy="priority"))
    assert [request["priority"] for request in client.requests] == [1, returning]
    client = FakeClient("one <end>", "done <end>")
    run(lambda: made(scheduling_policy="fcfs"))  # the control: there vLLM refuses a priority
    assert [request.get("priority") for request in client.requests] == [None, None]


class Told(Unreported):
    """The coordinator's line, with what it was told of inference."""

    def __init__(self) -> None:
        self.seconds: list[float | None] = []

    def inferred(self, trajectory_id: str, seconds: float | None, context_tokens: int) -> None:
        self.seconds.append(seconds)


@pytest.mark.parametrize(("versions", "counted"), [((4, 4), True), ((4, 5), False), ((5, 5), False)])
def test_a_turn_that_may_have_been_parked_for_new_weights_says_nothing_of_the_chains_speed(
    versions: tuple[int, int], counted: bool
) -> None:
    client, told = FakeClient("one <end>", "done <end>"), Told()
    generate, turns = client.generate, 0

    async def with_versions(**request: Any) -> TokenOutput:
        nonlocal turns
        output = await generate(**request)
        if turns:
            output.extra_fields.update(zip(("min_global_steps", "max_global_steps"), versions, strict=True))
        turns += 1
        return output

    client.generate = with_versions  # type: ignore[method-assign]

    def made() -> Any:
        loop = make_loop(client, FakeEnvironment())
        loop._reporter = lambda *_: told
        return loop

    run(made)
    assert [seconds is not None for seconds in told.seconds] == [True, counted]


def test_a_turn_that_is_cut_is_ended_by_a_token_that_is_not_trained_on() -> None:
    client = FakeClient("one two three <end>", "done <end>")
    output = run(lambda: make_loop(client, FakeEnvironment(), max_turn_tokens=2))
    told = ids_of("<end> <open> tool told <end> <open> assistant")
    assert output.response_ids == [*ids_of("one two"), *told, *ids_of("done <end>")]
    assert output.response_mask == [1, 1] + [0] * len(told) + [1, 1]


def test_limits_truncate_without_a_failure() -> None:
    by_turns = run(lambda: make_loop(FakeClient("one <end>", "two <end>"), FakeEnvironment(), max_turns=2))
    assert by_turns.extra_fields["makespan"]["state"] == "truncated"
    assert by_turns.response_ids[-2:] == ids_of("two <end>")
    full = run(lambda: make_loop(FakeClient("one two three"), FakeEnvironment(), response_length=3))
    assert (full.response_ids, full.extra_fields["makespan"]["state"]) == (ids_of("one two three"), "truncated")
    no_room = run(lambda: make_loop(FakeClient("one <end>"), FakeEnvironment(), response_length=8))
    assert (no_room.response_ids, no_room.extra_fields["makespan"]["state"]) == (ids_of("one <end>"), "truncated")


FAILURES = {
    "refused": EnvironmentFailure("refused", "no such task"),
    "raised": EnvironmentFailure("raised", "boom"),
    "unknown_outcome": EnvironmentFailure("unknown_outcome", "the worker died"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_an_environment_that_fails_gives_a_masked_failed_trajectory(kind: str) -> None:
    at_open = run(lambda: make_loop(FakeClient(), FakeEnvironment(fail_open=FAILURES[kind])))
    assert_failed(at_open, kind)
    environment = FakeEnvironment(fail_step=FAILURES[kind])
    at_step = run(lambda: make_loop(FakeClient("one two <end>"), environment))
    assert_failed(at_step, kind)
    assert at_step.response_ids == ids_of("one two <end>")
    assert environment.closed == 1


def test_an_unforeseen_error_gives_a_failed_trajectory_and_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    environment = FakeEnvironment(fail_step=OverflowError("integer is too large"))
    assert_failed(run(lambda: make_loop(FakeClient("one <end>"), environment)), "internal")
    assert environment.closed == 1
    assert "Traceback" in caplog.text


def test_a_server_that_nobody_reaches_gives_a_failed_trajectory() -> None:
    assert_failed(run(lambda: make_loop(FakeClient(), EnvironmentUnreachable("nobody answers"))), "unreachable")


def test_a_dead_replica_gives_a_failed_trajectory_and_closes_its_session() -> None:
    environment = FakeEnvironment()
    died = ray.exceptions.ActorDiedError()
    assert_failed(run(lambda: make_loop(FakeClient("one <end>", died), environment)), "replica")
    assert environment.closed == 1


def test_a_trajectory_over_its_deadline_fails_and_closes_its_session() -> None:
    client, environment = FakeClient(), FakeEnvironment()
    client.hang = True
    assert_failed(run(lambda: make_loop(client, environment, trajectory_deadline_s=0.05)), "timeout")
    assert (environment.closed, client.over) == (1, ["g_1"])


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"max_turn": 3}, ROW),
        ({}, {**ROW, "extra_info": {}}),
        ({}, {**ROW, "extra_info": {"task": "not json"}}),
        ({"prompt_length": 5}, ROW),
    ],
)
def test_a_mistake_of_the_user_gives_a_failed_trajectory_not_an_exception(
    settings: dict[str, Any], row: dict[str, Any]
) -> None:
    assert_failed(run(lambda: make_loop(FakeClient(), FakeEnvironment(), **settings), row), "configuration")


def test_cancellation_is_not_caught_and_leaves_no_session_and_no_count() -> None:
    client, environment = FakeClient(), FakeEnvironment()
    client.hang = True

    async def play() -> None:
        task = asyncio.create_task(make_loop(client, environment).run({}, **ROW))
        await client.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(play())
    assert (environment.closed, client.over) == (1, ["g_1"])


def test_with_verls_reward_function_the_loop_leaves_the_reward_to_it_and_reports_the_environments() -> None:
    output = run(lambda: make_loop(FakeClient("done <end>"), FakeEnvironment(), reward="trainer"))
    assert output.reward_score is None
    assert output.extra_fields["environment_reward"] == 1.0
    assert "reward_extra_info" not in output.extra_fields
