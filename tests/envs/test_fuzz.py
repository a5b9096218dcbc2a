"""Frames that nobody would send, in large numbers: no crash, no leak, no answer to the wrong client."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from makespan.envs import worker_protocol as wp
from makespan.envs.client import EnvClient
from makespan.envs.protocol import MAX_FRAME_BYTES, decode_reply, encode
from makespan.envs.sockets import DealerSocket, connect_dealer
from makespan.rollout.trajectory import Task
from tests.envs.bench_broker import WORKER, BenchBroker
from tests.envs.plane import open_session, step

TYPES = ("hello", "open", "act", "close", "cancel", "lease", "release", "rekey", "bye", "status", "nonsense")
FIELDS = ("id", "session", "seq", "action", "task", "environment", "key", "deadline_s", "lease_s", "hold_s", "lease")
FIELDS += ("slot_class", "request", "keys", "trajectory_id", "progress", "job", "batch", "unknown")


def any_value(rng: random.Random, depth: int = 0) -> Any:
    """A value of any MessagePack type, often one that is nearly right."""
    names = ["s1", "s2", "s1/1", "e", "counting", "e.step", "", "x" * rng.randint(0, 600), "\u2603", "\0"]
    numbers = [0, 1, 2, -1, 1 << 62, 0.5, 1e300, float("nan"), float("inf"), float("-inf")]
    simple = [rng.choice(names), rng.choice(names), rng.choice(numbers), None, True, rng.randbytes(rng.randint(0, 40))]
    if depth < 3:
        simple.append([any_value(rng, depth + 1) for _ in range(rng.randint(0, 3))])
        simple.append({rng.choice(names): any_value(rng, depth + 1) for _ in range(rng.randint(0, 3))})
        simple.append({"text": "x"})
        simple.append({"task_id": "t", "environment": "e", "payload": {}})
    return rng.choice(simple)


def fuzzed_frame(rng: random.Random, types: tuple[str, ...] = TYPES, fields: tuple[str, ...] = FIELDS) -> bytes:
    """Noise, or a message with wrong or missing fields, whole or damaged."""
    shape = rng.random()
    if shape < 0.1:
        return rng.randbytes(rng.randint(0, 60))
    message = {"type": rng.choice(types), "id": rng.choice(["s1", "s2", "a", "b", "s1/1"])}
    for _ in range(rng.randint(0, 8)):
        message[rng.choice(fields)] = any_value(rng)
    frame = bytearray(b"\x01" + msgspec.msgpack.encode(message))
    if shape < 0.3:
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    elif shape < 0.4:
        del frame[rng.randrange(len(frame)) :]
    elif shape < 0.45:
        frame = bytearray(b"\x01" + rng.choice([b"\x91", b"\x81\xa1x"]) * rng.randint(1, 5_000))
    return bytes(frame)


class Fuzzer:
    """A pool of fuzzed frames, drawn from again and again, every third one with another byte damaged."""

    def __init__(self, seed: int, **vocabulary: tuple[str, ...]) -> None:
        self.rng = random.Random(seed)
        self._pool = [fuzzed_frame(self.rng, **vocabulary) for _ in range(5_000)]

    def frame(self) -> bytes:
        frame = self.rng.choice(self._pool)
        if frame and self.rng.random() < 0.33:
            at = int(self.rng.random() * len(frame))
            return frame[:at] + bytes([int(self.rng.random() * 256)]) + frame[at + 1 :]
        return frame


def test_a_hundred_thousand_fuzzed_frames_change_nothing_for_others_and_leave_nothing() -> None:
    """In process, so that everything the broker sends is seen; a third of the frames are a worker's."""
    broker = BenchBroker({"e.start": 3, "e.step": 2}, max_lease_s=60.0, worker_timeout_s=1e9)
    broker.join()
    good = b"good"
    broker.hello(good, lease_s=60.0)
    broker.open(good, "mine")
    broker.finish(good, "mine", 0)
    clients = Fuzzer(20_261_130)
    workers = Fuzzer(
        20_261_201,
        types=("introduce", "beat", "outcome", "stopped", "start"),
        fields=("sid", "seq", "value", "kind", "closed", "worker_id", "pid", "environments", "sessions"),
    )
    rng = clients.rng
    seq = 0
    for number in range(100_000):
        identity = rng.choice([b"bad1", b"bad2", b"\xff\xfe", b"bad1|good"])
        broker.replies.clear()
        if number % 3 == 0:
            broker.broker.receive_worker(rng.choice([b"w-bad", WORKER]), workers.frame())
            if rng.random() < 0.5:  # the real worker confirms what it was told, in between
                confirm(broker)
        else:
            broker.broker.receive_client(identity, clients.frame())
        assert all(to != good for to, _ in broker.replies)
        if number % 1_000 == 999:
            broker.wait(0.5)
            broker.hello(good, lease_s=60.0)
            broker.replies.clear()
            seq += 1
            broker.act(good, "mine", seq, deadline_s=1e6)
            for _ in range(1_000):  # behind whatever the fuzzers queued, it gets its turn
                confirm(broker)
                if broker.replies and broker.replies[-1][0] == good:
                    break
            assert [reply.id for to, reply in broker.replies if to == good] == [f"mine/{seq}"]  # type: ignore[union-attr]
    assert broker.broker.counters["frames_malformed"] > 10_000
    for _ in range(40):  # their leases end, and all that they had goes with them
        broker.wait(10.0)
        broker.hello(good, lease_s=60.0)
        confirm(broker)
    report = broker.broker.status()
    assert (report.clients, report.sessions) == (1, 1)
    assert all(slot.running == slot.waiting == 0 for slot in report.slots.values())


