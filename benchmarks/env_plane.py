"""What the environment plane costs: its rate, its round trip and its limits, each beside a yardstick of the same run.

    python benchmarks/env_plane.py [--quick] [--json PATH]

- `rate_ratio_openenv`: actions a second of a no-op environment through client, broker and worker, over the same
  environment behind openenv-core's server with its own client, as many sessions, on this machine, in turns;
- `rtt_ratio_echo`: one sequential action over one bare pyzmq asyncio echo of a frame as large, in turns (and
  `blocking_echo_rtt_ms` for comparison: asyncio on the client's side only);
- `sessions_open`, `actions_queued`, `gate_decision_p99_ms`: the sizes at which the plane was seen to hold.

openenv-core lives in an environment of its own (its dependencies are not ours), made on the first run under the user's
cache directory; `--openenv-python` names another. Where it cannot be had, its figures are null.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from makespan.envs.client import EnvClient
from makespan.envs.config import EnvironmentConfig, ServerConfig
from makespan.envs.spawn import spawn_server
from makespan.rollout.environment import Action
from makespan.rollout.gate import ActionGate
from makespan.rollout.trajectory import Progress, Task

HERE = Path(__file__).resolve().parent
SESSIONS = 32
ECHO_BYTES = 600
TASK = Task(task_id="noop", environment="noop")
OPENENV_PACKAGES = (
    "fastapi",
    "uvicorn[standard]",
    "websockets",
    "pydantic>=2",
    "requests",
    "httpx",
    "fastmcp>=3",
    "pyyaml",
    "openai",
    "huggingface_hub",
    "tomli",
    "tomli-w",
)


# --- ours -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def noop_server(slots: dict[str, int]) -> AsyncIterator[str]:
    """A server of the no-op environment."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as folder:
        environments = {"noop": EnvironmentConfig(factory="noop_environment:Noop")}
        config = ServerConfig(slots=slots, environments=environments)
        async with spawn_server(config, log_path=Path(folder) / "server.log") as address:
            yield address


async def drive(address: str, sessions: int, seconds: float) -> dict[str, float]:
    """Step `sessions` sessions as fast as they go, then one alone."""
    async with EnvClient(address, job="benchmark") as client:
        opened = await asyncio.gather(
            *(client.open(f"t{number}", TASK, key=0.0, progress=Progress()) for number in range(sessions))
        )
        deadline = time.perf_counter() + seconds
        action, progress = Action("x" * 300), Progress()

        async def run(session: Any) -> int:
            count = 0
            while time.perf_counter() < deadline:
                await session.step(action, key=0.0, progress=progress)
                count += 1
            return count

        started = time.perf_counter()
        counts = await asyncio.gather(*(run(session) for session, _, _ in opened))
        rate = sum(counts) / (time.perf_counter() - started)
        took = []
        for _ in range(1_000):
            started = time.perf_counter()
            await opened[0][0].step(action, key=0.0, progress=progress)
            took.append(time.perf_counter() - started)
        return {"rate": rate, "rtt_s": statistics.median(took)}


# --- yardsticks -------------------------------------------------------------------------------------------------


def echo_blocking() -> None:
    """A blocking ROUTER that sends back what it gets."""
    router = zmq.Context().socket(zmq.ROUTER)
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        router.send_multipart(router.recv_multipart())


async def echo_asyncio() -> None:
    """The same with pyzmq's asyncio socket."""
    router = zmq.asyncio.Context().socket(zmq.ROUTER)
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        await router.send_multipart(await router.recv_multipart())


