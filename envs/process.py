"""What the server's processes have in common: how they are told what to do, and how they learn that it is over.

A child reads its configuration from the first line of its standard input, says on standard output that it is ready,
logs to standard error, and ends when its standard input ends: a parent that dies, however it dies, takes its children
along.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import msgspec

from makespan.rollout.errors import ConfigError, MakespanError

Config = TypeVar("Config")


class Announcer:
    """Tells the parent, once, that this process is ready.

    From its making on, whatever is printed goes to the log: an environment that prints must neither pass for this
    process nor fill a pipe that nobody reads.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._parent = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def __call__(self, **facts: Any) -> None:
        os.write(self._parent, json.dumps(facts).encode() + b"\n")
        os.close(self._parent)


class JsonLines(logging.Formatter):
    """One JSON object a record, with the ids that it was logged with (`extra=`), for people and for programs."""

    IDS = ("session", "trajectory", "job", "client", "worker", "slot_class")

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        entry.update((name, getattr(record, name)) for name in self.IDS if hasattr(record, name))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def set_up_logging() -> None:
    """Log to standard error, one JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def read_line() -> bytes:
    """The next line of standard input, unbuffered: what follows it belongs to `watch_parent`."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def read_config(kind: type[Config]) -> Config:
    """The configuration that the parent wrote as the first line. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(read_line(), type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{kind.__name__}: {error}") from error


def watch_parent(on_line: Callable[[bytes], object], on_end: Callable[[], object]) -> None:
    """Call `on_line` for each further line of standard input, and `on_end` once when it ends."""
    loop = asyncio.get_running_loop()
    number = sys.stdin.fileno()
    rest = bytearray()

    def read() -> None:
        data = os.read(number, 65_536)
        if not data:
            loop.remove_reader(number)
            on_end()
            return
        rest.extend(data)
        *lines, last = bytes(rest).split(b"\n")
        rest[:] = last
        for line in lines:
            on_line(line)

    loop.add_reader(number, read)


def on_signals(numbers: Iterable[signal.Signals], call: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, call)


def run_process(main: Callable[[], int]) -> NoReturn:
    """Run a process's main function and exit with its code; one line and code 2 for what the user can mend.

    The exit does not wait for threads: one that an environment has left stuck must not keep the process.
    """
    try:
        code = main()
    except MakespanError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except Exception:
        logging.getLogger(__name__).exception("a process of the environment server failed")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
