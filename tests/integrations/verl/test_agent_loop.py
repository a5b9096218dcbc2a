"""A trajectory always comes back, with consistent tokens, whatever happens to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from makespan.integrations.verl.agent_loop import EnvAgentLoop
from makespan.integrations.verl.reporter import Unreported
from makespan.integrations.verl.router import TurnEnd
from makespan.rollout.environment import Action, ActionTiming, EnvironmentFailure, Message, Observation, StepResult
from makespan.rollout.errors import EnvironmentUnreachable
from makespan.rollout.trajectory import Task

VOCABULARY = ["<end>", "<open>", "user", "assistant", "tool", "ask", "one", "two", "three", "done", "told"]
TEMPLATE = (
    "{% for m in messages %}<open> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<open> assistant {% endif %}"
)


def _tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="told"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>", chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def _ids(text: str) -> list[int]:
    return [VOCABULARY.index(word) for word in text.split()]


class FakeClient:
    """verl's client: says the texts of `says` one after another; notes what it was asked."""

    def __init__(self, *says: str | BaseException) -> None:
        self._says = list(says)
        self.requests: list[dict[str, Any]] = []
        self.over: list[str] = []
        self._load_balancer = self
        self.finish_trajectory = self
        self.hang = False
        self.asked = asyncio.Event()

    def remote(self, trajectory_id: str) -> None:
        self.over.append(trajectory_id)

    async def generate(self, **request: Any) -> TokenOutput:
        self.requests.append(request)
        self.asked.set()
        if self.hang:
            await asyncio.sleep(60)
        said = self._says.pop(0)
        if isinstance(said, BaseException):
            raise said
        ids = _ids(said)[: request["sampling_params"]["max_tokens"]]
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            num_preempted=0,
            extra_fields={"global_steps": 4, "min_global_steps": 4, "max_global_steps": 4, "num_cached_tokens": 3},
        )


class FakeEnvironment:
    """Answers each action with `told`; the action `done` ends the task with a reward of 1. Or fails as told to."""

    def __init__(self, *, fail_open: Exception | None = None, fail_step: Exception | None = None) -> None:
        self._fail_open, self._fail_step = fail_open, fail_step
        self.actions: list[str] = []
        self.closed = 0
        self.tasks: list[Task] = []

    async def open(self, trajectory_id: str, task: Task, **_: Any) -> tuple[FakeEnvironment, Observation, ActionTiming]:
        self.tasks.append(task)
        if self._fail_open:
            raise self._fail_open
        return self, Observation((Message("user", "ask"),)), ActionTiming("x.start", 0.25, 0.5)

    async def step(self, action: Action, **_: Any) -> tuple[StepResult, ActionTiming]:
        self.actions.append(action.text)
        if self._fail_step:
            raise self._fail_step
        done = action.text == "done"
        observation = Observation(() if done else (Message("tool", "told"),))
        result = StepResult(observation=observation, reward=float(done), terminated=done)
        return result, ActionTiming("x.step", 0.5, 1.0)

    async def close(self) -> None:
        self.closed += 1


def _loop(
    client: FakeClient,
    backend: Any,
    *,
    response_length: int = 64,
    prompt_length: int = 16,
    rollout: Any = None,
    **settings: Any,
) -> Any:
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {
                    "response_length": response_length,
                    "prompt_length": prompt_length,
                    "calculate_log_probs": True,
                    **(rollout or {}),
                }
            },
            "data": {},
            "trainer": {"project_name": "p", "experiment_name": "e"},
        }
    )
    loop = EnvAgentLoop(
        trainer_config=DictConfigWrap(config), server_manager=client, tokenizer=_tokenizer(), processor=None,
        dataset_cls=None, data_config=DictConfigWrap(config.data), hf_model_type="granitemoehybrid",
        name="makespan_env", tools=None, **{"address": "tcp://nowhere:1", **settings},
    )  # fmt: skip

    async def given(_settings: Any) -> Any:
        if isinstance(backend, Exception):
            raise backend
        return backend

    loop._backend = given
    return loop


