"""ZeroMQ sockets on an asyncio loop, without a future for every message.

`RouterSocket` and `DealerSocket` hand every incoming frame to a callback. Two things make them fast:

- ZeroMQ's file descriptor is edge-triggered: it becomes readable once when something changes and says nothing again
  until the socket was read to its end. So every turn reads until the socket is empty, and every send schedules one more
  look.
- What wakes a process costs more than what it then does, so frames for one peer that are sent in one turn of the loop
  travel as one message of several parts. Where frames come one by one, each leaves at once.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable

import zmq

BATCH_MESSAGES = 256
"""How many messages are read before the loop may do something else."""

BATCH_FRAMES = 64
"""How many frames one message carries at most."""


class _LoopSocket(abc.ABC):
    """What both kinds share: reading in turns, and an outbox by peer (`b""` for a DEALER's only one)."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._outbox: dict[bytes, list[bytes]] = {}
        self._scheduled = False
        self._reading = False
        self._bursts = False
        """Whether the last frames travelled together: then it pays to collect the next ones for a turn."""
        self._closed = False
        self._loop.add_reader(self._fd, self._turn)
        self._schedule()

    def close(self, linger_ms: int = 0) -> None:
        """Send what waits, stop reading and close; unsent messages may leave for another `linger_ms`."""
        if not self._closed:
            self._flush()
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger_ms)

    def _post(self, peer: bytes, frame: bytes) -> None:
        if self._closed:
            return
        if self._reading or self._scheduled or self._bursts:  # others may follow: `_turn` sends them together
            self._outbox.setdefault(peer, []).append(frame)
        else:
            self._transmit(peer, [frame])
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled and not self._reading:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Read what is there, send what waits."""
        self._scheduled = False
        if self._closed:
            return
        self._reading = True
        more = self._read()
        self._reading = False
        if self._outbox:
            self._flush()
            more = self._is_readable()  # sending may have swallowed the edge of what came in meanwhile
        if more:
            self._schedule()

    def _read(self) -> bool:
        """Handle up to a batch of messages; whether there may be more."""
        receive = self._socket.recv_multipart
        try:
            for _ in range(BATCH_MESSAGES):
                self._take(receive(zmq.NOBLOCK))
                if self._is_closed() or not self._is_readable():
                    return False
        except zmq.Again:
            return False
        return True

    def _is_readable(self) -> bool:
        if self._closed:
            return False
        events = self._socket.getsockopt(zmq.EVENTS)
        return isinstance(events, int) and bool(events & zmq.POLLIN)

    def _is_closed(self) -> bool:
        return self._closed

    @abc.abstractmethod
    def _take(self, parts: list[bytes]) -> None:
        """Handle one message as it came, the peer's id in front where the socket gives one."""

    def _failed(self, error: Exception) -> None:
        """An error of ours in handling one frame must not take the frames behind it along."""
        self._loop.call_exception_handler({"message": "a frame could not be handled", "exception": error})

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, {}
        self._bursts = any(len(frames) > 1 for frames in outbox.values())
        for peer, frames in outbox.items():
            for first in range(0, len(frames), BATCH_FRAMES):
                self._transmit(peer, frames[first : first + BATCH_FRAMES])

    def _transmit(self, peer: bytes, frames: list[bytes]) -> None:
        """Send one message; it is dropped when the queue to that peer is full (requests are repeated)."""
        send, last = self._socket.send, len(frames) - 1
        try:
            if peer:
                send(peer, zmq.NOBLOCK | zmq.SNDMORE)
            for number, frame in enumerate(frames):
                send(frame, zmq.NOBLOCK if number == last else zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            pass


class DealerSocket(_LoopSocket):
    """A DEALER: `receive(frame)` is called for each frame. It owns the ZeroMQ socket."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[bytes], object]) -> None:
        self._receive = receive
        super().__init__(socket)

    def send(self, frame: bytes) -> None:
        self._post(b"", frame)

    def _take(self, parts: list[bytes]) -> None:
        for frame in parts:
            try:
                self._receive(frame)
            except Exception as error:
                self._failed(error)


class RouterSocket(_LoopSocket):
    """A ROUTER: `receive(routing_id, frame)` is called for each frame. It owns the ZeroMQ socket."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[bytes, bytes], object]) -> None:
        self._receive = receive
        super().__init__(socket)

    def send(self, routing_id: bytes, frame: bytes) -> None:
        self._post(routing_id, frame)

    def _take(self, parts: list[bytes]) -> None:
        routing_id = parts[0]
        for frame in parts[1:]:
            try:
                self._receive(routing_id, frame)
            except Exception as error:
                self._failed(error)


def tune(socket: zmq.Socket[bytes], *, max_frame_bytes: int, high_water_mark: int) -> None:
    """Options that every socket of the plane shares.

    ZeroMQ's own heartbeats find a connection that was cut without a word, so that it is made anew; a frame far above
    the stated size ends its connection before it can fill the memory (smaller excesses are answered politely).
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.RCVHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, 4 * max_frame_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]], address: str, *, max_frame_bytes: int
) -> tuple[zmq.Socket[bytes], str]:
    """A bound ROUTER and the address it got (port 0 becomes the port chosen)."""
    socket = context.socket(zmq.ROUTER)
    tune(socket, max_frame_bytes=max_frame_bytes, high_water_mark=100_000)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects under its id takes over at once
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close(0)
        raise
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return socket, endpoint.rstrip(b"\0").decode()


def connect_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, routing_id: bytes, *, max_frame_bytes: int
) -> zmq.Socket[bytes]:
    """A DEALER under a chosen routing id; it connects when the peer is there, and again whenever it comes back."""
    socket = context.socket(zmq.DEALER)
    tune(socket, max_frame_bytes=max_frame_bytes, high_water_mark=0)
    socket.setsockopt(zmq.ROUTING_ID, routing_id)
    socket.connect(address)
    return socket