async def echo_rtt_s(port: int) -> float:
    """One sequential echo through pyzmq's asyncio socket, in seconds (the median of 1,000)."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    frame, took = b"x" * ECHO_BYTES, []
    for _ in range(1_200):
        started = time.perf_counter()
        await dealer.send(frame)
        await dealer.recv()
        took.append(time.perf_counter() - started)
    context.destroy(linger=0)
    return statistics.median(took[200:])


@contextlib.contextmanager
def echo_server(kind: str) -> Iterator[int]:
    """An echo server process; gives its port."""
    process = subprocess.Popen([sys.executable, __file__, "--role", kind], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def openenv_python(given: str | None) -> str | None:
    """A Python that has openenv-core; None when there is none to be had."""
    if given is not None:
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "makespan" / "openenv-0.3.0"
    python = cache / "bin" / "python"
    check = [str(python), "-c", "import openenv.core.env_server"]
    if python.exists() and subprocess.run(check, capture_output=True, check=False).returncode == 0:
        return str(python)
    print("installing openenv-core into an environment of its own (about two minutes, once)", file=sys.stderr)
    pip = [str(python), "-m", "pip", "install", "-q"]
    commands = (
        [sys.executable, "-m", "venv", "--clear", str(cache)],
        [*pip, *OPENENV_PACKAGES],
        [*pip, "--no-deps", "openenv-core==0.3.0"],
        check,
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"openenv-core cannot be had here: {done.stderr.strip()[-300:]}", file=sys.stderr)
            return None
    return str(python)


@contextlib.contextmanager
def openenv_server(python: str) -> Iterator[int]:
    """openenv-core's server of the no-op environment; gives its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [python, str(HERE / "noop_openenv.py"), "serve", str(port), str(SESSIONS)], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60.0
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("openenv-core's server did not start")
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


async def run_child(*command: str) -> dict[str, float]:
    """Run a driver in a process of its own and read its figures."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{command} ended with code {process.returncode}")
    return dict(json.loads(output))


# --- limits -----------------------------------------------------------------------------------------------------


def gate_decision_p99_ms(waiting: int = 10_000) -> float:
    """The 99th percentile of one release, one rekey, one arrival and the grant that follows, with `waiting` queued."""
    gate: ActionGate[int] = ActionGate(64)
    for number in range(waiting + 64):
        gate.submit(number, float(-number % 9973))
    running, took = gate.grant(0.0), []
    for number in range(5_000):
        started = time.perf_counter()
        gate.release(running.pop(0))
        gate.rekey(number, float(number % 7))
        gate.submit(1_000_000 + number, float(number % 9967))
        running += gate.grant(0.0)
        took.append(time.perf_counter() - started)
    return 1e3 * sorted(took)[int(0.99 * len(took))]


async def hold(sessions: int, queued: int) -> dict[str, float]:
    """Open `sessions` sessions, then queue `queued` actions (one a session, the rest resets) behind full slots."""
    started = time.perf_counter()
    async with (
        noop_server({"noop.start": sessions, "noop.step": 1, "gate.tool": 1}) as address,
        EnvClient(address, job="benchmark") as client,
    ):
        opened = await asyncio.gather(
            *(client.open(f"t{number}", TASK, key=0.0, progress=Progress()) for number in range(sessions))
        )
        opened_s = time.perf_counter() - started
        async with client.lease("noop.step", "blocker", key=0.0, progress=Progress()):
            async with client.lease("gate.tool", "blocker", key=0.0, progress=Progress()):
                steps = [
                    asyncio.ensure_future(session.step(Action("x"), key=float(number % 97), progress=Progress()))
                    for number, (session, _, _) in enumerate(opened)
                ]
                tools = [
                    asyncio.ensure_future(
                        hold_tool(client, f"tool{number}", float(number % 97)),
                    )
                    for number in range(queued - len(steps))
                ]
                report = await client.status(timeout_s=60.0)
                while sum(slot.waiting for slot in report.slots.values()) < queued:
                    await asyncio.sleep(0.2)
                    report = await client.status(timeout_s=60.0)
            queued_s = time.perf_counter() - started - opened_s
        await asyncio.gather(*steps, *tools)
        drained_s = time.perf_counter() - started - opened_s - queued_s
    return {
        "sessions_open": report.sessions,
        "actions_queued": sum(slot.waiting for slot in report.slots.values()),
        "hold_opened_s": opened_s,
        "hold_queued_s": queued_s,
        "hold_drained_s": drained_s,
    }


async def hold_tool(client: EnvClient, name: str, key: float) -> None:
    """Wait for a slot and give it back at once."""
    async with client.lease("gate.tool", name, key=key, progress=Progress()):
        pass


# --- all of it --------------------------------------------------------------------------------------------------


async def measure(rounds: int, seconds: float, python: str | None, sessions: int, queued: int) -> dict[str, Any]:
    """All figures; each ratio's two sides are measured in turns."""
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    echoes: list[float] = []
    blocking_echoes: list[float] = []
    slots = {"noop.start": SESSIONS, "noop.step": SESSIONS}
    with contextlib.ExitStack() as servers:
        echo_port = servers.enter_context(echo_server("echo-asyncio"))
        blocking_port = servers.enter_context(echo_server("echo-blocking"))
        openenv_port = None if python is None else servers.enter_context(openenv_server(python))
        async with noop_server(slots) as address:
            for _ in range(rounds):
                echoes.append(await echo_rtt_s(echo_port))
                driver = (sys.executable, __file__, "--role", "drive", "--address", address, "--seconds", str(seconds))
                ours.append(await run_child(*driver))
                blocking_echoes.append(await echo_rtt_s(blocking_port))
                if python is not None:
                    driver = (python, str(HERE / "noop_openenv.py"), "drive", str(openenv_port), str(SESSIONS))
                    theirs.append(await run_child(*driver, str(seconds)))
    rtt_ratio = statistics.median(one["rtt_s"] / echo_s for one, echo_s in zip(ours, echoes, strict=True))
    rate_ratio = openenv_rate = openenv_rtt_ms = None
    if theirs:  # each round's two sides ran one after the other: the ratio is theirs, whatever else the machine did
        rate_ratio = statistics.median(one["rate"] / other["rate"] for one, other in zip(ours, theirs, strict=True))
        openenv_rate = statistics.median(one["rate"] for one in theirs)
        openenv_rtt_ms = 1e3 * statistics.median(one["rtt_s"] for one in theirs)
    return {
        "sessions": SESSIONS,
        "rounds": rounds,
        "rate_per_s": statistics.median(one["rate"] for one in ours),
        "openenv_rate_per_s": openenv_rate,
        "rate_ratio_openenv": rate_ratio,
        "rtt_ms": 1e3 * statistics.median(one["rtt_s"] for one in ours),
        "openenv_rtt_ms": openenv_rtt_ms,
        "echo_rtt_ms": 1e3 * statistics.median(echoes),
        "rtt_ratio_echo": rtt_ratio,
        "blocking_echo_rtt_ms": 1e3 * statistics.median(blocking_echoes),
        "gate_decision_p99_ms": gate_decision_p99_ms(),
        **(await hold(sessions, queued)),
    }


