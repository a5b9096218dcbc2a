"""The broker's figures for Prometheus: its status as text, over HTTP.

`render` turns a `StatusReply` into the text exposition format, version 0.0.4; `MetricsEndpoint` serves that at
`GET /metrics`, and knows no more of HTTP than this needs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

from makespan.envs.protocol import StatusReply
from makespan.rollout.errors import ConfigError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

REQUEST_TIMEOUT_S = 5.0

Sample = tuple[dict[str, str], float]


def render(report: StatusReply) -> str:
    """The metrics of a status, one family after the other."""
    classes = [({"slot_class": name}, slot) for name, slot in sorted(report.slots.items())]
    workers = [({"worker": worker.worker_id}, worker) for worker in report.workers]
    families: list[tuple[str, str, str, Iterable[Sample]]] = [
        ("slots", "gauge", "Slots of a class.", [(at, slot.slots) for at, slot in classes]),
        ("slots_running", "gauge", "Actions that hold a slot.", [(at, slot.running) for at, slot in classes]),
        ("slots_waiting", "gauge", "Actions that wait for a slot.", [(at, slot.waiting) for at, slot in classes]),
        (
            "oldest_wait_seconds",
            "gauge",
            "How long the oldest waiting action has waited; 0 when none waits.",
            [(at, slot.oldest_wait_s or 0.0) for at, slot in classes],
        ),
        ("grants_total", "counter", "Slots granted.", [(at, slot.granted) for at, slot in classes]),
        ("withdrawn_total", "counter", "Actions that never ran.", [(at, slot.cancelled) for at, slot in classes]),
        ("sessions", "gauge", "Open sessions.", [({}, report.sessions)]),
        ("clients", "gauge", "Clients with a lease.", [({}, report.clients)]),
        ("workers", "gauge", "Workers that are alive.", [({}, len(report.workers))]),
        ("worker_sessions", "gauge", "Sessions of a worker.", [(at, worker.sessions) for at, worker in workers]),
        (
            "worker_abandoned_calls",
            "gauge",
            "Calls of environments that were given up and still hold a thread.",
            [(at, worker.abandoned) for at, worker in workers],
        ),
        ("uptime_seconds", "gauge", "Since this broker process started.", [({}, report.uptime_s)]),
        (
            "events_total",
            "counter",
            "What happened, by kind, since this broker process started.",
            [({"event": name}, count) for name, count in sorted(report.counters.items())],
        ),
    ]
    lines = []
    for name, kind, text, samples in families:
        lines.append(f"# HELP makespan_env_{name} {text}")
        lines.append(f"# TYPE makespan_env_{name} {kind}")
        lines.extend(f"makespan_env_{name}{_labels(labels)} {value:g}" for labels, value in samples)
    return "\n".join(lines) + "\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    quoted = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in labels.values())
    return "{" + ",".join(f'{name}="{value}"' for name, value in zip(labels, quoted, strict=True)) + "}"


@contextlib.asynccontextmanager
async def metrics_endpoint(host: str, port: int, report: Callable[[], StatusReply]) -> AsyncIterator[str]:
    """Serve `report()` for the time of the block; gives the URL. Raises `ConfigError` when it cannot listen."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(_response(head, report))
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(answer, host, port)
    except OSError as error:
        raise ConfigError(f"metrics_port {port}: cannot listen on {host} ({error})") from error
    async with server:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}/metrics"


def _response(head: bytes, report: Callable[[], StatusReply]) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method != b"GET" or path != b"/metrics":
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    body = render(report()).encode()
    start = (
        f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return start.encode() + body
