"""A vLLM engine in a process of its own, as a `Replica`.

The handle starts the host (`vllm_host.py`), sends requests down its standard input and resolves them as replies come
back. When the host dies every waiting request fails with a retryable `ReplicaFailure`, and the host's process group is
ended, so that no engine process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import msgspec

from makespan.rollout.errors import ReplicaFailure
from makespan.rollout.replicas.base import Completion, ReplicaLoad, Request
from makespan.rollout.replicas.process_group import end_group, signal_group, unlink_shared_memory
from makespan.rollout.replicas.wire import (
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

STOP_GRACE_S = 40.0
"""A host that was told to stop gets this long before it is killed: its engine stops in about 5 s, and is given 30."""

GROUP_GRACE_S = 15.0
"""What is left of a host's process group once the host is gone gets this long before it is killed."""

LOG_TAIL_LINES = 12

DEVICES = Path("/dev")


def divide_cores(replicas: int, cores: list[int]) -> list[tuple[int, ...]]:
    """Share CPU cores between replicas: disjoint and as equal as can be, or one core each in turn when there are
    more replicas than cores."""
    if replicas >= len(cores):
        return [(cores[index % len(cores)],) for index in range(replicas)]
    share, extra = divmod(len(cores), replicas)
    parts, start = [], 0
    for index in range(replicas):
        end = start + share + (index < extra)
        parts.append(tuple(cores[start:end]))
        start = end
    return parts


def visible_gpus() -> list[str]:
    """GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; none on a machine without NVIDIA devices."""
    devices = sorted(int(path.name.removeprefix("nvidia")) for path in DEVICES.glob("nvidia[0-9]*"))
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not devices or allowed is None:
        return [str(device) for device in devices]
    return [name.strip() for name in allowed.split(",") if name.strip() not in ("", "-1")]


class VllmReplica:
    """One engine, reached through its host process."""

    def __init__(self, replica_id: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self._id = replica_id
        self._process = process
        self._log_path = log_path
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._waiting: dict[str, asyncio.Future[Completion | None]] = {}
        self._load: ReplicaLoad | None = None
        self._closing = False
        self._reader = asyncio.create_task(self._read(), name=f"replica-{replica_id}")

    @classmethod
    async def start(cls, replica_id: str, config: HostConfig, log_path: Path, timeout_s: float) -> VllmReplica:
        """Start a host and wait until its engine has generated once.

        Raises `ReplicaFailure` with the end of the host's log when it does not come up in `timeout_s`.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "makespan.rollout.replicas.vllm_host",
                msgspec.json.encode(config).decode(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                limit=2**26,
            )
        replica = cls(replica_id, process, log_path)
        try:
            await asyncio.wait_for(asyncio.shield(replica._ready), timeout_s)
        except TimeoutError:
            await replica.close()
            raise ReplicaFailure(
                f"replica {replica_id} did not start in {timeout_s:.0f} s{replica._log_tail()}"
            ) from None
        except BaseException:
            await replica.close()
            raise
        return replica

    @property
    def replica_id(self) -> str:
        return self._id

    @property
    def ready(self) -> Ready:
        """What the host said when it came up: block size in tokens, number of blocks, vLLM's version."""
        return self._ready.result()

    async def generate(self, request: Request) -> Completion:
        answer = await self._ask(request.request_id, Generate(request), Abort(request.request_id))
        if answer is None:
            raise ReplicaFailure(f"replica {self._id} acknowledged request {request.request_id} without a completion")
        return answer

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix (between runs that must not help each other)."""
        request_id = f"reset-{len(self._waiting)}"
        await self._ask(request_id, ResetPrefixCache(request_id), None)

    async def _ask(self, request_id: str, message: ToHost, withdraw: ToHost | None) -> Completion | None:
        if self._closing or self._reader.done():
            raise ReplicaFailure(f"replica {self._id} is not running", retryable=True)
        future: asyncio.Future[Completion | None] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            self._send(message)
            return await future
        except asyncio.CancelledError:
            if withdraw is not None and not self._reader.done():
                self._send(withdraw)
            raise
        finally:
            self._waiting.pop(request_id, None)

    def load(self) -> ReplicaLoad | None:
        if self._load is not None and not self._waiting:  # an idle engine takes no step and so reports nothing new
            return msgspec.structs.replace(self._load, running=0, waiting=0)
        return self._load

    def _send(self, message: ToHost) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(frame(message))

    async def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.msgpack.Decoder(FromHost)
        try:
            while (body := await read_body(self._process.stdout)) is not None:
                self._receive(decoder.decode(body))
        finally:
            self._fail_all()
            if not self._closing:
                signal_group(self._process.pid, signal.SIGTERM)  # its engine outlives it otherwise

    def _receive(self, message: FromHost) -> None:
        match message:
            case Done(request_id, completion):
                self._resolve(request_id, completion)
            case Acknowledged(request_id):
                self._resolve(request_id, None)
            case RequestFailed(request_id, text):
                future = self._waiting.get(request_id)
                if future is not None and not future.done():
                    future.set_exception(ReplicaFailure(f"replica {self._id}: {text}"))
            case Load(load):
                self._load = load
            case Ready():
                self._ready.set_result(message)
            case StartFailed(text):
                self._ready.set_exception(ReplicaFailure(f"replica {self._id} did not start: {text}{self._log_tail()}"))

    def _resolve(self, request_id: str, answer: Completion | None) -> None:
        future = self._waiting.get(request_id)
        if future is not None and not future.done():
            future.set_result(answer)

    def _fail_all(self) -> None:
        failure = ReplicaFailure(f"replica {self._id} died{self._log_tail()}", retryable=True)
        if not self._ready.done():
            self._ready.set_exception(failure)
            self._ready.exception()  # retrieved here: `start` may have given up on it already
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(failure)

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            if lines:
                return "; the end of its log:\n  " + "\n  ".join(lines)
        return ""

    async def close(self) -> None:
        if self._closing:
            await self._process.wait()
            return
        self._closing = True
        if self._process.stdin is not None:
            self._process.stdin.close()  # end of file asks the host to stop its engine and leave
        if not self._ready.done() or self._ready.exception() is not None:
            signal_group(self._process.pid, signal.SIGTERM)  # nobody reads standard input before the engine is up
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), STOP_GRACE_S)
        await end_group(self._process.pid, GROUP_GRACE_S)
        await self._process.wait()
        if self._ready.done() and self._ready.exception() is None:
            unlink_shared_memory(self._ready.result().shared_memory)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


async def start_replicas(
    configs: dict[str, HostConfig], log_directory: Path, timeout_s: float
) -> dict[str, VllmReplica]:
    """Start all replicas side by side; when one fails, the others are closed and its `ReplicaFailure` is raised."""
    tasks = {
        replica_id: asyncio.create_task(
            VllmReplica.start(replica_id, config, log_directory / f"{replica_id}.log", timeout_s)
        )
        for replica_id, config in configs.items()
    }
    try:
        await asyncio.gather(*tasks.values())
    except BaseException:
        for task in tasks.values():
            task.cancel()
        outcomes = await asyncio.gather(*tasks.values(), return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in outcomes if isinstance(replica, VllmReplica)))
        raise
    return {replica_id: task.result() for replica_id, task in tasks.items()}
