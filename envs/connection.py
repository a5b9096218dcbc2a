"""A client's connection: every request is kept until it is answered, and sent again whenever it may have been lost.

That is after a while (with growing pauses, for most unanswered requests just wait for a slot), when the server was
silent and speaks again, and when another broker process answers under the same address. The server runs a repeated
request at most once, so sending again is always safe. A beat renews the client's lease; a server that is silent for a
whole lease has lost the client's sessions, and what is pending fails as `unreachable`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket as sockets
import uuid
from dataclasses import dataclass

import msgspec
import zmq

from makespan.envs.deadlines import Deadlines
from makespan.envs.protocol import (
    MAX_FRAME_BYTES,
    Busy,
    Bye,
    Cancel,
    Failure,
    Hello,
    HelloRequired,
    Reply,
    Result,
    Status,
    StatusReply,
    Welcome,
    decode_reply,
    encode,
)
from makespan.envs.sockets import DealerSocket, connect_dealer
from makespan.rollout.environment import EnvironmentFailure, FailureKind
from makespan.rollout.errors import EnvironmentUnreachable, FormatError
from makespan.rollout.telemetry.events import EventLog

log = logging.getLogger(__name__)

RESEND_AFTER_S = 5.0
"""An unanswered request is sent again after this, then after twice as long each time ..."""

RESEND_AT_MOST_S = 60.0
"""... up to this: most unanswered requests just wait for a slot."""

BEAT_AT_MOST_S = 1.0
"""How often the client says that it is there, unless its lease asks for more: a new broker is noticed that soon."""

SILENT_AFTER_S = 3.0
"""A server that did not answer for so long may have lost messages: what is pending is sent again when it is back."""

TICK_S = 0.25
"""How coarse all of these are."""

CLOSE_WAIT_S = 2.0
"""How long `close` waits for the server to confirm; its lease takes care of what was not."""


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server offers: environment names, slot counts by class, and the id of its present broker process."""

    server_id: str
    environments: tuple[str, ...]
    slots: dict[str, int]
    lease_s: float
    max_frame_bytes: int


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that is not answered yet."""

    frame: bytes
    answer: asyncio.Future[Result | Failure]
    resend_s: float
    pause_s: float = RESEND_AFTER_S


class Connection:
    """One connection to one server, bound to the loop that made it; `await open()`, later `await close()`."""

    def __init__(self, address: str, *, job: str, lease_s: float, event_log: EventLog) -> None:
        self.address = address
        self.name = f"{sockets.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        """The routing id of the socket: who this client is."""
        self._hello = encode(Hello(job=job, lease_s=lease_s))
        self._lease_s = lease_s
        self._event_log = event_log
        self._loop = asyncio.get_running_loop()
        self._pending: dict[str, _Pending] = {}
        self._held: dict[str, bytes] = {}
        self._deadlines: Deadlines[str] = Deadlines(granularity_s=TICK_S)
        self._welcome: asyncio.Future[ServerInfo] = self._loop.create_future()
        self._heard_s = self._loop.time()
        self._silent = False
        self._given_up = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: DealerSocket | None = None
        self._beats: asyncio.Task[None] | None = None

    @property
    def info(self) -> ServerInfo:
        """What the server offers, as of its last answer."""
        return self._welcome.result()

    async def open(self, timeout_s: float) -> ServerInfo:
        """Say hello and start renewing the lease. Raises `EnvironmentUnreachable`."""
        try:
            dealer = connect_dealer(self._context, self.address, self.name.encode(), max_frame_bytes=MAX_FRAME_BYTES)
        except zmq.ZMQError as error:
            self._disconnect()
            raise EnvironmentUnreachable(
                f"{self.address!r} is not an address ({error}): use tcp://host:port"
            ) from error
        self._socket = DealerSocket(dealer, self._receive)
        self._send(self._hello)
        try:
            async with asyncio.timeout(timeout_s):
                info = await asyncio.shield(self._welcome)
        except TimeoutError:
            self._disconnect()
            raise EnvironmentUnreachable(
                f"no environment server answered at {self.address} within {timeout_s:g} s: "
                "is it running (`makespan env serve`), and is the address the one it printed?"
            ) from None
        except BaseException:
            self._disconnect()
            raise
        self._beats = self._loop.create_task(self._keep_alive(), name="environment client")
        return info

    async def close(self) -> None:
        """Fail what is pending as `cancelled`, tell the server, disconnect."""
        self._fail_all("cancelled", "the client was closed")
        try:
            if not self._given_up:
                goodbye = self._keep("bye", encode(Bye(id="bye")))
                await asyncio.wait([goodbye.answer], timeout=CLOSE_WAIT_S)
        finally:
            if self._beats is not None:
                self._beats.cancel()
                await asyncio.wait([self._beats])
            self._disconnect()

    # --- requests -------------------------------------------------------------------------------------------

    async def request(self, request_id: str, frame: bytes, timeout_s: float) -> Result:
        """Send a request until it is answered. Cancelled, it withdraws the request. Raises `EnvironmentFailure`.

        The server keeps the request's deadline; `timeout_s` is for a server that lives but does not answer.
        """
        if len(frame) > self.info.max_frame_bytes:
            size = f"the request has {len(frame)} bytes; the server takes at most {self.info.max_frame_bytes}"
            raise EnvironmentFailure("protocol", size)
        pending = self._keep(request_id, frame)
        self._deadlines.set(request_id, self._loop.time() + timeout_s)
        try:
            answer = await pending.answer
        except asyncio.CancelledError:
            self._send(encode(Cancel(id=f"{request_id}/cancel", request=request_id)))
            raise
        finally:
            self._pending.pop(request_id, None)
            self._deadlines.clear(request_id)
        if isinstance(answer, Failure):
            raise EnvironmentFailure(answer.kind, answer.message, retryable=answer.retryable)
        return answer

    def post(self, request_id: str, frame: bytes) -> None:
        """Send a request until it is answered, without waiting for it or caring for the answer."""
        self._keep(request_id, frame).answer.add_done_callback(lambda done: self._posted(request_id, done))

    def hold(self, lease_id: str, frame: bytes) -> None:
        """Tell every new broker process of a lease that this client holds, until `let_go`."""
        self._held[lease_id] = frame

    def let_go(self, lease_id: str) -> None:
        self._held.pop(lease_id, None)

    def _posted(self, request_id: str, done: asyncio.Future[Result | Failure]) -> None:
        self._pending.pop(request_id, None)
        if not done.cancelled():
            done.exception()  # looked at: nobody else will

    def _keep(self, request_id: str, frame: bytes) -> _Pending:
        pending = _Pending(frame, self._loop.create_future(), self._loop.time() + RESEND_AFTER_S)
        if self._socket is None:
            pending.answer.set_exception(EnvironmentFailure("unreachable", "the client is not connected"))
        elif self._given_up:
            text = f"the environment server {self.address} has been silent for {self._lease_s:g} s"
            pending.answer.set_exception(EnvironmentFailure("unreachable", text))
        else:
            self._pending[request_id] = pending
            self._socket.send(frame)
        return pending

    def _send(self, frame: bytes) -> None:
        if self._socket is not None:
            self._socket.send(frame)

    # --- answers --------------------------------------------------------------------------------------------

    def _receive(self, frame: bytes) -> None:
        try:
            reply = decode_reply(frame)
        except FormatError as error:
            log.warning("an answer of %s was dropped: %s", self.address, error)
            return
        self._heard_s = self._loop.time()
        self._given_up = False
        self._handle(reply)

    def _handle(self, reply: Reply) -> None:
        if isinstance(reply, Result | Failure):
            pending = self._pending.pop(reply.id, None)
            if pending is not None and not pending.answer.done():
                pending.answer.set_result(reply)
            elif not reply.id and isinstance(reply, Failure):
                self._refused(reply)
        elif isinstance(reply, Welcome):
            self._welcomed(reply)
        elif isinstance(reply, HelloRequired):
            self._send(self._hello)
        elif isinstance(reply, Busy):
            pending = self._pending.get(reply.id)
            if pending is not None:
                pending.resend_s = self._loop.time() + reply.retry_after_s

    def _welcomed(self, welcome: Welcome) -> None:
        info = ServerInfo(
            server_id=welcome.server_id,
            environments=welcome.environments,
            slots=welcome.slots,
            lease_s=welcome.lease_s,
            max_frame_bytes=welcome.max_frame_bytes,
        )
        known = self._welcome.result() if self._welcome.done() else None
        if known is not None:
            self._welcome = self._loop.create_future()
        self._welcome.set_result(info)
        is_new = known is not None and known.server_id != info.server_id
        for frame in self._held.values() if is_new else ():
            self._send(frame)
        if self._silent or is_new:
            self._silent = False
            log.info("environment server %s is back: sending %d requests again", self.address, len(self._pending))
            self._event_log.emit("environment_reconnected", "", server_id=info.server_id, pending=len(self._pending))
            for pending in self._pending.values():
                pending.resend_s = self._loop.time()
            self._resend_due()

    def _refused(self, failure: Failure) -> None:
        """The server did not understand, or want, something of ours that it cannot name."""
        log.error("environment server %s: %s", self.address, failure.message)
        if not self._welcome.done():
            self._welcome.set_exception(EnvironmentUnreachable(f"{self.address}: {failure.message}"))

    # --- time -----------------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        """Renew the lease, send again what is due, and give up on a server that is silent for a whole lease."""
        next_beat_s = 0.0
        while True:
            now = self._loop.time()
            beat_s = min(BEAT_AT_MOST_S, self.info.lease_s / 3)
            self._silent = self._silent or now - self._heard_s > SILENT_AFTER_S
            if now >= next_beat_s:
                next_beat_s = now + beat_s
                self._send(self._hello)
            if now - self._heard_s > self._lease_s:
                self._give_up(now - self._heard_s)
            for request_id in self._deadlines.expired(now):
                self._fail(request_id, "timeout", f"no answer from {self.address} in time")
            self._resend_due()
            await asyncio.sleep(min(beat_s, TICK_S))

    def _resend_due(self) -> None:
        now = self._loop.time()
        for request_id, pending in self._pending.items():
            if pending.resend_s <= now:
                self._send(pending.frame)
                pending.resend_s = now + pending.pause_s
                pending.pause_s = min(2 * pending.pause_s, RESEND_AT_MOST_S)
                self._event_log.emit("environment_resent", "", request=request_id)

    def _give_up(self, silent_s: float) -> None:
        """Fail what is pending, and what comes, until the server speaks again."""
        self._given_up = True
        text = f"the environment server {self.address} has been silent for {silent_s:.1f} s; its sessions are lost"
        self._fail_all("unreachable", text)

    def _fail(self, request_id: str, kind: FailureKind, message: str) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is not None and not pending.answer.done():
            pending.answer.set_exception(EnvironmentFailure(kind, message))

    def _fail_all(self, kind: FailureKind, message: str) -> None:
        for request_id in list(self._pending):
            self._fail(request_id, kind, message)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger_ms=200)
            self._socket = None
        self._context.destroy(linger=200)
        self._fail_all("cancelled", "the client was closed")


async def status(address: str, timeout_s: float = 5.0) -> StatusReply:
    """Ask a server for its state. Raises `EnvironmentUnreachable`."""
    answer: asyncio.Future[StatusReply] = asyncio.get_running_loop().create_future()

    def receive(frame: bytes) -> None:
        reply = decode_reply(frame)
        if isinstance(reply, StatusReply) and not answer.done():
            answer.set_result(reply)

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        dealer = connect_dealer(context, address, uuid.uuid4().hex.encode(), max_frame_bytes=MAX_FRAME_BYTES)
        socket = DealerSocket(dealer, receive)
        try:
            socket.send(encode(Status(id="status")))
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            socket.close()
    except (TimeoutError, zmq.ZMQError) as error:
        text = f"no environment server answered at {address} within {timeout_s:g} s"
        raise EnvironmentUnreachable(f"{text} ({error})" if str(error) else text) from None
    finally:
        context.destroy(linger=0)
