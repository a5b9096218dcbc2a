"""The event log: what one process saw, in the order it saw it.

Each process appends to its own file, one JSON object a line. The first line is a `LogHeader`, every other one an
`Event`. Times are readings of that process's monotonic clock (the running loop's `time()`), in seconds; the header
carries the host's boot id, which tells whose clocks may be compared, and one reading of the wall clock beside the
monotonic one. Metrics are computed from the merged logs, never counted beside them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

log = logging.getLogger("makespan.telemetry")

LOG_VERSION = 1


class LogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a log."""

    version: int
    writer: str
    """Unique among the logs of a run: role, host and process id."""
    role: str
    """`engine`, `broker`, …: what this log is authoritative for."""
    host: str
    host_boot_id: str
    """Logs with the same boot id share one monotonic clock."""
    pid: int
    wall_s: float
    """Seconds since the epoch, read together with `monotonic_s`."""
    monotonic_s: float


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened.

    `monotonic_s` is when it was over; `data` may hold `start_s` on the same clock and durations measured elsewhere.
    """

    seq: int
    monotonic_s: float
    kind: str
    trajectory_id: str = ""
    data: dict[str, Any] = {}


def host_boot_id() -> str:
    """The kernel's boot id, or the host's name where there is none (then only this host's own logs compare)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _header(path: Path, role: str, clock: Callable[[], float]) -> LogHeader:
    host = socket.gethostname()
    return LogHeader(
        version=LOG_VERSION,
        writer=f"{role}@{host}:{os.getpid()}:{path.stem}",
        role=role,
        host=host,
        host_boot_id=host_boot_id(),
        pid=os.getpid(),
        wall_s=time.time(),
        monotonic_s=clock(),
    )


class EventLog:
    """Appends events to a file, or, with `path=None`, keeps nothing and costs next to nothing.

    Lines are buffered by the file object; `flush()` pushes them out, `close()` does so for good. An event emitted after
    `close()` is dropped (a late callback during shutdown must not fail it). `header` replaces the one that names this
    process and this moment: a simulated log depends on neither.

    A log that cannot be written any more (a full disk) ends there, and says so once through `logging`: what it observes
    goes on. A file that cannot even be opened raises `OSError`.
    """

    def __init__(
        self,
        path: Path | None,
        role: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        header: LogHeader | None = None,
    ) -> None:
        self._clock = clock
        self._seq = 0
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
            self._write(self._encoder.encode(header or _header(path, role, clock)) + b"\n")
            self.flush()

    @property
    def writes(self) -> bool:
        """Whether events are kept: what is costly to find out only for the log need not be found out otherwise."""
        return self._file is not None

    def emit(self, kind: str, trajectory_id: str = "", /, **data: Any) -> None:
        """Append one event, stamped with the log's clock."""
        if self._file is None:
            return
        event = Event(seq=self._seq, monotonic_s=self._clock(), kind=kind, trajectory_id=trajectory_id, data=data)
        self._write(self._encoder.encode(event) + b"\n")
        self._seq += 1

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)
            self._file = None

    def _write(self, line: bytes) -> None:
        assert self._file is not None
        try:
            self._file.write(line)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        assert file is not None
        with contextlib.suppress(OSError):
            file.close()  # fails as well while lines are buffered, and closes all the same
        log.error("the event log %s ends here, for it cannot be written: %s", file.name, error)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
