"""Bad networks for the fault tests: a TCP link that can be cut, and a ZeroMQ link that duplicates and reorders."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import zmq

from makespan.envs.sockets import DealerSocket, RouterSocket, bind_router, connect_dealer


class CuttableLink:
    """Forwards TCP connections to `target` (`tcp://host:port`); while it is cut, bytes vanish both ways."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("tcp://").split(":")
        self._target = host, int(port)
        self._cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped_bytes = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for writer in self._writers:
                writer.close()

    async def cut_for(self, seconds: float) -> None:
        self._cut = True
        await asyncio.sleep(seconds)
        for writer in self._writers:  # bytes are missing in these connections: they are worth nothing any more
            writer.close()
        self._writers.clear()
        self._cut = False

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, there_writer}
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65_536):
                if self._cut:
                    self.dropped_bytes += len(data)
                else:
                    sink.write(data)
        sink.close()


class ShufflingLink:
    """Forwards ZeroMQ messages to a ROUTER at `target`, some twice, each after a random delay.

    Every peer keeps its routing id: the link holds one DEALER to the target for each.
    """

    def __init__(self, target: str, seed: int, *, longest_delay_s: float = 0.05, duplicated: float = 0.4) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._longest_delay_s = longest_delay_s
        self._duplicated = duplicated
        self._peers: dict[bytes, DealerSocket] = {}
        self._seen = 0
        self.duplicates = 0
        self.reordered = 0
        self._delivered: dict[tuple[bytes, str], int] = {}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket, address = bind_router(self._context, "tcp://127.0.0.1:*", max_frame_bytes=1 << 23)
        self._front = RouterSocket(socket, self._from_peer)
        try:
            yield address
        finally:
            self._front.close()
            for peer in self._peers.values():
                peer.close()
            self._context.destroy(linger=0)

    def _from_peer(self, identity: bytes, frame: bytes) -> None:
        if identity not in self._peers:
            dealer = connect_dealer(self._context, self._target, identity, max_frame_bytes=1 << 23)
            self._peers[identity] = DealerSocket(dealer, lambda back: self._later(identity, "down", back))
        self._later(identity, "up", frame)

    def _later(self, identity: bytes, direction: str, frame: bytes) -> None:
        self._seen += 1
        copies = 2 if self._random.random() < self._duplicated else 1
        self.duplicates += copies - 1
        for _ in range(copies):
            delay_s = self._random.random() * self._longest_delay_s
            self._loop.call_later(delay_s, self._deliver, self._seen, identity, direction, frame)

    def _deliver(self, number: int, identity: bytes, direction: str, frame: bytes) -> None:
        last = self._delivered.get((identity, direction), 0)
        self.reordered += number < last
        self._delivered[identity, direction] = max(last, number)
        if direction == "up":
            self._peers[identity].send(frame)
        else:
            self._front.send(identity, frame)
