"""The wire protocol between clients and the broker of an environment server.

A client is a ZeroMQ DEALER, the broker a ROUTER. Every message is one frame:

    byte 0       the protocol version, an unsigned byte (today 1)
    bytes 1...   one MessagePack map; its key `type` names the message, the other keys are the fields below

The version comes first, outside of the map, so that a peer of another version is recognised before anything else of
its frame is interpreted. Fields that hold their default may be left out; unknown fields are ignored.

A client says `Hello` before anything else and again at least every third of its lease; the routing id of its socket is
its name, so it keeps that id when it reconnects. Every other message carries an `id` chosen by the client, and the
answer repeats it. **A repeated id is answered, never executed again**: whoever waits too long sends the same message
once more.

    request                         answer
    Hello                           Welcome
    Open, Act                       Result, Failure or Busy
    Close, Cancel, Rekey, Bye       Result or Failure
    Lease, Release                  Result, Failure or Busy
    Status                          StatusReply
    (anything before Hello)         HelloRequired

`docs/protocol.md` describes each exchange for writers of clients in other languages.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from makespan.rollout.environment import FailureKind
from makespan.rollout.errors import FormatError
from makespan.rollout.trajectory import Progress

PROTOCOL_VERSION = 1

MAX_FRAME_BYTES = 8 * 1024 * 1024
"""Larger frames are answered with a failure and dropped: an observation is text, not a data set."""

NOTHING = msgspec.Raw(b"\xc0")
"""The value of a `Result` that says only that it is done (MessagePack nil)."""

Identifier: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]

LONGEST_JOB_NAME = 512
"""In characters."""

LONGEST_S = 1e9
"""The longest duration that a request may state."""

Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]


class Envelope(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", tag=str.lower):
    """Base of the messages: maps tagged with their lower-case name."""


# --- requests -----------------------------------------------------------------------------------------------


class Hello(Envelope, frozen=True, kw_only=True):
    """I am here, and want to stay for another `lease_s`; without one my sessions are closed after that time."""

    job: Annotated[str, msgspec.Meta(max_length=LONGEST_JOB_NAME)] = ""
    """Slots are shared equally between jobs."""
    lease_s: Seconds = 30.0


class Open(Envelope, frozen=True, kw_only=True):
    """Start a session and reset it. The request's id becomes the session's."""

    id: Identifier
    environment: str
    task: msgspec.Raw
    """A `Task` map: `task_id`, `environment`, `payload`."""
    trajectory_id: str = ""
    batch: str = ""
    key: float = 0.0
    """Among waiting actions of a job the smallest key goes first."""
    progress: Progress = Progress()
    deadline_s: Seconds = 600.0
    """From the arrival at the broker to the answer, waiting included."""


class Act(Envelope, frozen=True, kw_only=True):
    """Run one action in a session. `seq` counts a session's actions from 1; one action at a time."""

    id: Identifier
    session: Identifier
    seq: Annotated[int, msgspec.Meta(ge=1)]
    action: msgspec.Raw
    """An `Action` map: `text`."""
    key: float = 0.0
    progress: Progress = Progress()
    deadline_s: Seconds = 600.0


class Close(Envelope, frozen=True, kw_only=True):
    """Free a session, whatever it is doing. Closing what is closed, or was never open, is no error."""

    id: Identifier
    session: Identifier


class Cancel(Envelope, frozen=True, kw_only=True):
    """Withdraw an `Open`, `Act` or `Lease` that is not answered yet; it is answered `Failure(cancelled)`.

    A waiting action never runs then. A running one is stopped and its session closed, for its state is unknown.
    """

    id: Identifier
    request: Identifier


class Lease(Envelope, frozen=True, kw_only=True):
    """Give me a slot for a tool that runs in the client; it is answered when the slot is mine.

    A lease that is held for longer than `hold_s`, or whose client's own lease ends, loses its slot: the tool may still
    run then, and the broker counts that (`leases_expired`).
    """

    id: Identifier
    slot_class: str
    trajectory_id: str = ""
    batch: str = ""
    key: float = 0.0
    progress: Progress = Progress()
    deadline_s: Seconds = 600.0
    """From the arrival at the broker to the grant."""
    hold_s: Seconds = 600.0
    held: bool = False
    """An earlier broker process granted the slot and the tool still runs: count it, above the slots if need be."""


class Release(Envelope, frozen=True, kw_only=True):
    """The tool is done: free the slot of a `Lease`. The `Result` says how long it was held (`service_s`)."""

    id: Identifier
    lease: Identifier
    """The id of the `Lease`."""


class Rekey(Envelope, frozen=True, kw_only=True):
    """New keys for requests that may still wait. Ids that do not wait (any more) are ignored."""

    id: Identifier
    keys: dict[str, float]


class Bye(Envelope, frozen=True, kw_only=True):
    """I am leaving: end my sessions now rather than with my lease."""

    id: Identifier