ROW = {"uid": "g", "session_id": 1, "global_steps": 5, "extra_info": {"task": '{"task_id": "t7", "environment": "x"}'}}


def _run(make: Callable[[], Any], row: dict[str, Any] = ROW) -> AgentLoopOutput:
    async def play() -> AgentLoopOutput:
        output: AgentLoopOutput = await make().run({"temperature": 1.0, "logprobs": True}, **row)
        return output

    return asyncio.run(play())


PROMPT = _ids("<open> user ask <end> <open> assistant")


def test_a_finished_trajectory_has_its_exact_tokens_mask_log_probabilities_and_reward() -> None:
    client, environment = FakeClient("one two <end>", "done <end>"), FakeEnvironment()
    output = _run(lambda: _loop(client, environment))
    told = _ids("<open> tool told <end> <open> assistant")
    assert output.prompt_ids == PROMPT
    assert output.response_ids == [*_ids("one two <end>"), *told, *_ids("done <end>")]
    assert output.response_mask == [1] * 3 + [0] * len(told) + [1] * 2
    assert output.response_logprobs == [-0.5] * 3 + [0.0] * len(told) + [-0.5] * 2
    assert output.reward_score == 1.0
    assert output.extra_fields["reward_extra_info"] == {"score": 1.0, "finished": 1.0, "failed": 0.0}
    assert output.num_turns == 4  # user, assistant, tool, assistant
    assert environment.actions == ["one two", "done"]
    assert environment.tasks == [Task(task_id="t7", environment="x")]


def test_its_figures_are_the_sums_of_what_client_and_environment_said() -> None:
    output = _run(lambda: _loop(FakeClient("one two <end>", "done <end>"), FakeEnvironment()))
    figures = output.extra_fields["makespan"]
    assert (figures["state"], figures["turns"], figures["generated_tokens"]) == ("finished", 2, 5)
    assert (figures["slot_queue_s"], figures["environment_s"]) == (0.25 + 2 * 0.5, 0.5 + 2 * 1.0)
    assert figures["prompt_tokens"] == 6 + (6 + 3 + 6)
    assert figures["cached_tokens"] == 2 * 3
    # Turn 2: the replicas had computed 6 + 3 - 1 = 8 tokens of this context, and 3 of them were cached.
    assert figures["recomputed_tokens"] == 8 - 3


def test_each_turns_prompt_begins_with_the_last_turns_prompt_and_generated_ids() -> None:
    client = FakeClient("one <end>", "two <end>", "done <end>")
    _run(lambda: _loop(client, FakeEnvironment()))
    prompts = [request["prompt_ids"] for request in client.requests]
    for earlier, later, said in zip(prompts, prompts[1:], ("one <end>", "two <end>"), strict=False):
        assert later[: len(earlier) + 2] == earlier + _ids(said)


def test_the_router_is_told_of_each_turn_without_its_prompt_and_of_the_end() -> None:
    client = FakeClient("one <end>", "done <end>")
    _run(lambda: _loop(client, FakeEnvironment()))
    assert [request["request_id"] for request in client.requests] == ["g_1|0", "g_1|1"]
    assert client.requests[1]["sampling_params"]["extra_args"] == {
        "makespan": {
            "trajectory": "g_1", "turn": 1, "context_tokens": 6 + 2 + 6, "group": "g", "worker": "", "reported": False,
        }
    }  # fmt: skip
    assert client.over == ["g_1"]


class ReportedTo(FakeClient):
    """With makespan's router behind it, which wants to hear what became of a turn."""

    def __init__(self, *says: str) -> None:
        super().__init__(*says)
        self.reports: list[tuple[Any, ...]] = []
        self.turn_over = SimpleNamespace(remote=self._hear)

    def _hear(self, *report: Any) -> asyncio.Future[TurnEnd]:
        self.reports.append(report)
        end: asyncio.Future[TurnEnd] = asyncio.get_running_loop().create_future()
        end.set_result(TurnEnd(came_back=len(self.reports) > 1, replicas=10 - len(self.reports)))
        return end


