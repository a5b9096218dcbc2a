"""The broker: owns environment slots and sessions, and runs every action at most once.

`Broker` is a state machine without sockets: frames go in through `receive_client` and `receive_worker`, frames come out
through the two functions it was given, and `tick` lets time pass. A process around it (`makespan.envs.broker_process`)
adds the sockets; tests and fuzzers drive it directly. What happens to a session and its action is in
`makespan.envs.sessions`; this file decides which requests get that far.

Invariants, kept here
    - A request id that was seen is never executed again: the pending action is left alone, the last answer of a
      session is repeated, anything older is dropped.
    - No frame, whatever it holds, raises: it is handled, answered with a failure, or dropped and counted.
    - An answer goes to the client whose request it answers: clients are told apart by the routing ids of their
      sockets, and every id is looked up among its own client's.
    - Everything belongs to a client, and goes with it when its lease ends.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable

from makespan.envs import worker_protocol as wp
from makespan.envs.config import BrokerConfig
from makespan.envs.deadlines import Deadlines
from makespan.envs.placement import Placement
from makespan.envs.protocol import (
    Act,
    Busy,
    Bye,
    Cancel,
    Close,
    Failure,
    Hello,
    HelloRequired,
    Lease,
    Open,
    Rekey,
    Release,
    Reply,
    Request,
    Result,
    Status,
    StatusReply,
    Welcome,
    decode_request,
    encode,
    id_of,
)
from makespan.envs.records import ClientRecord, WorkerRecord
from makespan.envs.sessions import Sessions
from makespan.envs.slots import SlotClasses
from makespan.rollout.environment import FailureKind
from makespan.rollout.errors import FormatError, nearest
from makespan.rollout.telemetry.events import EventLog

log = logging.getLogger(__name__)

Send = Callable[[bytes, bytes], object]


class Broker:
    """See the module's text.

    Args:
        slots: the slot classes; the environments served are those with a `.start` class.
        clock: seconds, monotonic.
        to_client, to_worker: called with a routing id and a frame.
    """

    def __init__(
        self,
        config: BrokerConfig,
        slots: SlotClasses,
        *,
        clock: Callable[[], float],
        to_client: Send,
        to_worker: Send,
        event_log: EventLog,
    ) -> None:
        self.server_id = uuid.uuid4().hex
        self.counters: Counter[str] = Counter()
        self._config = config
        self._slots = slots
        self._clock = clock
        self._to_client = to_client
        self._event_log = event_log
        self._started_s = clock()
        starts = (name for name in slots.counts if name.endswith(".start"))
        self._environments = tuple(sorted(name.removesuffix(".start") for name in starts))
        self._clients: dict[bytes, ClientRecord] = {}
        self._client_leases: Deadlines[ClientRecord] = Deadlines(granularity_s=0.1)
        self._held: list[tuple[bytes, Request]] = []
        self._placement = Placement(
            to_worker,
            server_id=self.server_id,
            clock=clock,
            timeout_s=config.worker_timeout_s,
            on_join=self._worker_joined,
            counters=self.counters,
        )
        self._sessions = Sessions(
            slots,
            self._placement,
            clock=clock,
            to_client=to_client,
            stop_grace_s=config.stop_grace_s,
            counters=self.counters,
        )
        self._sessions.accepting = config.expected_workers == 0

    # --- what clients say -----------------------------------------------------------------------------------

    def receive_client(self, identity: bytes, frame: bytes) -> None:
        """Handle one frame of a client, whatever it holds."""
        if len(frame) > self._config.max_frame_bytes:
            size = f"a frame of {len(frame)} bytes (at most {self._config.max_frame_bytes} are accepted)"
            self._reject(identity, "frames_too_large", size)
            return
        try:
            request = decode_request(frame)
        except FormatError as error:
            self._reject(identity, "frames_malformed", str(error), id_of(frame))
            return
        self._handle(identity, request)

    def _handle(self, identity: bytes, request: Request) -> None:
        client = self._clients.get(identity)
        if isinstance(request, Status):
            self._answer(identity, self.status(request.id))
        elif isinstance(request, Hello):
            self._hello(identity, request)
        elif client is None:
            self._answer(identity, HelloRequired(server_id=self.server_id))
        elif not self._sessions.accepting:  # a session that a worker has not told of yet must not be opened twice
            client.heard_s = self._clock()
            if len(self._held) < self._config.max_queued:
                self._held.append((identity, request))  # beyond that, its client sends it again
        else:
            client.heard_s = self._clock()
            self._serve(client, request)

    def _serve(self, client: ClientRecord, request: Request) -> None:
        match request:
            case Act():
                self._act(client, request)
            case Open():
                self._open(client, request)
            case Close():
                self._close(client, request)
            case Cancel():
                action = client.pending.get(request.request)
                if action is not None:
                    self._sessions.cancel(action)
                self._answer(client.identity, Result(id=request.id))
            case Lease():
                self._lease(client, request)
            case Release():
                self._release(client, request)
            case Rekey():
                self._rekey(client, request)
            case Bye():
                self._dismiss(client, "its client left")
                self._answer(client.identity, Result(id=request.id))

    def _hello(self, identity: bytes, hello: Hello) -> None:
        client = self._clients.get(identity)
        lease_s = min(hello.lease_s, self._config.max_lease_s)
        if client is None:
            if len(self._clients) >= self._config.max_clients:
                message = f"{len(self._clients)} clients are here already, and no more are accepted"
                self._answer(identity, Failure(id="", kind="busy", message=message, retryable=True))
                return
            client = self._admit(identity, hello.job, lease_s)
        client.heard_s, client.lease_s = self._clock(), lease_s
        welcome = Welcome(
            server_id=self.server_id,
            environments=self._environments,
            slots=self._slots.counts,
            lease_s=lease_s,
            max_frame_bytes=self._config.max_frame_bytes,
        )
        self._answer(identity, welcome)

    def _admit(self, identity: bytes, job: str, lease_s: float) -> ClientRecord:
        client = self._clients[identity] = ClientRecord(identity, job, lease_s, self._clock())
        self._event_log.emit("client_joined", "", client=client.name, job=job, lease_s=lease_s)
        self._client_leases.set(client, client.heard_s + lease_s)
        return client

    def _open(self, client: ClientRecord, request: Open) -> None:
        session = client.sessions.get(request.id)
        if session is not None:
            if session.seq == 0 and not session.request_id:
                self._sessions.recall(session, request.id, request.deadline_s)
            else:
                self._sessions.repeat(session, 0)
        elif self._sessions.is_known(client.sid(request.id)):
            self.counters["repeated_requests"] += 1  # of a session that is closed: nobody waits for this
        elif request.environment not in self._environments:
            known = nearest(request.environment, self._environments)
            self._fail(client, request.id, "refused", f"no environment {request.environment!r} is served here{known}")
        elif self._has_room(client, request):
            session = self._sessions.create(client, request.id, request.environment, request.trajectory_id)
            self._sessions.submit(session, 0, request)

    def _act(self, client: ClientRecord, request: Act) -> None:
        session = client.sessions.get(request.session)
        if session is None:
            message = f"session {request.session!r} is not known here (closed, or its client's lease ended)"
            self._fail(client, request.id, "unknown_session", message)
        elif request.seq == session.seq and not session.request_id:
            self._sessions.recall(session, request.id, request.deadline_s)
        elif request.seq < session.seq or (request.seq == session.seq and request.id == session.request_id):
            self._sessions.repeat(session, request.seq)
        elif request.seq == session.seq:
            message = f"action {request.seq} of session {session.id!r} is {session.request_id!r}, not {request.id!r}"
            self._fail(client, request.id, "protocol", message + ": count a session's actions up from 1")
        elif session.ended or session.worker is None:
            message = f"session {session.id!r} is not open (see the answer to {session.request_id!r})"
            self._fail(client, request.id, "unknown_session", message)
        elif session.action is not None:
            message = f"session {session.id!r} still runs {session.request_id!r}: one action at a time"
            self._fail(client, request.id, "protocol", message)
        elif self._has_room(client, request):
            self._sessions.submit(session, request.seq, request)

    def _close(self, client: ClientRecord, request: Close) -> None:
        session = client.sessions.get(request.session)
        if session is None:
            self._sessions.remember_closed(client.sid(request.session))  # its Open may still be on the way
        else:
            self._sessions.end(session, "cancelled", "the session was closed", forget=True)
        self._answer(client.identity, Result(id=request.id))

    def _lease(self, client: ClientRecord, request: Lease) -> None:
        session = client.sessions.get(request.id)
        if session is not None:
            self._sessions.repeat(session, 0)
        elif self._sessions.is_known(client.sid(request.id)):
            self.counters["repeated_requests"] += 1
        elif request.slot_class not in self._slots:
            known = nearest(request.slot_class, self._slots.counts)
            self._fail(client, request.id, "refused", f"no slot class {request.slot_class!r} here{known}")
        elif request.held or self._has_room(client, request):
            session = self._sessions.create(client, request.id, "", request.trajectory_id)
            self._sessions.submit(session, 0, request)

    def _release(self, client: ClientRecord, request: Release) -> None:
        session = client.sessions.get(request.lease)
        held = None if session is None else self._sessions.release(session)
        if session is None and self._sessions.is_closed(client.sid(request.lease)):
            self._answer(client.identity, Result(id=request.id))  # released before, or never granted
        elif held is None:
            if session is not None:
                self._sessions.end(session, "cancelled", "released", forget=True)
            message = f"lease {request.lease!r} holds no slot (it was released, or expired while its tool ran)"
            self._fail(client, request.id, "unknown_session", message)
        else:
            self._answer(client.identity, Result(id=request.id, slot_class=held[0], service_s=held[1]))

    def _rekey(self, client: ClientRecord, request: Rekey) -> None:
        if any(math.isnan(key) for key in request.keys.values()):
            self._fail(client, request.id, "protocol", "a key is not a number")
            return
        pending = client.pending
        self._slots.rekey((pending[name], key) for name, key in request.keys.items() if name in pending)
        self._answer(client.identity, Result(id=request.id))

    def _has_room(self, client: ClientRecord, request: Open | Act | Lease) -> bool:
        """Whether the request may be queued; answers it otherwise."""
        if math.isnan(request.key):
            self._fail(client, request.id, "protocol", "the key is not a number")
        elif request.id in client.pending:
            message = f"the id {request.id!r} is in use by another session's action"
            self._fail(client, request.id, "protocol", message)
        elif self._slots.is_full(self._config.max_queued):
            self.counters["busy"] += 1
            self._answer(client.identity, Busy(id=request.id, retry_after_s=self._config.busy_retry_s))
        else:
            return True
        return False

    # --- time -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Let time pass: deadlines, leases, silent workers, rate limits."""
        now = self._clock()
        self._sessions.tick(now)
        for client in self._client_leases.expired(now):
            if client.heard_s + client.lease_s > now:
                self._client_leases.set(client, client.heard_s + client.lease_s)
            else:
                self._expire(client)
        self._placement.tick(now)
        if not self._sessions.accepting and now >= self._started_s + self._config.settle_s:
            log.warning("not all of the %d expected workers came: going on without", self._config.expected_workers)
            self._settle()

    def _expire(self, client: ClientRecord) -> None:
        silent_s = self._clock() - client.heard_s
        count = len(client.sessions)
        ids = {"client": client.name, "job": client.job}
        log.warning("a client was silent for %.1f s: closing its %d sessions", silent_s, count, extra=ids)
        self.counters["clients_expired"] += 1
        self._event_log.emit("client_expired", "", client=client.name, sessions=count)
        self._dismiss(client, "its client's lease ended")

    def _dismiss(self, client: ClientRecord, why: str) -> None:
        """A client is gone: end its sessions and forget it."""
        self._event_log.emit("client_left", "", client=client.name)
        self._client_leases.clear(client)
        self._sessions.abandon_leases(client, why)
        for session in list(client.sessions.values()):
            self._sessions.end(session, "unknown_session", why, forget=True)
        del self._clients[client.identity]

    # --- workers --------------------------------------------------------------------------------------------

    def receive_worker(self, identity: bytes, frame: bytes) -> None:
        """Handle one frame of a worker."""
        self._placement.receive(identity, frame)

    def lose_worker(self, worker_id: str, why: str) -> None:
        """Somebody who knows (the supervisor) says that a worker is gone."""
        self._placement.lose(worker_id.encode(), why)

    def _worker_joined(self, worker: WorkerRecord, hosted: tuple[wp.HostedSession, ...]) -> None:
        """Go on with the sessions that only the worker knows; end those that were given up while it was silent."""
        for session in hosted:
            identity = session.client.encode("latin-1", errors="replace")
            client = self._clients.get(identity)
            if self._sessions.is_known(session.sid) or session.environment not in self._environments:
                self._placement.refuse(worker, session.sid)
                continue
            if client is None:
                client = self._admit(identity, session.job, self._config.adopted_lease_s)
            self._sessions.adopt(client, worker, session)
        if len(self._placement) >= self._config.expected_workers:
            self._settle()

    def _settle(self) -> None:
        """The workers have told what they host: go on with what was held back."""
        if not self._sessions.accepting:
            self._sessions.accepting = True
            held, self._held = self._held, []
            for identity, request in held:
                self._handle(identity, request)
            self._sessions.dispatch_all()

    # --- answers --------------------------------------------------------------------------------------------

    def status(self, request_id: str = "") -> StatusReply:
        """The broker's state at this moment."""
        return StatusReply(
            id=request_id,
            server_id=self.server_id,
            uptime_s=self._clock() - self._started_s,
            slots=self._slots.status(),
            clients=len(self._clients),
            sessions=self._sessions.count(),
            workers=self._placement.status(),
            counters=dict(self.counters),
        )

    def _answer(self, identity: bytes, reply: Reply) -> None:
        self._to_client(identity, encode(reply))

    def _fail(self, client: ClientRecord, request_id: str, kind: FailureKind, message: str) -> None:
        self.counters[f"refused_{kind}"] += 1
        self._answer(client.identity, Failure(id=request_id, kind=kind, message=message))

    def _reject(self, identity: bytes, reason: str, message: str, request_id: str = "") -> None:
        """A frame that cannot be understood: count it, say so once in a while, answer (its id may still be legible)."""
        self.counters[reason] += 1
        count = self.counters[reason]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            log.warning("frame from %r dropped (%s, number %d): %s", identity, reason, count, message)
            self._event_log.emit("frame_dropped", "", reason=reason, count=count, message=message)
        self._answer(identity, Failure(id=request_id, kind="protocol", message=message))
