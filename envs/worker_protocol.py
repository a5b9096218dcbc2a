"""The wire protocol between the broker and its workers.

Frames look as in `makespan.envs.protocol`: a version byte, then one tagged MessagePack map. A worker is a DEALER whose
routing id is its name; it says `Introduce` when it connects and whenever the broker asks with `WhoAreYou`, then a
`Beat` at a steady interval. The broker names sessions by a `sid` that is unique over all clients.

What makes actions run at most once is kept here, beside the session: the worker remembers the `seq` of the session's
last action and its outcome until the next action of that session (which only a client that has the outcome can send),
so a repeated `Step` is answered from memory, by a broker that has just been restarted too.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from makespan.envs.protocol import NOTHING, PROTOCOL_VERSION, Envelope, body_of
from makespan.rollout.environment import FailureKind
from makespan.rollout.errors import FormatError

# --- broker to worker ---------------------------------------------------------------------------------------


class Start(Envelope, frozen=True, kw_only=True):
    """Make an environment and reset it to `task` (action 0 of the session)."""

    sid: str
    client: str
    session: str
    environment: str
    trajectory_id: str
    job: str
    task: msgspec.Raw


class Step(Envelope, frozen=True, kw_only=True):
    """Run action `seq` of a session; one that has run already is answered from memory."""

    sid: str
    seq: int
    action: msgspec.Raw


class Recall(Envelope, frozen=True, kw_only=True):
    """Send the outcome of action `seq` again, or say that it still runs by saying nothing."""

    sid: str
    seq: int


class Stop(Envelope, frozen=True, kw_only=True):
    """Stop whatever the session runs, close it and answer `Stopped`."""

    sid: str


class WhoAreYou(Envelope, frozen=True, kw_only=True, tag="who_are_you"):
    """The broker does not know the sender: introduce yourself."""

    server_id: str


class BeatReply(Envelope, frozen=True, kw_only=True, tag="beat_reply"):
    """The broker is there: the answer to `Introduce` and to every `Beat`."""

    server_id: str


# --- worker to broker ---------------------------------------------------------------------------------------


class HostedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session that a worker hosts: enough for a broker that has just started to go on with it."""

    sid: str
    client: str
    session: str
    environment: str
    trajectory_id: str
    job: str
    seq: int
    """The last action it was told to run (0: the reset)."""
    running: bool
    """That action runs now; otherwise its outcome is known."""
    closed: bool = False
    """The session is over; only the outcome of its last action is kept."""


class Introduce(Envelope, frozen=True, kw_only=True):
    """Who I am, what I can host and what I host."""

    worker_id: str
    pid: int
    environments: tuple[str, ...]
    sessions: tuple[HostedSession, ...] = ()


class Beat(Envelope, frozen=True, kw_only=True):
    """I am alive."""

    running: int = 0
    abandoned: int = 0
    draining: bool = False


class Outcome(Envelope, frozen=True, kw_only=True):
    """Action `seq` of a session is over: `value`, or a failure when `kind` is set. `closed`: so is the session."""

    sid: str
    seq: int
    value: msgspec.Raw = NOTHING
    kind: FailureKind | None = None
    message: str = ""
    execution_s: float = 0.0
    closed: bool = False


class Stopped(Envelope, frozen=True, kw_only=True):
    """The session is gone; what it ran, if anything, has ended (or its thread was abandoned)."""

    sid: str


ToWorker: TypeAlias = Start | Step | Recall | Stop | WhoAreYou | BeatReply
FromWorker: TypeAlias = Introduce | Beat | Outcome | Stopped

_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def decode_to_worker(frame: bytes) -> ToWorker:
    """What the broker said. Raises `FormatError`."""
    try:
        return _to_worker.decode(body_of(frame))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"not a broker's message of version {PROTOCOL_VERSION}: {error}") from error


def decode_from_worker(frame: bytes) -> FromWorker:
    """What a worker said. Raises `FormatError`."""
    try:
        return _from_worker.decode(body_of(frame))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"not a worker's message of version {PROTOCOL_VERSION}: {error}") from error