def test_our_router_hears_what_became_of_each_turn() -> None:
    client = ReportedTo("one <end>", "done <end>")
    _run(lambda: _loop(client, FakeEnvironment()))
    assert all(request["sampling_params"]["extra_args"]["makespan"]["reported"] for request in client.requests)
    assert client.reports == [("g_1|0", 6 + 2, 3, 4), ("g_1|1", (6 + 2 + 6) + 2, 3, 4)]


@pytest.mark.parametrize(("threatens", "returning"), [(False, 0), (True, -1)])
def test_where_vllm_orders_by_priority_turns_under_way_go_first_and_what_will_be_late_before_them(
    threatens: bool, returning: int
) -> None:
    client, told = FakeClient("one <end>", "done <end>"), Told()
    told.threatens = lambda trajectory_id: threatens and trajectory_id == "g_1"  # type: ignore[method-assign]

    def made(**rollout: Any) -> Any:
        loop = _loop(client, FakeEnvironment(), rollout=rollout)
        loop._reporter = lambda *_: told
        return loop

    _run(lambda: made(scheduling_policy="priority"))
    assert [request["priority"] for request in client.requests] == [1, returning]
    client = FakeClient("one <end>", "done <end>")
    _run(lambda: made(scheduling_policy="fcfs"))  # the control: there vLLM refuses a priority
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
        loop = _loop(client, FakeEnvironment())
        loop._reporter = lambda *_: told
        return loop

    _run(made)
    assert [seconds is not None for seconds in told.seconds] == [True, counted]


def test_a_turn_that_is_cut_is_ended_by_a_token_that_is_not_trained_on() -> None:
    client = FakeClient("one two three <end>", "done <end>")
    output = _run(lambda: _loop(client, FakeEnvironment(), max_turn_tokens=2))
    told = _ids("<end> <open> tool told <end> <open> assistant")
    assert output.response_ids == [*_ids("one two"), *told, *_ids("done <end>")]
    assert output.response_mask == [1, 1] + [0] * len(told) + [1, 1]


def test_limits_truncate_without_a_failure() -> None:
    by_turns = _run(lambda: _loop(FakeClient("one <end>", "two <end>"), FakeEnvironment(), max_turns=2))
    assert by_turns.extra_fields["makespan"]["state"] == "truncated"
    assert by_turns.response_ids[-2:] == _ids("two <end>")
    full = _run(lambda: _loop(FakeClient("one two three"), FakeEnvironment(), response_length=3))
    assert (full.response_ids, full.extra_fields["makespan"]["state"]) == (_ids("one two three"), "truncated")
    no_room = _run(lambda: _loop(FakeClient("one <end>"), FakeEnvironment(), response_length=8))
    assert (no_room.response_ids, no_room.extra_fields["makespan"]["state"]) == (_ids("one <end>"), "truncated")


def _is_failed(output: AgentLoopOutput, kind: str) -> None:
    assert output.extra_fields["makespan"]["state"] == "failed"
    assert output.extra_fields["makespan"]["failure"] == kind
    assert len(output.prompt_ids) > 0
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs) > 0
    assert not any(output.response_mask)
    assert not any(output.response_logprobs)
    assert output.reward_score == 0.0
    assert output.extra_fields["reward_extra_info"] == {"score": 0.0, "finished": 0.0, "failed": 1.0}
    for field in ("global_steps", "min_global_steps", "max_global_steps"):
        assert output.extra_fields[field] == 4  # an integer, as verl's metrics need
    # What verl stores has the same fields as any other trajectory's.
    assert set(output.as_dict()) == set(_run(lambda: _loop(FakeClient("done <end>"), FakeEnvironment())).as_dict())


