"""A broker on a bench: its frames by hand, its clock by hand, and a worker that does what it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from makespan.envs import worker_protocol as wp
from makespan.envs.broker import Broker
from makespan.envs.config import BrokerConfig
from makespan.envs.protocol import Act, Hello, Open, Reply, Request, decode_reply, encode, pack
from makespan.envs.slots import SlotClasses
from makespan.rollout.environment import Action
from makespan.rollout.gate import RateLimit
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.trajectory import Task

WORKER = b"w1"


class BenchBroker:
    """Collects what the broker sends: `replies` by client, `orders` by worker."""

    def __init__(
        self,
        slots: dict[str, int],
        *,
        rates: dict[str, RateLimit] | None = None,
        log_path: Path | None = None,
        **bounds: Any,
    ) -> None:
        self.now = 1_000.0
        self.replies: list[tuple[bytes, Reply]] = []
        self.orders: list[tuple[bytes, wp.ToWorker]] = []
        self.event_log = EventLog(log_path, "broker", lambda: self.now)
        self.slots = SlotClasses(slots, rates=rates, clock=lambda: self.now, event_log=self.event_log)
        self.broker = Broker(
            BrokerConfig(**bounds),
            self.slots,
            clock=lambda: self.now,
            to_client=lambda identity, frame: self.replies.append((identity, decode_reply(frame))),
            to_worker=lambda identity, frame: self.orders.append((identity, wp.decode_to_worker(frame))),
            event_log=self.event_log,
        )

    def join(self, worker: bytes = WORKER, environments: tuple[str, ...] = ("e",), **facts: Any) -> None:
        introduce = wp.Introduce(worker_id=worker.decode(), pid=1, environments=environments, **facts)
        self.broker.receive_worker(worker, encode(introduce))
        self.take_orders()

    def hello(self, client: bytes, **facts: Any) -> None:
        self.broker.receive_client(client, encode(Hello(**facts)))

    def say(self, client: bytes, request: Request) -> list[Reply]:
        """Send a request; gives what came back to that client at once."""
        before = len(self.replies)
        self.broker.receive_client(client, encode(request))
        return [reply for identity, reply in self.replies[before:] if identity == client]

    def open(self, client: bytes, request_id: str, **facts: Any) -> list[Reply]:
        facts.setdefault("environment", "e")
        task = pack(Task(task_id=request_id, environment="e"))
        return self.say(client, Open(id=request_id, task=task, trajectory_id=request_id, **facts))

    def act(self, client: bytes, session: str, seq: int, request_id: str = "", **facts: Any) -> list[Reply]:
        name = request_id or f"{session}/{seq}"
        return self.say(client, Act(id=name, session=session, seq=seq, action=pack(Action("x")), **facts))

    def take_orders(self) -> list[wp.ToWorker]:
        taken = [order for _, order in self.orders]
        self.orders.clear()
        return taken

    def report(self, message: wp.FromWorker, worker: bytes = WORKER) -> None:
        self.broker.receive_worker(worker, encode(message))

    def sid(self, client: bytes, session: str) -> str:
        return f"{len(client)}:{client.decode()}:{session}"

    def finish(self, client: bytes, session: str, seq: int, worker: bytes = WORKER, **facts: Any) -> None:
        self.report(wp.Outcome(sid=self.sid(client, session), seq=seq, **facts), worker)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.broker.tick()