def bars(figures: dict[str, Any], quick: bool) -> list[dict[str, Any]]:
    """What is asked of the plane, and whether it was seen."""
    ratio = figures["rate_ratio_openenv"]
    full = not quick
    return [
        {"name": "rate_ratio_openenv >= 2", "holds": None if ratio is None else ratio >= 2.0, "figure": ratio},
        {
            "name": "rtt_ratio_echo <= 3",
            "holds": figures["rtt_ratio_echo"] <= 3.0,
            "figure": figures["rtt_ratio_echo"],
        },
        {
            "name": "gate_decision_p99_ms < 2 at 10,000 waiting",
            "holds": figures["gate_decision_p99_ms"] < 2.0,
            "figure": figures["gate_decision_p99_ms"],
        },
        {
            "name": "10,000 open sessions",
            "holds": figures["sessions_open"] >= 10_000 if full else None,
            "figure": figures["sessions_open"],
        },
        {
            "name": "50,000 queued actions",
            "holds": figures["actions_queued"] >= 50_000 if full else None,
            "figure": figures["actions_queued"],
        },
    ]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes: under 50 s")
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON; - is standard output")
    parser.add_argument("--openenv-python", metavar="PATH", help="a Python that has openenv-core")
    parser.add_argument("--role", choices=("echo-asyncio", "echo-blocking", "drive"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=3.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "echo-asyncio":
        asyncio.run(echo_asyncio())
    if options.role == "echo-blocking":
        echo_blocking()
    if options.role == "drive":
        print(json.dumps(asyncio.run(drive(options.address, SESSIONS, options.seconds))))
        return 0
    rounds, seconds, sessions, queued = (3, 1.0, 1_000, 5_000) if options.quick else (15, 2.0, 10_000, 50_000)
    python = openenv_python(options.openenv_python)
    figures = asyncio.run(measure(rounds, seconds, python, sessions, queued))
    figures["bars"] = bars(figures, options.quick)
    text = json.dumps(figures, indent=2)
    if options.json == "-":
        print(text)
    else:
        if options.json:
            Path(options.json).write_text(text + "\n")
        for name, value in figures.items():
            if name != "bars":
                print(f"{name:24} {'not measured' if value is None else f'{value:,.3f}'}")
        for bar in figures["bars"]:
            print(f"{ {True: 'holds', False: 'FAILS', None: 'not tried'}[bar['holds']]:10} {bar['name']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