FAILURES = {
    "refused": EnvironmentFailure("refused", "no such task"),
    "raised": EnvironmentFailure("raised", "boom"),
    "unknown_outcome": EnvironmentFailure("unknown_outcome", "the worker died"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_an_environment_that_fails_gives_a_masked_failed_trajectory(kind: str) -> None:
    at_open = _run(lambda: _loop(FakeClient(), FakeEnvironment(fail_open=FAILURES[kind])))
    _is_failed(at_open, kind)
    environment = FakeEnvironment(fail_step=FAILURES[kind])
    at_step = _run(lambda: _loop(FakeClient("one two <end>"), environment))
    _is_failed(at_step, kind)
    assert at_step.response_ids == _ids("one two <end>")
    assert environment.closed == 1


def test_an_unforeseen_error_gives_a_failed_trajectory_and_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    environment = FakeEnvironment(fail_step=OverflowError("integer is too large"))
    _is_failed(_run(lambda: _loop(FakeClient("one <end>"), environment)), "internal")
    assert environment.closed == 1
    assert "Traceback" in caplog.text


def test_a_server_that_nobody_reaches_gives_a_failed_trajectory() -> None:
    _is_failed(_run(lambda: _loop(FakeClient(), EnvironmentUnreachable("nobody answers"))), "unreachable")


def test_a_dead_replica_gives_a_failed_trajectory_and_closes_its_session() -> None:
    environment = FakeEnvironment()
    died = ray.exceptions.ActorDiedError()
    _is_failed(_run(lambda: _loop(FakeClient("one <end>", died), environment)), "replica")
    assert environment.closed == 1


def test_a_trajectory_over_its_deadline_fails_and_closes_its_session() -> None:
    client, environment = FakeClient(), FakeEnvironment()
    client.hang = True
    _is_failed(_run(lambda: _loop(client, environment, trajectory_deadline_s=0.05)), "timeout")
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
    _is_failed(_run(lambda: _loop(FakeClient(), FakeEnvironment(), **settings), row), "configuration")


def test_cancellation_is_not_caught_and_leaves_no_session_and_no_count() -> None:
    client, environment = FakeClient(), FakeEnvironment()
    client.hang = True

    async def play() -> None:
        task = asyncio.create_task(_loop(client, environment).run({}, **ROW))
        await client.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(play())
    assert (environment.closed, client.over) == (1, ["g_1"])


def test_with_verls_reward_function_the_loop_leaves_the_reward_to_it_and_reports_the_environments() -> None:
    output = _run(lambda: _loop(FakeClient("done <end>"), FakeEnvironment(), reward="trainer"))
    assert output.reward_score is None
    assert output.extra_fields["environment_reward"] == 1.0
    assert "reward_extra_info" not in output.extra_fields


# --- admission -------------------------------------------------------------------------------------------------------


class Door(Unreported):
    """Admission that takes `wait_s` each time, and what was asked of it and of the environment, in order."""

    def __init__(self, wait_s: float = 0.0) -> None:
        self.wait_s = wait_s
        self.log: list[Any] = []
        self.waited_at = asyncio.Event()
        self.parks = True
        self.caches: list[tuple[int, int, int]] = []
        self.replicas: list[int] = []

    def resized(self, replicas: int) -> None:
        self.replicas.append(replicas)

    def served(self, *cache: int) -> None:
        self.caches.append(cache)  # type: ignore[arg-type]

    async def admit(self, trajectory_id: str) -> None:
        self.log.append("admit")
        self.waited_at.set()
        await asyncio.sleep(self.wait_s)

    async def reach(self, trajectory_id: str, context_tokens: int, parked: Callable[[], None]) -> None:
        self.log.append(context_tokens)
        if self.parks:
            parked()
        self.waited_at.set()
        await asyncio.sleep(self.wait_s)

    def end(self, trajectory_id: str, *, counts: bool) -> None:
        self.log.append("counted" if counts else "given up")


class Watched(FakeEnvironment):
    def __init__(self, door: Door, **more: Any) -> None:
        super().__init__(**more)
        self._door = door

    async def open(self, *args: Any, **more: Any) -> Any:
        self._door.log.append("open")
        return await super().open(*args, **more)


def _behind(door: Door, client: FakeClient, environment: FakeEnvironment, **settings: Any) -> Any:
    loop = _loop(client, environment, **settings)
    loop._reporter = lambda *_: door
    return loop


def test_a_trajectory_is_admitted_before_its_session_opens_and_asks_before_each_inference() -> None:
    door, client = Door(), FakeClient("one <end>", "done <end>")
    paused: list[str] = []
    client.pause_trajectory = SimpleNamespace(remote=paused.append)  # type: ignore[attr-defined]
    _run(lambda: _behind(door, client, Watched(door)))
    assert door.log == ["admit", "open", 6, 6 + 2 + 6, "counted"]
    assert paused == ["g_1", "g_1"]


@pytest.mark.parametrize("parks", [True, False])
def test_admission_hears_what_a_returning_turn_found_unless_it_was_parked(parks: bool) -> None:
    door, client = Door(), ReportedTo("one <end>", "done <end>")
    door.parks = parks
    admission = {"policy": "parking", "replicas": 1, "memory": {"num_blocks": 9, "block_tokens": 16}}
    _run(lambda: _behind(door, client, FakeEnvironment(), admission=admission))
    # The first turn computed 6 + 2 - 1 tokens, of which the second found 3.
    assert door.caches == ([] if parks else [(7, 3, 0)])
    assert door.replicas == [9, 8]  # as the router says


def test_waiting_for_admission_is_on_its_own_account_and_not_on_the_deadlines() -> None:
    door, client = Door(wait_s=0.7), FakeClient("one <end>", "done <end>")
    output = _run(lambda: _behind(door, client, FakeEnvironment(), trajectory_deadline_s=0.5))
    figures = output.extra_fields["makespan"]
    assert figures["state"] == "finished"  # after more than 2.1 s
    assert figures["admission_s"] >= 3 * 0.7
    assert figures["generate_s"] < 0.7
    client.hang = True  # the control: the deadline is still there once it has been admitted
    _is_failed(_run(lambda: _behind(Door(wait_s=0.7), client, FakeEnvironment(), trajectory_deadline_s=0.1)), "timeout")


@pytest.mark.parametrize("when", ["admit", "reach"])
def test_a_trajectory_cancelled_while_it_waits_is_given_up_everywhere(when: str) -> None:
    door, client = Door(wait_s=60.0), FakeClient()
    environment = Watched(door)
    if when == "reach":
        door.admit = Unreported().admit  # type: ignore[method-assign]

    async def play() -> None:
        task = asyncio.create_task(_behind(door, client, environment).run({}, **ROW))
        await door.waited_at.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(play())
    assert door.log == (["admit", "given up"] if when == "admit" else ["open", 6, "given up"])
    assert (environment.closed, client.over, client.requests) == (int(when == "reach"), ["g_1"], [])


def test_a_trajectory_that_fails_gives_its_place_back() -> None:
    door = Door()
    _run(lambda: _behind(door, FakeClient(), Watched(door, fail_open=FAILURES["refused"])))
    assert door.log == ["admit", "open", "given up"]


@pytest.mark.parametrize(
    ("admission", "named"),
    [
        ({"policy": "parking", "concurrency": 4}, "needs admission.memory"),
        ({"policy": "fixed"}, "needs admission.concurrency"),
        ({"policy": "everything", "concurrency": 4}, "must be null, not 4"),
        ({"polcy": "fixed"}, "`polcy`"),
    ],
)
def test_an_admission_that_cannot_be_is_a_mistake_of_the_user_and_named(
    admission: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    output = _run(lambda: _loop(FakeClient(), FakeEnvironment(), admission=OmegaConf.create(admission)))
    assert named in caplog.text
    _is_failed(output, "configuration")


def test_admission_as_verl_hands_it_over_is_understood() -> None:
    written = {"policy": "parking", "concurrency": None, "replicas": 2, "memory": {"num_blocks": 9, "block_tokens": 16}}
    loop = _loop(FakeClient(), FakeEnvironment(), admission=OmegaConf.create(written))
    assert loop._settings.admission.memory.memory().capacity == 8
