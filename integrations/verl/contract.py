"""Everything of verl that the shells rely on, in one list, so that a new verl fails with a sentence and not in a run.

verl's extension points are mostly conventions: a keyword that is passed, a method that is called, a key of a tag. Each
`Reliance` names a symbol, the parameters that are used (and, where we override or implement, that it must accept), and
what for. `broken_reliances()` looks at the installed verl and returns a sentence for each one that no longer holds.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec


class Reliance(msgspec.Struct, frozen=True):
    """One thing of verl that is used: `symbol` of `module` (dotted, e.g. `ReplayBuffer.sample`) with `parameters`."""

    module: str
    symbol: str
    used_for: str
    parameters: tuple[str, ...] = ()
    """Names of parameters that are passed by us or that verl passes to our override."""
    source_mentions: tuple[str, ...] = ()
    """Texts that the symbol's source must contain: conventions that no signature shows."""


_LOOP = "verl.experimental.agent_loop.agent_loop"
_QUEUE_LOOP = "verl.trainer.ppo.v1.agent_loop_tq"
_BUFFER = "verl.trainer.ppo.v1.replay_buffer"
_ROUTER = "verl.workers.rollout.router"
_CLIENT = "verl.workers.rollout.llm_server"
_TRAINER = "verl.trainer.ppo.v1.trainer_base"

RELIANCES: tuple[Reliance, ...] = (
    # The router plug-in
    Reliance(
        _ROUTER,
        "_create_plugin_extension",
        "verl makes our router from the YAML's `router_class` and takes a Ray actor class as it is",
        ("servers", "router_config_path"),
        ("router_class", "isinstance(cls, ray.actor.ActorClass)", "remote(servers, yaml_config)"),
    ),
    *(
        Reliance(_ROUTER, f"RequestLoadBalancer.{method}", "our router answers this call of verl", parameters)
        for method, parameters in (
            ("acquire_server", ("request_id",)),
            ("release_server", ("server_id", "request_id")),
            ("require_acquire_fields", ()),
            ("require_release_fields", ()),
            ("add_servers", ("servers",)),
            ("remove_servers", ("server_ids",)),
            ("get_all_servers", ()),
            ("get_status", ()),
            ("clear_sticky_cache", ()),
            ("get_total_inflight", ()),
        )
    ),
    Reliance(
        _CLIENT,
        "LLMServerClient._acquire_server",
        "only declared fields are sent to the router, `sampling_params` among them",
        ("request_id",),
        ("require_acquire_fields", "acquire_server.remote(request_id=request_id, **fields)"),
    ),
    Reliance(
        _CLIENT,
        "LLMServerClient._release_server",
        "a turn's request id comes back with its release",
        ("server_id", "request_id"),
        ("require_release_fields",),
    ),
    Reliance(
        _CLIENT,
        "LLMServerClient.__init__",
        "the agent loop tells the router through `_load_balancer` that a trajectory is over",
        ("load_balancer_handle",),
        ("self._load_balancer",),
    ),
    Reliance(
        _CLIENT,
        "LLMServerClient.generate",
        "the agent loop generates with it",
        ("request_id", "prompt_ids", "sampling_params"),
        ("min_global_steps", "max_global_steps"),
    ),
    Reliance(
        _CLIENT,
        "FullyAsyncLLMServerClient.generate",
        "a turn that its replica aborted for new weights is asked for again under its request id",
        ("request_id",),
        ("request_id=request_id", '("aborted", "abort")'),
    ),
    Reliance(
        "verl.workers.rollout.vllm_rollout.vllm_async_server",
        "vLLMHttpServer.abort_all_requests",
        "an aborted turn means that its replica lost its caches",
        ("reset_prefix_cache",),
        ("clear_cache=reset_prefix_cache",),
    ),
    Reliance(
        "verl.workers.rollout.vllm_rollout.vllm_async_server",
        "vLLMHttpServer.generate",
        "`max_tokens` and `extra_args` in the sampling parameters reach vLLM; cached tokens come back",
        ("prompt_ids", "sampling_params", "request_id"),
        (
            '"max_tokens" in sampling_params',
            "SamplingParams(max_tokens=max_tokens, **sampling_params)",
            "num_cached_tokens",
        ),
    ),
    # The agent loop
    Reliance(
        _LOOP,
        "AgentLoopBase.__init__",
        "base of EnvAgentLoop",
        ("trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls", "data_config", "hf_model_type"),
        ("self.rollout_config", "self.continuous_token_builder", "self.server_manager", "self.config"),
    ),
    Reliance(_LOOP, "AgentLoopBase.run", "verl awaits it once a trajectory", ("sampling_params",)),
    Reliance(
        _LOOP,
        "AgentLoopBase.ct_merge_assistant_token",
        "appends generated ids",
        ("runtime_token_ids", "assistant_token_ids", "response_mask", "response_logprobs", "assistant_logprobs"),
    ),
    Reliance(
        _LOOP,
        "AgentLoopBase.ct_merge_context_msg",
        "appends observations",
        ("previous_messages", "updated_messages", "runtime_token_ids", "response_mask", "response_logprobs"),
    ),
    Reliance(
        "verl.utils.tokenizer.continuous_token",
        "ContinuousTokenBuilder.build_initial_tokens",
        "tokenises the first prompt",
        ("messages",),
    ),
    Reliance(
        _LOOP,
        "AgentLoopOutput.as_dict",
        "what a trajectory returns becomes a row",
        (),
        ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score", "extra_fields"),
    ),
    Reliance(
        _QUEUE_LOOP,
        "AgentLoopWorkerTQ._run_prompt",
        "a row's `uid` and `session_id` name the trajectory; a group ends as `finished` or `failure`",
        ("prompt", "sampling_params", "trajectory"),
        ('"status": "running"', "session_id=i", "failure", "finished"),
    ),
    Reliance(
        _QUEUE_LOOP,
        "AgentLoopWorkerTQ._agent_loop_postprocess",
        "rows are stored under `{uid}_{session}_{index}`",
        ("output", "validate"),
        ('f"{uid}_{session_id}_{i}"', "min_global_steps", "reward_extra_info"),
    ),
    # The sampler
    Reliance(
        _TRAINER,
        "PPOTrainer._build_replay_buffer",
        "makes our sampler from `trainer.v1.sampler.custom_sampler`",
        (),
        ("load_extern_type", "trainer_mode=", "sampler_kwargs=", "refill_fn="),
    ),
    Reliance(
        _TRAINER,
        "PPOTrainer._step_once",
        "the dictionary that `sample` returns joins the step's log",
        (),
        ("replay_buffer.sample(", "metrics.update(off_policy_metrics)"),
    ),
    Reliance(
        _BUFFER, "ReplayBuffer.__init__", "base of our sampler", ("trainer_mode", "sampler_kwargs", "poll_interval")
    ),
    Reliance(
        _BUFFER,
        "ReplayBuffer.sample",
        "we extend it, and it waits with `_wait_for_next_poll`",
        ("global_steps", "partition_id", "batch_size"),
        ("self._wait_for_next_poll(partition_id, last_debug_time)",),
    ),
    Reliance(_BUFFER, "ReplayBufferAsync.sample", "we extend it", ("global_steps", "partition_id", "batch_size")),
    Reliance(
        _BUFFER,
        "ReplayBufferAsync.wait_for_sampleable",
        "it waits with `_wait_for_next_poll`, which we extend",
        (),
        ("self._wait_for_next_poll(partition_id, last_debug_time)",),
    ),
    Reliance(
        _BUFFER,
        "ReplayBuffer._wait_for_next_poll",
        "we extend it: there a group's deadline is looked at",
        ("partition_id", "last_debug_time"),
    ),
    Reliance(
        _BUFFER,
        "ReplayBuffer._sync_metadata_from_transfer_queue",
        "we extend it: there late rows are removed",
        (),
        ("self.partitions", "self.pending_keys", "self.running_keys"),
    ),
    *(
        Reliance("transfer_queue.interface", function, "the sampler reads and clears rows with it", parameters)
        for function, parameters in (
            ("kv_batch_get", ("keys", "partition_id", "select_fields")),
            ("kv_put", ("key", "partition_id", "tag")),
            ("kv_clear", ("keys", "partition_id")),
        )
    ),
    Reliance(
        "transfer_queue.metadata",
        "KVBatchMeta",
        "a batch without failed rows is made anew",
        ("partition_id", "keys", "tags"),
    ),
)


