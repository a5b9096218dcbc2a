"""A worker as a process, on the broker's machine or on another.

    python -m makespan.envs.worker_process '{"broker": "tcp://host:port", "environments": {"counting": {}}}'

Without an argument it reads its configuration from the first line of its standard input, as the supervisor starts it.

SIGTERM drains it: it gets no new sessions and ends when its last one has, or after `drain_timeout_s`. SIGINT, or the
end of its standard input, ends it at once.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import zmq

from makespan.envs.config import WorkerConfig, check_worker
from makespan.envs.process import Announcer, on_signals, read_config, run_process, set_up_logging, watch_parent
from makespan.envs.worker import Worker
from makespan.rollout.errors import ConfigError


async def run_worker(config: WorkerConfig, *, with_parent: bool) -> None:
    """Host sessions until a signal, or the end of the parent, says that it is over. Raises `ConfigError`."""
    stop, announce = asyncio.Event(), Announcer()
    worker = Worker(config)
    on_signals((signal.SIGINT,), stop.set)
    on_signals((signal.SIGTERM,), worker.drain)
    if with_parent:
        watch_parent(lambda _: None, stop.set)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        await worker.run(context, stop, lambda: announce(ready=worker.worker_id))
    except zmq.ZMQError as error:
        text = f"worker {worker.worker_id!r} cannot connect to broker {config.broker!r}: {error}"
        raise ConfigError(text) from error
    finally:
        context.destroy(linger=500)


def serve_worker(config: WorkerConfig) -> int:
    """Run a worker in this process until a signal ends it; gives the exit code. Raises `MakespanError`."""
    check_worker(config)
    set_up_logging()
    asyncio.run(run_worker(config, with_parent=False))
    return 0


def main() -> int:
    """The process."""
    if len(sys.argv) > 1:
        try:
            return serve_worker(msgspec.json.decode(sys.argv[1], type=WorkerConfig))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"environment worker: {error}") from error
    set_up_logging()
    asyncio.run(run_worker(read_config(WorkerConfig), with_parent=True))
    return 0


if __name__ == "__main__":
    run_process(main)
