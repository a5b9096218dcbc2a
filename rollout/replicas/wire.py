"""The messages between a replica's handle and the process that hosts its engine.

They pass over the host's standard input and output as frames of four bytes of length (big endian) and one msgpack
struct. A pipe needs no address, no file and no port, and its end of file tells each side that the other is gone.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from makespan.rollout.replicas.base import Completion, ReplicaLoad, Request

SPIN_VARIABLE = "MAKESPAN_VLLM_SPIN_S"
"""Tells the processes of a vLLM engine how many seconds to spin before they sleep (`integrations/vllm_plugin.py`)."""

_LENGTH = struct.Struct(">I")


class HostConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a host needs to start an engine; travels as JSON on its command line."""

    model: str
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int | None
    """Memory for KV cache and recurrent states; None: what vLLM leaves of the GPU."""
    max_num_batched_tokens: int
    prefix_caching: bool
    cores: tuple[int, ...]
    """CPU cores of the engine's worker; empty: not bound (on a GPU)."""
    seed: int
    gpu: str | None = None
    """The GPU as CUDA_VISIBLE_DEVICES names it (an index or a UUID); None on the CPU."""
    num_blocks: int | None = None
    """Overrides the number of cache blocks (to make memory scarce)."""


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    request_id: str


ToHost = Generate | Abort | ResetPrefixCache


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The engine is up and has generated once."""

    block_tokens: int
    num_blocks: int | None
    version: str
    shared_memory: tuple[str, ...]
    """Segments that the engine's processes use, to be removed when they did not do so themselves."""


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    message: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    request_id: str
    completion: Completion


class Acknowledged(msgspec.Struct, frozen=True, tag="acknowledged"):
    request_id: str


class RequestFailed(msgspec.Struct, frozen=True, tag="request_failed"):
    request_id: str
    message: str


class Load(msgspec.Struct, frozen=True, tag="load"):
    load: ReplicaLoad


FromHost = Ready | StartFailed | Done | Acknowledged | RequestFailed | Load

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToHost | FromHost) -> bytes:
    """One message, ready to be written."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_body(stream: asyncio.StreamReader) -> bytes | None:
    """The body of the next frame, None at end of file (also in the middle of a frame: the other side died)."""
    try:
        (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
        return await stream.readexactly(length)
    except asyncio.IncompleteReadError:
        return None