def broken_reliances(reliances: Iterable[Reliance] = RELIANCES) -> list[str]:
    """A sentence for each reliance that the installed verl does not meet; empty when all hold.

    Reads source files and imports nothing: verl's modules take half a minute, and some refuse vLLM's CPU build.
    """
    return [sentence for reliance in reliances if (sentence := _broken(reliance))]


def _broken(reliance: Reliance) -> str:
    name = f"{reliance.module}.{reliance.symbol}"
    why = f"makespan needs it because: {reliance.used_for}"
    text = _source(reliance.module)
    if text is None:
        return f"{reliance.module} is not installed; {why}."
    found: ast.AST = ast.parse(text)
    for part in reliance.symbol.split("."):
        inner = _defined_in(found, part)
        if inner is None:
            return f"{name} is gone; {why}."
        found = inner
    accepted = _parameters(found)
    if missing := [parameter for parameter in reliance.parameters if parameter not in accepted]:
        return f"{name} no longer takes {', '.join(missing)} (it takes {', '.join(accepted)}); {why}."
    body = ast.get_source_segment(text, found) or ""
    if absent := [mention for mention in reliance.source_mentions if mention not in body]:
        return f"{name} does not contain {absent[0]!r} any more; {why}."
    return ""


@cache
def _source(module: str) -> str | None:
    """The text of an installed module's file, found without importing it or the packages it is in."""
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    for directory in (spec.submodule_search_locations or []) if spec else []:
        path = Path(directory).joinpath(*inside)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file.read_text()
    return None


def _defined_in(scope: ast.AST, name: str) -> ast.AST | None:
    """The class or function called `name` directly in a module or a class."""
    for node in getattr(scope, "body", []):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    return None


def _parameters(found: ast.AST) -> tuple[str, ...]:
    """What a function takes; of a data class, its fields."""
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = found.args
        return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    if isinstance(found, ast.ClassDef):
        fields = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
        return tuple(field.id for field in fields if isinstance(field, ast.Name))
    return ()
