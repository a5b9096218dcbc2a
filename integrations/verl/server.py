"""The environment server as an agent-loop worker sees it: one client a process, shared by all of its trajectories."""

from __future__ import annotations

import asyncio

from makespan.envs.client import EnvClient

_connecting: dict[tuple[asyncio.AbstractEventLoop, str, str], asyncio.Task[EnvClient]] = {}
"""By event loop, address and job. A client lives as long as its process: verl ends its workers by killing them, and the
server closes the sessions of a client whose lease runs out."""


async def environment_server(
    address: str, *, job: str, connect_timeout_s: float, action_deadline_s: float
) -> EnvClient:
    """The connected client of this process; the first caller connects, the others wait with it.

    A connection that fails, fails for all who wait for it, and the next caller tries again.

    Args:
        job: what the server shares slots by; the same in all processes of a training job.
        connect_timeout_s: how long to wait for the server's first answer.
        action_deadline_s: the longest an action may take, waiting for its slot included.

    Raises `EnvironmentUnreachable`.
    """
    key = (asyncio.get_running_loop(), address, job)
    connecting = _connecting.get(key)
    if connecting is None or (connecting.done() and (connecting.cancelled() or connecting.exception())):
        client = EnvClient(address, job=job, connect_timeout_s=connect_timeout_s, request_timeout_s=action_deadline_s)
        connecting = _connecting[key] = asyncio.create_task(_connect(client))
    return await asyncio.shield(connecting)  # one cancelled trajectory does not disconnect the others


async def _connect(client: EnvClient) -> EnvClient:
    await client.connect()
    return client
