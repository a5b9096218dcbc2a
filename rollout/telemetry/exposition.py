"""Figures for Prometheus: the text that it reads, and the endpoint that it reads it from.

`render` writes metric families in the text exposition format, version 0.0.4; `metrics_endpoint` serves a text at
`GET /metrics` and knows no more of HTTP than this needs. Names follow Prometheus's conventions: `makespan_` and the
part of the system, the base unit (seconds, tokens, ratio), and `_total` for what only grows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Literal, NamedTuple

from makespan.rollout.errors import ConfigError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REQUEST_TIMEOUT_S = 5.0

Sample = tuple[dict[str, str], float]
"""Labels and value."""


class Family(NamedTuple):
    """One metric: its name, its type, what it is, and its samples by label."""

    name: str
    kind: Literal["gauge", "counter", "summary"]
    text: str
    samples: Iterable[Sample]
    counts: Iterable[Sample] = ()
    """Of a summary: how many observations there were; `samples` are their sums then."""


def render(families: Iterable[Family]) -> str:
    """The families one after the other; those without samples are left out."""
    lines = []
    for family in families:
        suffix = "_sum" if family.kind == "summary" else ""
        samples = [(suffix, labels, value) for labels, value in family.samples]
        samples += [("_count", labels, value) for labels, value in family.counts]
        if not samples:
            continue
        lines.append(f"# HELP {family.name} {family.text}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += [f"{family.name}{end}{_labels(labels)} {value!r}" for end, labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    quoted = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in labels.values())
    return "{" + ",".join(f'{name}="{value}"' for name, value in zip(labels, quoted, strict=True)) + "}"


@contextlib.asynccontextmanager
async def metrics_endpoint(host: str, port: int, text: Callable[[], str]) -> AsyncIterator[str]:
    """Serve `text()` for the time of the block; gives the URL. Raises `ConfigError` when it cannot listen."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head, text))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise ConfigError(f"metrics_port {port}: cannot listen on {host} ({error})") from error
    async with server:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}/metrics"


def _response(head: bytes, text: Callable[[], str]) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method != b"GET" or path != b"/metrics":
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    body = text().encode()
    start = (
        f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return start.encode() + body
