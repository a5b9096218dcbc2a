"""In-process stand-ins for what the engine is given: a tokenizer of one id a character, a replica that answers by a
rule, an environment that follows a plan. They stand in for vLLM and for an environment server, which tests of the
engine's own behaviour do not need; tests with the real ones are in `test_vllm.py` and `tests/test_run.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from makespan.rollout.environment import (
    Action,
    ActionTiming,
    EnvironmentFailure,
    Message,
    Observation,
    StepResult,
)
from makespan.rollout.errors import ReplicaFailure
from makespan.rollout.replicas.base import Completion, ReplicaLoad, Request
from makespan.rollout.trajectory import Progress, Task

END = 1
"""The end-of-turn token of `CharacterTokenizer`."""

BEGIN = 2


class CharacterTokenizer:
    """One id a character (its code point), `<|>` ends a turn (id 1), `<^>` begins one (id 2)."""

    eos_token_id: int | None = END

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids = []
        while text:
            if text.startswith("<|>"):
                ids, text = [*ids, END], text[3:]
            elif text.startswith("<^>"):
                ids, text = [*ids, BEGIN], text[3:]
            else:
                ids, text = [*ids, ord(text[0])], text[1:]
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        special = {END: "<|>", BEGIN: "<^>"}
        return "".join(("" if skip_special_tokens else special[i]) if i in special else chr(i) for i in token_ids)

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        text = "".join(f"<^>{m['role']}:{m['content']}<|>\n" for m in conversation)
        return text + ("<^>assistant:" if add_generation_prompt else "")


class RuleReplica:
    """Answers each request with the ids that `rule(request)` gives; keeps what it was asked."""

    def __init__(self, replica_id: str, rule: Callable[[Request], list[int]], seconds: float = 0.0) -> None:
        self._id = replica_id
        self._rule = rule
        self._seconds = seconds
        self.requests: list[Request] = []
        self.prompts: list[list[int]] = []
        self.running = 0
        self.most_running = 0
        self.dead = False

    @property
    def replica_id(self) -> str:
        return self._id

    async def generate(self, request: Request) -> Completion:
        if self.dead:
            raise ReplicaFailure(f"{self._id} is dead", retryable=True)
        self.requests.append(request)
        self.prompts.append(list(request.prompt_ids))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self.running -= 1
        ids = self._rule(request)
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            stop_reason="stop",
            cached_tokens=0,
            preemptions=0,
            queue_s=0.0,
            prefill_s=0.25,
            decode_s=0.5,
        )

    def load(self) -> ReplicaLoad | None:
        return None

    async def close(self) -> None: ...


class PlannedSession:
    """A session that ends after `length` actions with reward 1."""

    def __init__(self, backend: PlannedEnvironments, trajectory_id: str, length: int) -> None:
        self._backend = backend
        self._trajectory_id = trajectory_id
        self._length = length
        self._steps = 0

    async def step(self, action: Action, *, key: float, progress: Progress) -> tuple[StepResult, ActionTiming]:
        backend = self._backend
        backend.actions.setdefault(self._trajectory_id, []).append(action.text)
        backend.progress.append(progress)
        backend.acting += 1
        try:
            await asyncio.sleep(backend.step_s)
            backend.on_step(self._trajectory_id, self._steps)
        finally:
            backend.acting -= 1
        self._steps += 1
        over = self._steps >= self._length
        observation = Observation(() if over else (Message("user", f"step {self._steps}"),))
        result = StepResult(observation, reward=1.0 if over else 0.0, terminated=over)
        return result, ActionTiming("planned.step", 0.0, backend.step_s)

    async def close(self) -> None:
        self._backend.open_sessions.discard(self._trajectory_id)


class PlannedEnvironments:
    """Opens `PlannedSession`s; `payload["length"]` is a task's number of actions."""

    def __init__(self, step_s: float = 0.0, on_step: Callable[[str, int], None] = lambda *_: None) -> None:
        self.step_s = step_s
        self.on_step = on_step
        self.open_sessions: set[str] = set()
        self.actions: dict[str, list[str]] = {}
        self.progress: list[Progress] = []
        self.acting = 0

    def rekey(self, keys: Mapping[str, float]) -> None:
        """Nothing waits here: there are no slots."""

    async def open(
        self, trajectory_id: str, task: Task, *, key: float, progress: Progress
    ) -> tuple[PlannedSession, Observation, ActionTiming]:
        if task.payload.get("refuse"):
            raise EnvironmentFailure("refused", f"task {task.task_id!r} is not for this environment")
        self.open_sessions.add(trajectory_id)
        observation = Observation((Message("system", "rules"), Message("user", task.task_id)))
        session = PlannedSession(self, trajectory_id, task.payload.get("length", 1))
        return session, observation, ActionTiming("planned.start", 0.0, 0.0)


def task(name: str, length: int = 1, **payload: object) -> Task:
    """A task that ends after `length` actions."""
    return Task(task_id=name, environment="planned", payload={"length": length, **payload})