class Status(Envelope, frozen=True, kw_only=True):
    """How is the server? Needs no `Hello`."""

    id: Identifier


# --- answers ------------------------------------------------------------------------------------------------


class Welcome(Envelope, frozen=True, kw_only=True):
    """The answer to `Hello`. A new `server_id` means a new broker process: send every unanswered request again."""

    server_id: str
    environments: tuple[str, ...]
    slots: dict[str, int]
    lease_s: float
    max_frame_bytes: int = MAX_FRAME_BYTES


class HelloRequired(Envelope, frozen=True, kw_only=True, tag="hello_required"):
    """The broker does not know the sender (it restarted, or the lease ended): say `Hello`, then send again."""

    server_id: str


class Result(Envelope, frozen=True, kw_only=True):
    """Done. `value` is an `Observation` for `Open`, a `StepResult` for `Act`, nil otherwise."""

    id: str
    value: msgspec.Raw = NOTHING
    slot_class: str = ""
    queue_s: float = 0.0
    """Waiting for the slot, measured by the broker."""
    service_s: float = 0.0
    """Holding the slot, measured by the broker."""
    execution_s: float = 0.0
    """Inside the environment, measured by the worker."""


class Failure(Envelope, frozen=True, kw_only=True):
    """Not done, finally: the same id will get the same answer. `retryable`: a new request may well succeed."""

    id: str
    kind: FailureKind
    message: str
    retryable: bool = False
    slot_class: str = ""
    queue_s: float = 0.0
    service_s: float = 0.0


class Busy(Envelope, frozen=True, kw_only=True):
    """Not accepted: the queue is full. Send the same request again after `retry_after_s`."""

    id: str
    retry_after_s: float


class SlotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One slot class at one moment."""

    slots: int
    running: int
    waiting: int
    granted: int
    cancelled: int
    oldest_wait_s: float | None = None


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the broker sees it."""

    worker_id: str
    pid: int
    environments: tuple[str, ...]
    sessions: int
    running: int
    abandoned: int = 0
    """Steps in threads that did not end when they were told to and still hold the thread."""
    draining: bool = False
    silent_s: float = 0.0


class StatusReply(Envelope, frozen=True, kw_only=True, tag="status_reply"):
    """The server's state: slots and queues by class, sessions, workers, and counters since it started."""

    id: str
    server_id: str
    uptime_s: float
    slots: dict[str, SlotStatus]
    clients: int
    sessions: int
    workers: tuple[WorkerStatus, ...]
    counters: dict[str, int]


Request: TypeAlias = Hello | Open | Act | Close | Cancel | Lease | Release | Rekey | Bye | Status
Reply: TypeAlias = Welcome | HelloRequired | Result | Failure | Busy | StatusReply

_VERSION_BYTE = bytes([PROTOCOL_VERSION])
_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


class _Named(msgspec.Struct, frozen=True):
    """All that is read of a request that is refused."""

    id: Identifier


_names: msgspec.msgpack.Decoder[_Named] = msgspec.msgpack.Decoder(_Named)


def encode(message: msgspec.Struct) -> bytes:
    """The frame of a message."""
    return _VERSION_BYTE + _encoder.encode(message)


def pack(value: object) -> msgspec.Raw:
    """A value as it travels inside a message: `task`, `action`, `value`."""
    return msgspec.Raw(_encoder.encode(value))


def body_of(frame: bytes) -> memoryview:
    """A frame without its version. Raises `FormatError` for a frame of another version, or none."""
    if not frame:
        raise FormatError("an empty frame (expected a version byte and a MessagePack map)")
    if frame[0] != PROTOCOL_VERSION:
        raise FormatError(f"protocol version {frame[0]} is not spoken here (expected version {PROTOCOL_VERSION})")
    return memoryview(frame)[1:]


def decode_request(frame: bytes) -> Request:
    """What a client said. Raises `FormatError`."""
    try:
        return _requests.decode(body_of(frame))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"not a request of version {PROTOCOL_VERSION}: {error}") from error


def id_of(frame: bytes) -> str:
    """The id of a request that `decode_request` refuses, for whoever waits for its answer; "" if it has none."""
    try:
        return _names.decode(body_of(frame)).id
    except (FormatError, msgspec.MsgspecError, ValueError, RecursionError):
        return ""


def sendable(text: str) -> str:
    """A text as it can travel: lone surrogates, which no encoding carries, become backslash escapes."""
    return text.encode(errors="backslashreplace").decode()


def said_by(error: BaseException) -> str:
    """The text of somebody else's error, whose `__str__` may itself raise."""
    try:
        return sendable(str(error))
    except Exception as another:
        return f"(its text cannot be shown: {type(another).__name__})"


def decode_reply(frame: bytes) -> Reply:
    """What the broker answered. Raises `FormatError`."""
    try:
        return _replies.decode(body_of(frame))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FormatError(f"not a reply of version {PROTOCOL_VERSION}: {error}") from error
