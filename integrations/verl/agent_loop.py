"""verl's agent-loop plug-in: one trajectory against an environment server.

verl makes one `EnvAgentLoop` for each trajectory and awaits `run`. The loop opens an environment session, alternates
`generate` (through verl's own client, and so through the router) with environment actions, and returns tokens, mask,
log-probabilities and reward. Environment slots belong to the server: nothing is held while the model thinks. Where
admission is limited the loop waits for it before it opens the session, and asks again before each inference; its
deadline stands still meanwhile.

**A trajectory always comes back.** Whatever fails (the server is unreachable, an action times out, a replica dies, the
deadline passes), `run` returns a trajectory that is masked throughout, marked `failed` with its reason, and complete
in the fields that verl reads. An exception here would be worse: verl's `sync` mode trains what is left of the group
without a word, its asynchronous modes start the group again for ever. Cancellation is not caught.

A row of the dataset names its task as JSON in `extra_info["task"]` (a string, because parquet would merge the fields of
all rows' payloads). The environment's first observation is the whole prompt; the row's own `prompt`, which verl's
dataset class requires, is not sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Mapping
from typing import Any
from uuid import uuid4

import msgspec
import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from makespan.envs.client import EnvClient
from makespan.envs.slots import step_class
from makespan.integrations.verl.coordinator import JobSettings
from makespan.integrations.verl.episode import Episode
from makespan.integrations.verl.figures import EXTRA_FIELD
from makespan.integrations.verl.reporter import Chains, Unreported, chain_reporter
from makespan.integrations.verl.router import TurnFacts
from makespan.integrations.verl.server import environment_server
from makespan.integrations.verl.settings import LoopSettings, parse
from makespan.integrations.verl.transcript import Transcript, as_dicts
from makespan.rollout.admission_policy import ReturningTurn
from makespan.rollout.environment import Action, EnvironmentBackend, EnvironmentFailure, Session
from makespan.rollout.errors import ConfigError, EnvironmentUnreachable, MakespanError, ReplicaFailure
from makespan.rollout.priority import request_priority
from makespan.rollout.trajectory import Progress, Task

logger = logging.getLogger(__name__)

_VERL_KEYWORDS = frozenset(
    {"trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls", "data_config", "hf_model_type"}
)
"""What verl passes to every agent loop's constructor beside the keys of its YAML entry (and `name`, `tools`)."""


class EnvAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """The agent loop `makespan_env`; its settings are `LoopSettings`, from the agent-loop YAML."""

    def __init__(self, *args: Any, tools: Any = None, name: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **{k: v for k, v in kwargs.items() if k in _VERL_KEYWORDS})
        # A constructor that raises is swallowed in verl's asynchronous modes, so a bad setting is kept for `run`.
        self._settings: LoopSettings | ConfigError
        try:
            own = {k: v for k, v in kwargs.items() if k not in _VERL_KEYWORDS}
            self._settings = parse(LoopSettings, own, f"the agent-loop YAML, entry {name!r}")
        except ConfigError as error:
            self._settings = error
        self._chains: Chains = Unreported()
        self._deadline = asyncio.Timeout(None)
        self._parked = False  # before the present turn

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """One trajectory of the dataset's `row`, as verl's output."""
        group = str(row.get("uid") or uuid4().hex)
        episode = Episode(
            trajectory_id=f"{group}_{row.get('session_id', 0)}",
            group=group,
            weights_version=int(row.get("global_steps", 1)) - 1,
            clock=asyncio.get_running_loop().time,
        )
        try:
            if isinstance(self._settings, ConfigError):
                raise self._settings
            await self._within_deadline(episode, self._settings, sampling_params, row)
        except EnvironmentFailure as failure:
            episode.fail(failure.kind, failure)
        except EnvironmentUnreachable as failure:
            episode.fail("unreachable", failure)
        except ReplicaFailure as failure:
            episode.fail("replica", failure)
        except MakespanError as failure:
            episode.fail("configuration", failure)
        except Exception as error:  # nobody foresaw it; verl would train on without this trajectory and say nothing
            logger.exception("makespan: trajectory %s failed by an unexpected error", episode.trajectory_id)
            episode.fail("internal", error)
        except asyncio.CancelledError:
            episode.state = "failed"  # its length says nothing of how long chains are
            raise
        finally:
            self._chains.end(episode.trajectory_id, counts=episode.state != "failed")
            self._tell_router_it_is_over(episode.trajectory_id)
        if episode.failure:
            logger.warning("makespan: trajectory %s failed: %s", episode.trajectory_id, episode.failure_message)
        return self._output(episode)

    async def _within_deadline(
        self, episode: Episode, settings: LoopSettings, sampling_params: dict[str, Any], row: Mapping[str, Any]
    ) -> None:
        self._deadline = asyncio.timeout(settings.trajectory_deadline_s)
        try:
            async with self._deadline:
                task = _task_of(row, settings)
                backend = await self._backend(settings)
                self._chains = self._reporter(settings, backend)
                self._chains.join(episode.trajectory_id, f"{task.environment}/{task.task_id}", task.environment)
                await self._off_the_clock(episode, self._chains.admit(episode.trajectory_id))
                await self._converse(episode, settings, backend, task, sampling_params)
        except TimeoutError as error:
            if not self._deadline.expired():
                raise
            raise EnvironmentFailure(
                "timeout",
                f"the trajectory was not over after {settings.trajectory_deadline_s:g} s (trajectory_deadline_s); "
                f"it was in turn {episode.turns + 1}",
            ) from error

    async def _off_the_clock(self, episode: Episode, admission: Awaitable[None]) -> None:
        """Wait for admission, which is not the trajectory's own time."""
        started_s, due_s = episode.clock(), self._deadline.when()
        self._deadline.reschedule(None)
        await admission
        waited_s = episode.clock() - started_s
        episode.admission_s += waited_s
        if due_s is not None:
            self._deadline.reschedule(due_s + waited_s)

    def _job(self) -> str:
        return f"{self.config.trainer.project_name}/{self.config.trainer.experiment_name}"

    def _reporter(self, settings: LoopSettings, backend: EnvironmentBackend) -> Chains:
        """Where this process's trajectories are reported to the job's coordinator."""
        ordered = settings.scheduling != "fifo"
        if not (ordered or settings.admission.limits) or not isinstance(backend, EnvClient):
            return Unreported()
        job = JobSettings(
            max_turns=settings.max_turns,
            max_tokens=int(self.rollout_config.prompt_length) + int(self.rollout_config.response_length),
            history=settings.history,
            admission=settings.admission,
        )
        slots = {name: backend.info.slots[step_class(name)] for name in backend.info.environments}
        return chain_reporter(self._job(), job, slots, backend.rekey if ordered else None)

    async def _backend(self, settings: LoopSettings) -> EnvironmentBackend:
        return await environment_server(
            settings.address,
            job=self._job(),
            connect_timeout_s=settings.connect_timeout_s,
            action_deadline_s=settings.action_deadline_s,
        )

    async def _converse(
        self,
        episode: Episode,
        settings: LoopSettings,
        backend: EnvironmentBackend,
        task: Task,
        sampling_params: dict[str, Any],
    ) -> None:
        session, observation, timing = await backend.open(
            episode.trajectory_id, task, key=0.0, progress=self._progress(episode, settings)
        )
        try:
            episode.acted(timing)
            messages = as_dicts(observation.messages)
            prompt_ids = await self._prompt(messages)
            episode.transcript = Transcript(prompt_ids=prompt_ids, messages=messages)
            await self._take_turns(episode, episode.transcript, settings, session, sampling_params)
        finally:
            await session.close()

    async def _take_turns(
        self,
        episode: Episode,
        transcript: Transcript,
        settings: LoopSettings,
        session: Session,
        sampling_params: dict[str, Any],
    ) -> None:
        """Alternate inference and environment until the task ends, a limit is reached or something fails."""
        response_length = int(self.rollout_config.response_length)
        while True:
            text, cut = await self._generate(episode, transcript, settings, sampling_params)
            if len(transcript.mask) >= response_length:
                return  # the response is full, and the last turn was perhaps cut: nothing is done with it
            progress = episode.progress(
                max_turns=settings.max_turns, max_tokens=int(self.rollout_config.response_length)
            )
            progress = msgspec.structs.replace(progress, turns=episode.turns - 1)  # its last turn's action is not over
            key = self._chains.key(episode.trajectory_id, progress)
            result, timing = await session.step(Action(text=text), key=key, progress=progress)
            self._chains.acted(episode.trajectory_id, timing.service_s)
            episode.acted(timing)
            episode.reward += result.reward
            if result.terminated:
                episode.state = "finished"
                return
            if result.truncated or episode.turns >= settings.max_turns:
                return
            try:
                goes_on = await transcript.append_observation(
                    self,
                    result.observation.messages,
                    response_length,
                    end_of_turn_id=self.tokenizer.eos_token_id if cut else None,
                )
            except ValueError as error:
                raise ConfigError(f"the chat template cannot render this observation: {error}") from error
            if not goes_on:
                return
            episode.observations += 1

    async def _generate(
        self, episode: Episode, transcript: Transcript, settings: LoopSettings, sampling_params: dict[str, Any]
    ) -> tuple[str, bool]:
        """One turn of the model: its text, and whether it was cut. The tokens are in the transcript."""
        room = int(self.rollout_config.response_length) - len(transcript.mask)
        limit = min(room, settings.max_turn_tokens or room)
        facts = TurnFacts(
            trajectory=episode.trajectory_id,
            turn=episode.turns,
            context_tokens=len(transcript.token_ids),
            group=episode.group,
            worker=_worker_name(),
            reported=hasattr(self._router(), "turn_over"),
        )
        request_id = f"{episode.trajectory_id}|{episode.turns}"
        self._parked = False
        reach = self._chains.reach(facts.trajectory, facts.context_tokens, lambda: self._is_parked(facts.trajectory))
        await self._off_the_clock(episode, reach)
        started_s = episode.clock()
        try:
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=list(transcript.token_ids),
                sampling_params={
                    **sampling_params,
                    "max_tokens": limit,
                    "extra_args": {"makespan": msgspec.structs.asdict(facts)},
                },
                **self._priority(episode),
            )
        except ray.exceptions.RayError as error:
            raise ReplicaFailure(f"a replica did not serve turn {episode.turns + 1}: {error}") from error
        if not output.token_ids:
            raise ReplicaFailure(f"a replica served turn {episode.turns + 1} with no token ({output.stop_reason})")
        ids = list(output.token_ids)
        elapsed_s = episode.clock() - started_s
        episode.generated(ids, output, prompt_tokens=facts.context_tokens, elapsed_s=elapsed_s)
        context_tokens = facts.context_tokens + len(ids)
        if facts.reported:
            await self._report(episode, settings, request_id, context_tokens, output)
        told_s = None if episode.weights_changed else elapsed_s
        self._chains.inferred(episode.trajectory_id, told_s, context_tokens)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        await transcript.append_generated(self, ids, output.log_probs, text)
        return str(text), len(ids) >= limit and ids[-1] != self.tokenizer.eos_token_id

    def _priority(self, episode: Episode) -> dict[str, int]:
        """vLLM's priority of the next request, where vLLM orders by it; elsewhere vLLM refuses one."""
        if self.rollout_config.get("scheduling_policy") != "priority":
            return {}
        return {"priority": request_priority(episode.turns, self._chains.threatens(episode.trajectory_id))}

    async def _prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The prompt's token ids. verl's `ct_build_initial_tokens` would cut a long prompt at its front, silently."""
        ids: list[int] = await asyncio.to_thread(self.continuous_token_builder.build_initial_tokens, messages)
        limit = int(self.rollout_config.prompt_length)
        if len(ids) > limit:
            raise ConfigError(
                f"the environment's first observation has {len(ids)} tokens, data.max_prompt_length is {limit}: "
                "raise it, or leave such tasks out"
            )
        return ids

    def _progress(self, episode: Episode, settings: LoopSettings) -> Progress:
        return episode.progress(max_turns=settings.max_turns, max_tokens=int(self.rollout_config.response_length))

    def _router(self) -> Any:
        """verl's router: ours, its own, or none."""
        return getattr(self.server_manager, "_load_balancer", None)

    async def _report(
        self, episode: Episode, settings: LoopSettings, request_id: str, context_tokens: int, output: Any
    ) -> None:
        """Tell our router what became of a turn and, where admission goes by memory, admission what its cache did."""
        cached, version = (output.extra_fields.get(name) for name in ("num_cached_tokens", "max_global_steps"))
        told = self._router().turn_over.remote(request_id, context_tokens, cached, version)
        if settings.admission.policy == "parking":
            with contextlib.suppress(ray.exceptions.RayError):  # without a router the next turn fails, and says so
                end = await told
                self._chains.resized(end.replicas)
                if end.caches_kept and cached is not None and not self._parked:
                    turn = ReturningTurn(
                        prompt_tokens=episode.earlier_prompt_tokens,
                        computed_tokens=episode.expected_tokens,
                        cached_tokens=cached,
                        preemptions=output.num_preempted or 0,
                    )
                    self._chains.served(turn)

    def _is_parked(self, trajectory_id: str) -> None:
        """A parked trajectory is no load; verl's own router counts none."""
        self._parked = True
        router = self._router()
        if hasattr(router, "pause_trajectory"):
            router.pause_trajectory.remote(trajectory_id)

    def _tell_router_it_is_over(self, trajectory_id: str) -> None:
        """Close what the router still counts for this trajectory; verl's own router keeps no such count."""
        router = self._router()
        if hasattr(router, "finish_trajectory"):
            router.finish_trajectory.remote(trajectory_id)

    def _output(self, episode: Episode) -> AgentLoopOutput:
        fallback = self.tokenizer.eos_token_id or 0
        transcript = episode.transcript or Transcript(prompt_ids=[fallback], messages=[])
        if not transcript.mask:
            transcript.append_unsampled(fallback)  # verl needs at least one token to put a reward on
        if episode.failure:
            transcript.mask = [0] * len(transcript.mask)
            transcript.logprobs = [0.0] * len(transcript.mask)
        limit = int(self.rollout_config.response_length)
        by_environment = isinstance(self._settings, ConfigError) or self._settings.reward == "environment"
        return AgentLoopOutput(
            prompt_ids=transcript.prompt_ids,
            response_ids=transcript.response_ids[:limit],
            response_mask=transcript.mask[:limit],
            response_logprobs=transcript.logprobs[:limit] if self.rollout_config.calculate_log_probs else None,
            reward_score=episode.reward if by_environment else None,
            num_turns=1 + episode.turns + episode.observations,
            metrics={
                "generate_sequences": episode.generate_s,
                "tool_calls": episode.slot_queue_s + episode.environment_s,
                "num_preempted": -1 if episode.preemptions is None else episode.preemptions,
            },
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "global_steps": episode.max_weights_version,
                "min_global_steps": episode.min_weights_version,
                "max_global_steps": episode.max_weights_version,
                "environment_reward": episode.reward,
                EXTRA_FIELD: msgspec.to_builtins(episode.figures()),
                **({"reward_extra_info": episode.reward_fields()} if by_environment else {}),
            },
        )


def _task_of(row: Mapping[str, Any], settings: LoopSettings) -> Task:
    """The row's task. Raises `ConfigError` when the dataset does not say what to attempt."""
    written = (row.get("extra_info") or {}).get("task")
    if not isinstance(written, str):
        raise ConfigError(f"extra_info['task'] must be a task as JSON text, not {written!r}")
    try:
        fields = msgspec.json.decode(written, type=dict[str, Any])
        return msgspec.convert({"environment": settings.environment, **fields}, Task)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"extra_info['task'] is not a task: {error} (it is {written[:200]!r})") from error


def _worker_name() -> str:
    """The name of the Ray actor that this runs in; empty outside of one."""
    if not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().get_actor_name() or "")
