"""Sockets on a loop: nothing is lost, nothing is reordered, and an error in a callback does not stop the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import zmq

from makespan.envs.sockets import DealerSocket, RouterSocket, bind_router, connect_dealer

Run = Callable[[zmq.Context, str, zmq.Socket], Awaitable[None]]


def with_router(run: Run) -> None:
    async def main() -> None:
        context = zmq.Context()
        try:
            router, address = bind_router(context, "tcp://127.0.0.1:*", max_frame_bytes=1 << 20)
            async with asyncio.timeout(30):
                await run(context, address, router)
        finally:
            context.destroy(linger=0)

    asyncio.run(main())


def test_bursts_both_ways_arrive_complete_and_in_order() -> None:
    count = 3_000  # many batches

    async def run(context: zmq.Context, address: str, router: zmq.Socket) -> None:
        done = asyncio.get_running_loop().create_future()
        back: dict[bytes, list[bytes]] = {b"one": [], b"two": []}

        def echo(routing_id: bytes, frame: bytes) -> None:
            server.send(routing_id, frame)

        def take(name: bytes) -> Callable[[bytes], None]:
            def receive(frame: bytes) -> None:
                back[name].append(frame)
                if all(len(frames) == count for frames in back.values()) and not done.done():
                    done.set_result(None)

            return receive

        server = RouterSocket(router, echo)
        dealers = {
            name: DealerSocket(connect_dealer(context, address, name, max_frame_bytes=1 << 20), take(name))
            for name in back
        }
        for number in range(count):
            for name, dealer in dealers.items():
                dealer.send(name + b"%d" % number)
            if number % 100 == 0:
                await asyncio.sleep(0)
        await done
        for name, dealer in dealers.items():
            assert back[name] == [name + b"%d" % number for number in range(count)]
            dealer.close()
        server.close()

    with_router(run)


def test_an_error_in_the_callback_does_not_stop_what_follows() -> None:
    async def run(context: zmq.Context, address: str, router: zmq.Socket) -> None:
        loop = asyncio.get_running_loop()
        errors: list[object] = []
        loop.set_exception_handler(lambda _, details: errors.append(details["exception"]))
        got: list[bytes] = []
        done = loop.create_future()

        def receive(_: bytes, frame: bytes) -> None:
            if frame == b"bad":
                raise ValueError("bad")
            got.append(frame)
            if frame == b"last":
                done.set_result(None)

        server = RouterSocket(router, receive)
        dealer = DealerSocket(connect_dealer(context, address, b"one", max_frame_bytes=1 << 20), lambda _: None)
        for number in range(50):
            dealer.send(b"%d" % number)
            dealer.send(b"bad")  # many of these travel in one message
        dealer.send(b"last")
        await done
        assert len(errors) == 50
        assert got == [b"%d" % number for number in range(50)] + [b"last"]
        dealer.close()
        server.close()

    with_router(run)


def test_one_message_may_hold_several_frames_of_a_foreign_peer() -> None:
    async def run(context: zmq.Context, address: str, router: zmq.Socket) -> None:
        got: list[tuple[bytes, bytes]] = []
        done = asyncio.get_running_loop().create_future()

        def receive(routing_id: bytes, frame: bytes) -> None:
            got.append((routing_id, frame))
            if frame == b"c":
                done.set_result(None)

        server = RouterSocket(router, receive)
        dealer = connect_dealer(context, address, b"one", max_frame_bytes=1 << 20)
        dealer.send_multipart([b"a", b"b", b"c"])
        await done
        assert got == [(b"one", b"a"), (b"one", b"b"), (b"one", b"c")]
        dealer.close(0)
        server.close()

    with_router(run)
