"""The process that hosts one vLLM engine (`AsyncLLM`), run as `python -m makespan.rollout.replicas.vllm_host CONFIG`.

A replica has a process of its own so that engines start side by side, each bound to its cores by its own environment,
and so that nothing outlives the run: the host leads its own process group (a terminal's Ctrl-C does not reach it), and
when its standard input ends, because the run closed it or because the run was killed, it stops the engine and leaves.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.replicas.base import Completion, ReplicaLoad, Request, Sampling, StopReason
from makespan.rollout.replicas.process_group import shared_memory_of, unlink_shared_memory
from makespan.rollout.replicas.wire import (
    SPIN_VARIABLE,
    Abort,
    Acknowledged,
    Done,
    FromHost,
    Generate,
    HostConfig,
    Load,
    Ready,
    RequestFailed,
    ResetPrefixCache,
    StartFailed,
    ToHost,
    frame,
    read_body,
)

LOAD_REPORT_S = 0.5
"""At most one load report in this time: the progress display redraws about as often."""

ORPHAN_CHECK_S = 0.5
"""While the engine starts nobody reads standard input, so a thread looks at whether the parent still lives."""

ENGINE_STOP_S = 30.0
"""vLLM kills its engine process after 5 s unless told otherwise; killed, it leaves shared memory behind. On a busy
machine the orderly way takes longer than that."""

WARM_UP_TOKENS = 16

SPIN_S = 0.002
"""On the CPU, where the cores that would spin are those that compute: longer than a worker waits for its next step,
shorter than an engine core waits for the worker."""


def prepare_process(config: HostConfig) -> int:
    """Set the environment before vLLM is imported and keep standard output for the protocol.

    Returns the descriptor that carries frames; whatever prints to standard output goes to standard error instead.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if config.cores:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, config.cores))
    if config.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.gpu
    else:
        os.environ.setdefault(SPIN_VARIABLE, str(SPIN_S))
    frames = os.dup(1)
    os.dup2(2, 1)
    return frames


def end_with_parent(parent: int, ready: threading.Event) -> None:
    """Until `ready`: when the parent is gone, end this process group, engine processes included."""
    while not ready.wait(ORPHAN_CHECK_S):
        if os.getppid() != parent:
            os.killpg(os.getpgid(0), signal.SIGKILL)


def padded_block_tokens(vllm_config: Any) -> int | None:
    """Block size of a hybrid model's attention layers on the CPU, in tokens; None where vLLM's own choice stands.

    vLLM pads the attention block until its page holds one layer's recurrent state: `k * ceil(s / (k * a))` with `a` the
    KV bytes of a token in a layer, `s` the bytes of the state and `k = 128` the CPU attention kernel's smallest block.
    A later pass of vLLM 0.30 resets a block size that was not given to 128, and checkpoints then miss; so it is given.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import MambaSpec

    model = vllm_config.model_config
    if not (current_platform.is_cpu() and model.is_hybrid):
        return None
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    state = MambaSpec(
        shapes=tuple(model_class.get_mamba_state_shape_from_config(vllm_config)),
        dtypes=tuple(model_class.get_mamba_state_dtype_from_config(vllm_config)),
        block_size=-1,
    )
    kv_bytes = 2 * model.get_num_kv_heads(vllm_config.parallel_config) * model.get_head_size() * model.dtype.itemsize
    kernel = 128
    return kernel * max(1, math.ceil(int(state.page_size_bytes) / (kernel * int(kv_bytes))))


def engine_arguments(config: HostConfig) -> Any:
    """vLLM's engine arguments for this host; asks vLLM for the block size first (a second, no weights)."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": "bfloat16",
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.gpu is None,  # compiled graphs pay on a GPU; the small CPU engines start faster without
        "skip_tokenizer_init": True,
        "seed": config.seed,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "disable_log_stats": False,
        "scheduling_policy": "priority",  # with equal priorities the order of arrival, as without it
    }
    if config.num_blocks is not None:
        arguments["num_gpu_blocks_override"] = config.num_blocks
    probe = AsyncEngineArgs(**arguments).create_engine_config()
    if probe.model_config.is_hybrid:
        arguments["mamba_cache_mode"] = "align" if config.prefix_caching else "none"
    block_tokens = padded_block_tokens(probe)
    if block_tokens is not None:
        arguments["block_size"] = block_tokens
    return AsyncEngineArgs(**arguments)


def sampling_params(sampling: Sampling) -> Any:
    """vLLM's parameters for ours: one final output, no detokenization, the sampled token's log-probability.

    Seeds are left out on the CPU: vLLM 0.30 takes back a draw by moving the generator's offset whenever a prompt is
    prefilled in more than one step, and CPU generators have no offset, so a seeded request can kill the engine.
    """
    from vllm import SamplingParams
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=None if current_platform.is_cpu() else sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion(output: Any) -> Completion:
    """Our completion from vLLM's final `RequestOutput`."""
    sequence, metrics = output.outputs[0], output.metrics
    token_ids = list(sequence.token_ids)
    logprobs = None
    if sequence.logprobs is not None:
        logprobs = [position[token].logprob for token, position in zip(token_ids, sequence.logprobs, strict=True)]
    reasons: dict[str | None, StopReason] = {"stop": "stop", "length": "length"}
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        stop_reason=reasons.get(sequence.finish_reason, "abort"),
        cached_tokens=output.num_cached_tokens,
        preemptions=metrics.num_preemptions if metrics else None,
        queue_s=max(0.0, metrics.scheduled_ts - metrics.queued_ts) if metrics else None,
        prefill_s=max(0.0, metrics.first_token_ts - metrics.scheduled_ts) if metrics else None,
        decode_s=max(0.0, metrics.last_token_ts - metrics.first_token_ts) if metrics else None,
    )