def confirm(broker: BenchBroker) -> None:
    """What a worker that works would answer to the orders that it has."""
    orders, broker.orders[:] = list(broker.orders), []
    for identity, order in orders:
        match order:
            case wp.Start() | wp.Step() | wp.Recall():
                seq = 0 if isinstance(order, wp.Start) else order.seq
                broker.report(wp.Outcome(sid=order.sid, seq=seq), identity)
            case wp.Stop():
                broker.report(wp.Stopped(sid=order.sid), identity)


def test_a_real_server_survives_a_hundred_thousand_fuzzed_frames(
    serve: Any, until: Any, counting_task: Callable[..., Task]
) -> None:
    async def main() -> None:
        slots = {"counting.start": 4, "counting.step": 4, "e.tool": 2}
        async with serve(slots=slots) as address, EnvClient(address, job="good") as client:
            session, _, _ = await open_session(client, counting_task("good", length=10**9))
            await step(session)
            (worker,) = (await client.status()).workers
            before = resident_bytes(worker.pid)
            fuzzer, context = Fuzzer(7), zmq.Context()
            answers: list[bytes] = []
            names = [uuid.uuid4().bytes.replace(b"\0", b"x") for _ in range(3)]
            bad = [
                DealerSocket(connect_dealer(context, address, name, max_frame_bytes=MAX_FRAME_BYTES), answers.append)
                for name in names
            ]
            try:
                for batch in range(100):
                    for number in range(1_000):
                        bad[number % 3].send(fuzzer.frame())
                    if batch % 10 == 0:
                        result, _ = await asyncio.wait_for(step(session), 60.0)
                        assert result.observation.messages[0].content.endswith(": go")
                    await asyncio.sleep(0)
                await until(address, lambda report: report.counters["frames_malformed"] > 10_000, within_s=60.0)
                await asyncio.wait_for(step(session), 60.0)
                assert len(answers) > 10_000
                decode_reply(answers[-1])
            finally:
                for socket in bad:
                    socket.send(encode_bye())
                    socket.close(linger_ms=1_000)
                context.destroy(linger=1_000)
            report = await until(address, lambda report: report.clients == 1, within_s=60.0)
            assert (report.sessions, report.workers[0].pid) == (1, worker.pid)
            assert resident_bytes(worker.pid) - before < 100_000_000

    asyncio.run(main())


def encode_bye() -> bytes:
    from makespan.envs.protocol import Bye

    return encode(Bye(id="bye"))


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
