"""What a replica is: token ids in, token ids out.

The engine knows this protocol and nothing of what serves it. A figure that a back end does not expose is `None` and is
shown as "not measured", never as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

StopReason = Literal["stop", "length", "abort"]
"""`stop`: a stop token was generated (it is the last of `token_ids`); `length`: the token limit; `abort`: withdrawn."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. With `min_tokens == max_tokens` and no stop tokens the length is forced."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one trajectory."""

    request_id: str
    trajectory_id: str
    turn: int
    prompt_ids: Sequence[int]
    sampling: Sampling
    priority: int = 0
    """Smaller is served first, where the back end orders by priority at all."""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica generated for one request, and what it says that cost. Seconds are the replica's own."""

    token_ids: Sequence[int]
    logprobs: list[float] | None
    """Log-probability of each generated token under the sampling distribution before temperature; same length."""
    stop_reason: StopReason
    cached_tokens: int | None
    """Prompt tokens that were not computed because the replica still held them."""
    preemptions: int | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    weights_version: int = 0


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's last report of itself."""

    running: int
    waiting: int
    kv_used_fraction: float | None
    preemptions: int | None
    """Since the replica started."""


class Replica(Protocol):
    """One inference engine with its own memory."""

    @property
    def replica_id(self) -> str: ...

    async def generate(self, request: Request) -> Completion:
        """Serve one turn. Cancelling the call aborts the request at the replica.

        Raises `ReplicaFailure`.
        """
        ...

    def load(self) -> ReplicaLoad | None:
        """The last report, None when there was none yet."""
        ...

    async def close(self) -> None:
        """Stop the replica and everything it started. Safe to call twice."""
        ...