class Host:
    """Serves requests that arrive on standard input with one engine, and writes replies as they are done."""

    def __init__(self, config: HostConfig, frames: int) -> None:
        self._config = config
        self._frames = frames
        self._engine: Any = None
        self._shared_memory: tuple[str, ...] = ()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._preemptions = 0
        self._last_report_s = 0.0

    def send(self, message: FromHost) -> None:
        view = memoryview(frame(message))
        try:
            while view:
                view = view[os.write(self._frames, view) :]
        except BrokenPipeError:
            return  # the run is gone; standard input ends too, which ends this process

    def start(self) -> Ready:
        """Build the engine (blocking, about 15 s on two CPU cores)."""
        import vllm
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(self._config)
        self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stat_logger()])
        cache = self._engine.vllm_config.cache_config
        self._shared_memory = shared_memory_of(os.getpgid(0))
        return Ready(
            block_tokens=cache.block_size,
            num_blocks=cache.num_gpu_blocks,
            version=vllm.__version__,
            shared_memory=self._shared_memory,
        )

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        host = self

        class LoadReporter(StatLoggerBase):  # type: ignore[misc]  # vLLM is not type-checked here
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
                if iteration_stats is not None:
                    host._preemptions += iteration_stats.num_preempted_reqs
                now = time.monotonic()
                if scheduler_stats is not None and now - host._last_report_s >= LOAD_REPORT_S:
                    host._last_report_s = now
                    host.send(
                        Load(
                            ReplicaLoad(
                                running=scheduler_stats.num_running_reqs,
                                waiting=scheduler_stats.num_waiting_reqs,
                                kv_used_fraction=scheduler_stats.kv_cache_usage,
                                preemptions=host._preemptions,
                            )
                        )
                    )

            def log_engine_initialized(self) -> None:
                pass

        return LoadReporter

    async def warm_up(self) -> None:
        """Generate once, so that the first measured turn does not pay for lazily built kernels."""
        prompt = [3 + i % 200 for i in range(min(self._config.max_model_len // 2, 600))]
        request = Request(
            request_id="warm-up",
            trajectory_id="warm-up",
            turn=0,
            prompt_ids=prompt,
            sampling=Sampling(max_tokens=WARM_UP_TOKENS, min_tokens=WARM_UP_TOKENS, temperature=0.0),
        )
        await self._generate(request)
        await self._engine.reset_prefix_cache()

    async def _generate(self, request: Request) -> Completion:
        last = None
        async for output in self._engine.generate(
            {"prompt_token_ids": request.prompt_ids},
            sampling_params(request.sampling),
            request.request_id,
            priority=request.priority,
        ):
            last = output
        if last is None:
            raise RuntimeError("the engine ended the request without an output")
        return completion(last)

    async def _serve(self, request: Request) -> None:
        try:
            self.send(Done(request.request_id, await self._generate(request)))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the engine's own errors have no common base: each is an answer to this request
            if self._engine.errored:
                raise  # no request will ever be answered again: this process ends, and the run asks another replica
            self.send(RequestFailed(request.request_id, f"{type(error).__name__}: {error}"))
        finally:
            self._tasks.pop(request.request_id, None)

    async def run(self, stdin: asyncio.StreamReader) -> None:
        """Serve until standard input ends. Raises when the engine dies."""
        decoder = msgspec.msgpack.Decoder(ToHost)
        async with asyncio.TaskGroup() as tasks:
            while (body := await read_body(stdin)) is not None:
                match decoder.decode(body):
                    case Generate(request):
                        self._tasks[request.request_id] = tasks.create_task(self._serve(request))
                    case Abort(request_id):
                        if (task := self._tasks.get(request_id)) is not None:
                            task.cancel()
                    case ResetPrefixCache(request_id):
                        await self._engine.reset_prefix_cache()
                        self.send(Acknowledged(request_id))
            for task in self._tasks.values():
                task.cancel()

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown(timeout=ENGINE_STOP_S)
            unlink_shared_memory(self._shared_memory)


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=2**26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    return reader


async def _main(host: Host, ready: threading.Event) -> int:
    try:
        answer = host.start()
    except Exception as error:  # whatever stops vLLM from starting is the answer to the run that asked for it
        host.send(StartFailed(f"{type(error).__name__}: {error}"))
        return 1
    try:
        await host.warm_up()
        stdin = await _stdin()
        ready.set()
        host.send(answer)
        serving = asyncio.ensure_future(host.run(stdin))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        await asyncio.wait([serving])
    finally:
        host.shutdown()
    return 1 if not serving.cancelled() and serving.exception() is not None else 0


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=HostConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    frames = prepare_process(config)
    ready = threading.Event()
    threading.Thread(target=end_with_parent, args=(os.getppid(), ready), daemon=True).start()
    if not Path(config.model).is_dir():
        Host(config, frames).send(StartFailed(f"{config.model!r} is not a directory"))
        return 1
    return asyncio.run(_main(Host(config, frames), ready))


if __name__ == "__main__":
    raise SystemExit(main())
