"""Stand-ins around an agent loop: verl's client, an environment server, a row of the dataset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from makespan.integrations.verl.agent_loop import EnvAgentLoop
from makespan.integrations.verl.router import TurnEnd
from makespan.rollout.environment import Action, ActionTiming, Message, Observation, StepResult
from makespan.rollout.trajectory import Task

VOCABULARY = ["<end>", "<open>", "user", "assistant", "tool", "ask", "one", "two", "three", "done", "told"]
TEMPLATE = (
    "{% for m in messages %}<open> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<open> assistant {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="told"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", pad_token="<end>", chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def ids_of(text: str) -> list[int]:
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
        ids = ids_of(said)[: request["sampling_params"]["max_tokens"]]
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


def make_loop(
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
        trainer_config=DictConfigWrap(config), server_manager=client, tokenizer=tokenizer(), processor=None,
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


def run(make: Callable[[], Any], row: dict[str, Any] = ROW) -> AgentLoopOutput:
    async def play() -> AgentLoopOutput:
        output: AgentLoopOutput = await make().run({"temperature": 1.0, "logprobs": True}, **row)
        return output

    return asyncio.run(play())


class ReportedTo(FakeClient):
    """With makespan's router behind it, which wants to hear what became of a turn."""

    def __init__(self, *says: str) -> None:
        super().__init__(*says)
        self.reports: list[tuple[Any, ...]] = []
        self.turn_over = SimpleNamespace(remote=self._hear)

    def _hear(self, *report: Any) -> asyncio.Future[TurnEnd]:
        self.reports.append(report)
        end: asyncio.Future[TurnEnd] = asyncio.get_running_loop().create_future()
        end.set_result(TurnEnd(caches_kept=len(self.reports) > 1, replicas=10 - len(self.reports)))
        return end


def assert_failed(output: AgentLoopOutput, kind: str) -> None:
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
    assert set(output.as_dict()) == set(run(lambda: make_loop(FakeClient("done <end>"), FakeEnvironment())).as_dict())
