"""The same do-nothing environment behind openenv-core's server, and its own client; runs in an environment with both.

python noop_openenv.py serve PORT SESSIONS
python noop_openenv.py drive PORT SESSIONS SECONDS     prints {"rate": actions a second, "rtt_s": sequential step}
"""

# mypy: ignore-errors

from __future__ import annotations

import asyncio
import json
import sys
import time


def serve(port: int, sessions: int) -> None:
    """Serve on 127.0.0.1 until killed."""
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        text: str = ""

    class Said(Observation):
        text: str = ""

    class Noop(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **_):
            return Said(text="ok")

        def step(self, action, timeout_s=None, **_):
            return Said(text="ok")

        @property
        def state(self):
            return State()

    app = create_fastapi_app(Noop, Say, Said, max_concurrent_envs=sessions + 1)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


async def drive(port: int, sessions: int, seconds: float) -> dict[str, float]:
    """Step `sessions` sessions as fast as they go, then one alone."""
    from openenv.core import GenericEnvClient

    clients = [GenericEnvClient(base_url=f"ws://127.0.0.1:{port}") for _ in range(sessions)]
    await asyncio.gather(*(client.connect() for client in clients))
    await asyncio.gather(*(client.reset() for client in clients))
    deadline = time.perf_counter() + seconds

    async def run(client) -> int:
        count = 0
        while time.perf_counter() < deadline:
            await client.step({"text": "x"})
            count += 1
        return count

    started = time.perf_counter()
    counts = await asyncio.gather(*(run(client) for client in clients))
    rate = sum(counts) / (time.perf_counter() - started)
    took = []
    for _ in range(1_000):
        started = time.perf_counter()
        await clients[0].step({"text": "x"})
        took.append(time.perf_counter() - started)
    await asyncio.gather(*(client.disconnect() for client in clients))
    return {"rate": rate, "rtt_s": sorted(took)[len(took) // 2]}


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        print(json.dumps(asyncio.run(drive(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))))
