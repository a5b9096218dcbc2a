"""An environment server: a supervisor process over a broker and its workers.

    python -m makespan.envs.server '{"slots": {"counting.start": 2, "counting.step": 4}}'

prints `{"address": "tcp://127.0.0.1:PORT", ...}` on standard output once it serves, and ends on SIGTERM or SIGINT. With
`--with-parent` it ends as well when its standard input does, that is when the process that holds the other end of the
pipe dies, however it dies. `makespan.envs.spawn.spawn_server` starts one that way.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

import msgspec

from makespan.envs.config import EnvironmentConfig, ServerConfig, hosted_environments, parse_config
from makespan.envs.process import Announcer, on_signals, read_line, run_process, set_up_logging, watch_parent
from makespan.envs.supervisor import Supervisor

__all__ = ["EnvironmentConfig", "ServerConfig", "hosted_environments", "parse_config", "serve"]


async def _serve(config: ServerConfig, with_parent: bool) -> None:
    announce = Announcer()
    supervisor = Supervisor(config, hosted_environments(config))
    serving = asyncio.ensure_future(supervisor.run(lambda ready: announce(**msgspec.structs.asdict(ready))))
    on_signals((signal.SIGTERM, signal.SIGINT), serving.cancel)
    if with_parent:
        watch_parent(lambda _: None, serving.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def serve(config: ServerConfig, *, with_parent: bool = False) -> int:
    """Run a server until a signal ends it; gives the exit code. Raises `MakespanError`."""
    set_up_logging()
    asyncio.run(_serve(config, with_parent))
    return 0


def main() -> int:
    """The command line of the server process."""
    parser = argparse.ArgumentParser(prog="python -m makespan.envs.server", description="Serve environments.")
    parser.add_argument("config", help="the configuration as JSON, or - for the first line of standard input")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input does")
    options = parser.parse_args()
    text = read_line() if options.config == "-" else options.config
    return serve(parse_config(text), with_parent=options.with_parent)


if __name__ == "__main__":
    run_process(main)
