"""What the broker remembers: clients, their sessions, the action each session has pending, and the workers.

These are plain records; `makespan.envs.broker` and its parts move them. Everything a client owns hangs off its
`ClientRecord`, so that a client that goes away takes all of it along.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


@dataclass(slots=True, eq=False)
class ClientRecord:
    """A client, known by the routing id of its socket."""

    identity: bytes
    job: str
    lease_s: float
    heard_s: float
    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    """By session id (the id of the request that opened it)."""
    pending: dict[str, ActionRecord] = field(default_factory=dict)
    """Requests that hold or wait for a slot, by request id."""

    @property
    def name(self) -> str:
        return self.identity.decode("latin-1")

    def sid(self, session_id: str) -> str:
        """The name of one of its sessions, unique over all clients (a session id is never empty)."""
        return f"{len(self.identity)}:{self.name}:{session_id}"


@dataclass(slots=True, eq=False)
class WorkerRecord:
    """A worker that introduced itself."""

    identity: bytes
    worker_id: str
    pid: int
    environments: frozenset[str]
    heard_s: float
    resent_s: float
    """When what it has not confirmed was last sent again."""
    sessions: dict[str, SessionRecord] = field(default_factory=dict)
    """By `sid`."""
    running: int = 0
    """As the worker said in its last beat."""
    abandoned: int = 0
    draining: bool = False


@dataclass(slots=True, eq=False)
class SessionRecord:
    """A session from its `Open` until its client closed it and its worker confirmed."""

    sid: str
    """Unique over all clients: the client's name and the session id."""
    id: str
    client: ClientRecord
    environment: str
    trajectory_id: str
    worker: WorkerRecord | None = None
    """Chosen when the reset is granted; sticky from then on."""
    seq: int = 0
    """The last action that was accepted (0: the reset)."""
    request_id: str = ""
    """The id of that action; empty when only a worker's word tells of it."""
    action: ActionRecord | None = None
    """That action, while it holds or waits for a slot or is recalled."""
    reply: bytes | None = None
    """The answer to that action, kept until the next one: a repeated request gets it again."""
    ended: bool = False
    """No further action is accepted."""
    stopping: bool = False
    """The worker was told to stop it and has not confirmed yet."""
    forget: bool = False
    """Its client closed it: drop the record as soon as the worker has confirmed."""


@dataclass(slots=True, eq=False)
class ActionRecord:
    """An `Open`, `Act` or `Lease` from its acceptance until its slot is free again."""

    client: ClientRecord
    id: str
    session: SessionRecord
    seq: int
    slot_class: str
    payload: msgspec.Raw | None = None
    """What the worker gets; nothing for a lease, and for what runs already."""
    submitted_s: float = 0.0
    granted_s: float | None = None
    answered: bool = False
    """The client has its answer (a deadline passed, or it withdrew) though the slot is still held."""
    lease: bool = False
    """It runs in the client, which says when it is over, at the latest `hold_s` after the grant."""
    hold_s: float = 0.0
    outcome: str = "ok"
    """What the event log will call it: `ok` or the kind of failure."""
    recalled: bool = False
    """It ran before this broker started; only its outcome is awaited, and it has no slot here."""

    @property
    def sent(self) -> bool:
        """Whether the worker has been told of it."""
        return self.recalled or self.granted_s is not None
