"""The broker's sessions and the one action that each of them may have pending.

The life of an action: *submitted* (it waits in the gate of its slot class) -> *granted* (its frame goes to the
session's worker; a reset picks the least loaded worker first) -> *over* (the worker's outcome has arrived, the slot is
free, the client has its answer). A *lease* is an action that runs in the client: it is answered when it is granted, and
over when the client releases it.

Invariants, kept here
    - An action is granted at most once, and sent to a worker at most once.
    - An action is answered exactly once; the last answer of a session is kept, to repeat it.
    - Whatever ends a running action early (cancel, deadline, the end of its client) answers it at once, but its slot
      stays taken until the worker confirms that it stopped, or `stop_grace_s` later.
    - After every event that frees a slot or adds an action, whoever may start is started (work conservation).
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from makespan.envs import worker_protocol as wp
from makespan.envs.deadlines import Deadlines
from makespan.envs.placement import Placement
from makespan.envs.protocol import Act, Failure, Lease, Open, Result, encode
from makespan.envs.records import ActionRecord, ClientRecord, SessionRecord, WorkerRecord
from makespan.envs.slots import SlotClasses, start_class, step_class
from makespan.rollout.environment import FailureKind

log = logging.getLogger(__name__)

CLOSED_REMEMBERED = 65_536
"""Ids of closed sessions that are kept, to recognise a late copy of their requests."""


class Sessions:
    """All sessions of a broker, by `sid`.

    Args:
        placement: the workers; it is given this object to report to.
        to_client: called with a client's routing id and a frame.
        stop_grace_s: how long a stopped action may keep its slot without the worker's word.
        counters: the broker's counters.
    """

    def __init__(
        self,
        slots: SlotClasses,
        placement: Placement,
        *,
        clock: Callable[[], float],
        to_client: Callable[[bytes, bytes], object],
        stop_grace_s: float,
        counters: Counter[str],
    ) -> None:
        self.accepting = True
        """False while a new broker waits to hear what its workers host: nothing is granted then."""
        self._slots = slots
        self._placement = placement
        self._clock = clock
        self._to_client = to_client
        self._stop_grace_s = stop_grace_s
        self._counters = counters
        self._sessions: dict[str, SessionRecord] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._deadlines: Deadlines[ActionRecord] = Deadlines()
        self._stops: Deadlines[SessionRecord] = Deadlines()
        self._lease_ends: Deadlines[ActionRecord] = Deadlines()
        placement.sessions = self

    # --- sessions -------------------------------------------------------------------------------------------

    def create(self, client: ClientRecord, session_id: str, environment: str, trajectory_id: str) -> SessionRecord:
        session = SessionRecord(client.sid(session_id), session_id, client, environment, trajectory_id)
        self._sessions[session.sid] = client.sessions[session_id] = session
        return session

    def is_closed(self, sid: str) -> bool:
        """Whether a session of this name was here and its client has closed it."""
        return sid in self._closed

    def is_known(self, sid: str) -> bool:
        return sid in self._sessions or sid in self._closed

    def count(self) -> int:
        """Sessions of environments that accept actions or are being opened (leases are none)."""
        return sum(1 for session in self._sessions.values() if session.environment and not session.ended)

    def adopt(self, client: ClientRecord, worker: WorkerRecord, hosted: wp.HostedSession) -> None:
        """Go on with a session that only its worker knew: this broker is new."""
        session = self.create(client, hosted.session, hosted.environment, hosted.trajectory_id)
        session.worker, session.seq, session.ended = worker, hosted.seq, hosted.closed
        worker.sessions[session.sid] = session
        if hosted.running:
            session.action = ActionRecord(client, "", session, hosted.seq, self._class_of(session, hosted.seq))
            self._slots.adopt(session.action)
        self._counters["sessions_adopted"] += 1

    def recall(self, session: SessionRecord, request_id: str, deadline_s: float) -> None:
        """A client asks again for an action that ran, or runs, at the worker of an adopted session."""
        action = session.action
        if action is None:
            slot_class = self._class_of(session, session.seq)
            action = ActionRecord(session.client, request_id, session, session.seq, slot_class, recalled=True)
            action.submitted_s = self._clock()
            session.action = action
            self._placement.recall(session)
        session.request_id = action.id = request_id
        session.client.pending[request_id] = action
        self._deadlines.set(action, self._clock() + deadline_s)

    def repeat(self, session: SessionRecord, seq: int) -> None:
        """A request that was seen before: repeat the answer if it is the session's last one, else do nothing."""
        self._counters["repeated_requests"] += 1
        if seq == session.seq and session.reply is not None:
            self._to_client(session.client.identity, session.reply)

    def end(self, session: SessionRecord, kind: FailureKind, message: str, *, forget: bool = False) -> None:
        """End a session: answer what is pending, tell its worker to stop, free everything when that is confirmed.

        `forget`: its client wants nothing of it any more, so drop the record then too.
        """
        action = session.action
        if action is not None and not self._withdraw(action, kind, message):
            self._fail(action, kind, message)
            if action.lease:
                self._over(action)
        session.ended = True
        session.forget = session.forget or forget
        if session.worker is not None:
            if not session.stopping:
                session.stopping = True
                self._placement.stop(session)
                self._stops.set(session, self._clock() + self._stop_grace_s)
        elif session.forget:
            self._drop(session)

    def stopped(self, session: SessionRecord) -> None:
        """The worker confirmed that the session is gone (or is past confirming)."""
        session.ended = True
        session.stopping = False
        self._stops.clear(session)
        if session.worker is not None:
            session.worker.sessions.pop(session.sid, None)
            session.worker = None
        action = session.action
        if action is not None and not self._withdraw(action, "unknown_session", "the worker closed the session"):
            self._fail(action, "unknown_outcome", "the worker closed the session")
            self._over(action)
        if session.forget:
            self._drop(session)

    def lose(self, sessions: Iterable[SessionRecord], why: str) -> None:
        """Their worker is gone, and the sessions' state with it."""
        lost = list(sessions)
        for session in lost:  # first, so that a slot freed below is not given to an action that cannot run
            session.ended = True
            if session.action is not None:
                self._withdraw(session.action, "unknown_session", f"{why}; the session's state is lost")
        for session in lost:
            if session.action is not None:
                text = f"{why} while it ran this action, which may or may not have happened"
                self._fail(session.action, "unknown_outcome", text)
            self.stopped(session)

    def remember_closed(self, sid: str) -> None:
        """Recognise requests of this session from now on as late."""
        self._closed[sid] = None
        if len(self._closed) > CLOSED_REMEMBERED:
            self._closed.popitem(last=False)

    def _drop(self, session: SessionRecord) -> None:
        self._sessions.pop(session.sid, None)
        session.client.sessions.pop(session.id, None)
        self.remember_closed(session.sid)

    # --- actions --------------------------------------------------------------------------------------------

    def submit(self, session: SessionRecord, seq: int, request: Open | Act | Lease) -> None:
        """Accept an action: it waits in its gate, or starts at once."""
        payload: msgspec.Raw | None
        match request:
            case Open():
                payload, slot_class = request.task, start_class(session.environment)
            case Act():
                payload, slot_class = request.action, step_class(session.environment)
            case Lease():
                payload, slot_class = None, request.slot_class
        action = ActionRecord(session.client, request.id, session, seq, slot_class, payload)
        if isinstance(request, Lease):
            action.lease, action.hold_s = True, request.hold_s
        session.seq, session.request_id, session.action, session.reply = seq, request.id, action, None
        session.client.pending[request.id] = action
        if isinstance(request, Lease) and request.held:
            self._slots.adopt(action)
            self._begin_lease(action)
            return
        self._slots.submit(action, request.key)
        self._deadlines.set(action, action.submitted_s + request.deadline_s)
        self.dispatch(slot_class)

    def dispatch(self, slot_class: str) -> None:
        """Start every action of a class that may start now."""
        if not self.accepting or slot_class not in self._slots or not self._placement.can_dispatch(slot_class):
            return
        for action in self._slots.grant(slot_class):
            if action.lease:
                self._begin_lease(action)
            else:
                self._placement.start(action)

    def dispatch_all(self) -> None:
        for slot_class in self._slots.counts:
            self.dispatch(slot_class)

    def cancel(self, action: ActionRecord) -> None:
        """The client withdraws an action: a waiting one never runs, a running one ends with its session."""
        if not action.answered and not self._withdraw(action, "cancelled", "withdrawn by the client"):
            self.end(action.session, "cancelled", "withdrawn by the client")

    def finish(self, action: ActionRecord, outcome: wp.Outcome) -> None:
        """The worker's outcome of an action that runs (or was recalled)."""
        if outcome.closed:
            action.session.ended = True
        if action.answered:
            self._counters["late_outcomes"] += 1
        elif outcome.kind is None:
            queue_s, service_s = self._slots.times(action)
            result = Result(
                id=action.id,
                value=outcome.value,
                slot_class=action.slot_class,
                queue_s=queue_s,
                service_s=service_s,
                execution_s=outcome.execution_s,
            )
            self._answer(action, result)
        else:
            self._fail(action, outcome.kind, outcome.message)
        self._over(action)

    def tick(self, now: float) -> None:
        """Let time pass: deadlines, leases held too long, stops that nobody confirms, rate limits."""
        for action in self._deadlines.expired(now):
            self._expire(action)
        for action in self._lease_ends.expired(now):
            self._expire_lease(action, f"held for {now - (action.granted_s or now):.1f} s")
        for session in self._stops.expired(now):
            self._counters["stops_unconfirmed"] += 1
            log.warning("a session's worker did not confirm that it stopped", extra=_ids(session))
            self.stopped(session)
        if self._slots.rate_limited:
            self.dispatch_all()

    def _expire(self, action: ActionRecord) -> None:
        queue_s, service_s = self._slots.times(action)
        self._counters["deadlines_passed"] += 1
        message = f"no slot of {action.slot_class!r} became free within {queue_s:.1f} s"
        if not self._withdraw(action, "timeout", message, retryable=True):
            message = f"no answer within its deadline ({queue_s:.1f} s waiting, {service_s:.1f} s running)"
            self.end(action.session, "timeout", message)

    def _withdraw(self, action: ActionRecord, kind: FailureKind, message: str, *, retryable: bool = False) -> bool:
        """Answer a waiting action with a failure; False when it does not wait."""
        if action.sent or not self._slots.withdraw(action, kind):
            return False
        self._fail(action, kind, message, retryable=retryable)
        self._detach(action)
        if action.seq == 0:  # it was never reset: there is no session
            action.session.ended = True
        return True

    def _fail(self, action: ActionRecord, kind: FailureKind, message: str, *, retryable: bool = False) -> None:
        """Answer an action with a failure, unless it is answered; a slot that it holds stays taken."""
        if action.answered:
            return
        action.outcome = kind
        queue_s, service_s = self._slots.times(action)
        failure = Failure(
            id=action.id,
            kind=kind,
            message=message,
            retryable=retryable,
            slot_class=action.slot_class,
            queue_s=queue_s,
            service_s=service_s,
        )
        self._answer(action, failure)

    def _answer(self, action: ActionRecord, reply: Result | Failure) -> None:
        """Give the client its answer, once, and keep it for repeated requests."""
        action.answered = True
        self._deadlines.clear(action)
        if action.id:  # empty: running before this broker started, and its client has not asked again yet
            action.session.reply = encode(reply)
            self._counters["answers"] += 1
            self._to_client(action.client.identity, action.session.reply)

    def _over(self, action: ActionRecord) -> None:
        """The action runs no longer: free its slot and let the next one in."""
        self._detach(action)
        if self._slots.holds_slot(action):
            self._slots.release(action)
            self.dispatch(action.slot_class)

    def _detach(self, action: ActionRecord) -> None:
        self._deadlines.clear(action)
        action.session.action = None
        if action.client.pending.get(action.id) is action:
            del action.client.pending[action.id]

    def _class_of(self, session: SessionRecord, seq: int) -> str:
        return step_class(session.environment) if seq else start_class(session.environment)

    # --- leases ---------------------------------------------------------------------------------------------

    def _begin_lease(self, action: ActionRecord) -> None:
        queue_s, _ = self._slots.times(action)
        self._answer(action, Result(id=action.id, slot_class=action.slot_class, queue_s=queue_s))
        self._lease_ends.set(action, self._clock() + action.hold_s)

    def release(self, session: SessionRecord) -> tuple[str, float] | None:
        """The client's tool is done: free the slot. Gives class and seconds held; None when the lease was over."""
        action = session.action
        if action is None or not action.lease or action.granted_s is None:
            return None
        _, service_s = self._slots.times(action)
        self._lease_ends.clear(action)
        self._over(action)
        session.ended = True
        self._drop(session)
        return action.slot_class, service_s

    def _expire_lease(self, action: ActionRecord, why: str) -> None:
        """The slot goes to the next one although the client's tool may still run: say so and count it."""
        self._counters["leases_expired"] += 1
        text = "a lease has expired (%s): its slot is free again, its tool may still run"
        log.warning(text, why, extra={**_ids(action.session), "slot_class": action.slot_class})
        action.outcome = "lease_expired"
        self._lease_ends.clear(action)
        self._over(action)
        action.session.ended = True

    def abandon_leases(self, client: ClientRecord, why: str) -> None:
        """The client of these leases is gone."""
        for session in list(client.sessions.values()):
            action = session.action
            if action is not None and action.lease and action.granted_s is not None:
                self._expire_lease(action, why)


def _ids(session: SessionRecord) -> dict[str, str]:
    """What the log says a record is about."""
    client = session.client
    return {
        "session": session.id,
        "trajectory": session.trajectory_id,
        "job": client.job,
        "client": client.name,
    }
