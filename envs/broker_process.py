"""The broker as a process: sockets for clients and workers, a clock, an event log.

Started by the supervisor (`makespan.envs.supervisor`), which also tells it, one JSON line each, of workers it saw die.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import zmq

from makespan.envs.broker import Broker
from makespan.envs.config import BrokerConfig, ServerConfig
from makespan.envs.metrics import families
from makespan.envs.process import Announcer, on_signals, read_config, run_process, set_up_logging, watch_parent
from makespan.envs.slots import SlotClasses
from makespan.envs.sockets import RouterSocket, bind_router
from makespan.rollout.errors import ConfigError
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.telemetry.exposition import metrics_endpoint, render

TICK_S = 0.05
"""How coarse deadlines and leases are."""

RATE_TICK_S = 0.005
"""How coarse a rate limit is."""

FLUSH_S = 1.0
"""How much of the event log a killed broker may lose."""


class BrokerProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A server's configuration, with the ports fixed if an earlier broker had chosen them."""

    server: ServerConfig
    expected_workers: int = 0


class WorkerLost(msgspec.Struct, frozen=True, kw_only=True):
    """A line from the supervisor."""

    worker_lost: str
    why: str


async def run_broker(
    config: BrokerProcessConfig, stop: asyncio.Event, on_ready: Callable[[str, str, str], None]
) -> None:
    """Serve until `stop` is set; `on_ready` gets the addresses for clients, workers and Prometheus ("" if not served).

    Raises `ConfigError`.
    """
    server = config.server
    clock = asyncio.get_running_loop().time
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        clients, client_address = _bind(context, server, server.port)
        workers, worker_address = _bind(context, server, server.worker_port)
        with EventLog(Path(server.event_log) if server.event_log else None, "broker", clock) as event_log:
            broker = Broker(
                BrokerConfig(
                    max_queued=server.max_queued,
                    max_frame_bytes=server.max_frame_bytes,
                    worker_timeout_s=server.worker_timeout_s,
                    stop_grace_s=server.stop_grace_s,
                    expected_workers=config.expected_workers,
                ),
                SlotClasses(server.slots, rates=server.rates, clock=clock, event_log=event_log),
                clock=clock,
                to_client=lambda identity, frame: client_socket.send(identity, frame),
                to_worker=lambda identity, frame: worker_socket.send(identity, frame),
                event_log=event_log,
            )
            client_socket = RouterSocket(clients, broker.receive_client)
            worker_socket = RouterSocket(workers, broker.receive_worker)
            watch_parent(lambda line: _lose_worker(broker, line), stop.set)
            try:
                async with _metrics(server, broker) as metrics_url:
                    on_ready(client_address, worker_address, metrics_url)
                    await _tick_until(stop, broker, event_log, RATE_TICK_S if server.rates else TICK_S)
            finally:
                client_socket.close(linger_ms=500)
                worker_socket.close(linger_ms=500)
    finally:
        context.destroy(linger=500)


@contextlib.asynccontextmanager
async def _metrics(server: ServerConfig, broker: Broker) -> AsyncIterator[str]:
    if server.metrics_port is None:
        yield ""
    else:
        async with metrics_endpoint(server.host, server.metrics_port, lambda: render(families(broker.status()))) as url:
            yield url


def _bind(context: zmq.Context[zmq.Socket[bytes]], server: ServerConfig, port: int) -> tuple[zmq.Socket[bytes], str]:
    address = f"tcp://{server.host}:{port or '*'}"
    try:
        return bind_router(context, address, max_frame_bytes=server.max_frame_bytes)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {address}: {error}; choose another host or port") from error


def _lose_worker(broker: Broker, line: bytes) -> None:
    message = msgspec.json.decode(line, type=WorkerLost)
    broker.lose_worker(message.worker_lost, message.why)


async def _tick_until(stop: asyncio.Event, broker: Broker, event_log: EventLog, every_s: float) -> None:
    loop = asyncio.get_running_loop()
    flushed_s = loop.time()
    while not stop.is_set():
        await asyncio.sleep(every_s)
        broker.tick()
        if loop.time() - flushed_s > FLUSH_S:
            flushed_s = loop.time()
            event_log.flush()


async def _main(config: BrokerProcessConfig) -> None:
    stop, announce = asyncio.Event(), Announcer()
    on_signals((signal.SIGTERM, signal.SIGINT), stop.set)
    await run_broker(
        config,
        stop,
        lambda address, workers, metrics: announce(address=address, worker_address=workers, metrics=metrics),
    )


def main() -> int:
    """The process."""
    set_up_logging()
    asyncio.run(_main(read_config(BrokerProcessConfig)))
    return 0


if __name__ == "__main__":
    run_process(main)
