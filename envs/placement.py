"""Workers as the broker sees them: who hosts which session, who gets the next one, who is lost.

A reset goes to the worker that hosts the environment and has the fewest sessions; from then on the session stays there.
A worker that was silent for the stated time, or that its supervisor saw die, is lost with all its sessions. Should it
speak again, it is asked who it is, and whatever the broker has given up by then is stopped there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from makespan.envs import worker_protocol as wp
from makespan.envs.protocol import WorkerStatus, encode
from makespan.envs.records import ActionRecord, SessionRecord, WorkerRecord
from makespan.envs.slots import start_class
from makespan.rollout.errors import FormatError

if TYPE_CHECKING:
    from makespan.envs.sessions import Sessions

log = logging.getLogger(__name__)


SUSPECT_S = 2.5
"""A worker that was silent for so many of its beats (one each 0.5 s) and speaks again may have missed something."""

RESEND_S = 10.0
"""An action whose outcome is awaited for so long is sent again: the worker knows whether it has it already."""


class Placement:
    """The broker's workers.

    Args:
        send: called with a worker's routing id and a frame.
        server_id: the broker's.
        timeout_s: a worker that was silent for so long is lost.
        on_join: called when a worker has introduced itself, with the sessions that it hosts.
        counters: the broker's.
    """

    sessions: Sessions
    """Set by the `Sessions` that this placement serves."""

    def __init__(
        self,
        send: Callable[[bytes, bytes], object],
        *,
        server_id: str,
        clock: Callable[[], float],
        timeout_s: float,
        on_join: Callable[[WorkerRecord, tuple[wp.HostedSession, ...]], None],
        counters: Counter[str],
    ) -> None:
        self._on_join = on_join
        self._counters = counters
        self._server_id = server_id
        self._send = send
        self._clock = clock
        self._timeout_s = timeout_s
        self._workers: dict[bytes, WorkerRecord] = {}
        self._hosts: dict[str, list[WorkerRecord]] = {}  # by the start class that the worker can serve

    # --- what workers say -----------------------------------------------------------------------------------

    def receive(self, identity: bytes, frame: bytes) -> None:
        """Handle one frame of a worker."""
        try:
            message = wp.decode_from_worker(frame)
        except FormatError as error:
            self._counters["worker_frames_malformed"] += 1
            log.warning("frame from worker %r dropped: %s", identity, error)
            return
        worker = self._workers.get(identity)
        if isinstance(message, wp.Introduce):
            self._introduce(identity, message)
        elif worker is None:
            self._send(identity, encode(wp.WhoAreYou(server_id=self._server_id)))
        else:
            silent_s, worker.heard_s = self._clock() - worker.heard_s, self._clock()
            if silent_s > SUSPECT_S:
                self._resend(worker, 0.0)
            match message:
                case wp.Outcome():
                    self._outcome(worker, message)
                case wp.Stopped():
                    session = worker.sessions.get(message.sid)
                    if session is not None:
                        self.sessions.stopped(session)
                case wp.Beat():
                    worker.running, worker.abandoned = message.running, message.abandoned
                    worker.draining = message.draining
                    self._send(identity, encode(wp.BeatReply(server_id=self._server_id)))

    def _introduce(self, identity: bytes, message: wp.Introduce) -> None:
        if identity in self._workers:
            return
        environments, now = frozenset(message.environments), self._clock()
        worker = WorkerRecord(identity, message.worker_id, message.pid, environments, now, now)
        self._workers[identity] = worker
        for environment in environments:
            self._hosts.setdefault(start_class(environment), []).append(worker)
        ids = {"worker": message.worker_id}
        log.info("a worker joined with pid %d and %s", message.pid, sorted(environments), extra=ids)
        self._send(identity, encode(wp.BeatReply(server_id=self._server_id)))
        self._on_join(worker, message.sessions)
        for environment in environments:
            self.sessions.dispatch(start_class(environment))

    def _outcome(self, worker: WorkerRecord, outcome: wp.Outcome) -> None:
        session = worker.sessions.get(outcome.sid)
        if session is None:
            self._counters["late_outcomes"] += 1
            self._send(worker.identity, encode(wp.Stop(sid=outcome.sid)))
        elif session.action is None or session.action.seq != outcome.seq or not session.action.sent:
            self._counters["late_outcomes"] += 1
        else:
            self.sessions.finish(session.action, outcome)

    # --- what the broker asks -------------------------------------------------------------------------------

    def can_dispatch(self, slot_class: str) -> bool:
        """Whether actions of a class can be sent: a reset needs a worker that hosts its environment."""
        if slot_class.endswith(".start"):
            return any(not worker.draining for worker in self._hosts.get(slot_class, ()))
        return True

    def start(self, action: ActionRecord) -> None:
        """Send a granted action to its session's worker, which a reset chooses."""
        session = action.session
        if session.worker is None:
            candidates = [worker for worker in self._hosts[action.slot_class] if not worker.draining]
            session.worker = min(candidates, key=lambda candidate: len(candidate.sessions))
            session.worker.sessions[session.sid] = session
        self._send_action(session.worker, action)

    def _send_action(self, worker: WorkerRecord, action: ActionRecord) -> None:
        """Send an action, for the first time or again: the worker runs it once."""
        session = action.session
        message: wp.ToWorker
        if action.payload is None:
            message = wp.Recall(sid=session.sid, seq=action.seq)
        elif action.seq > 0:
            message = wp.Step(sid=session.sid, seq=action.seq, action=action.payload)
        else:
            message = wp.Start(
                sid=session.sid,
                client=session.client.name,
                session=session.id,
                environment=session.environment,
                trajectory_id=session.trajectory_id,
                job=session.client.job,
                task=action.payload,
            )
        self._send(worker.identity, encode(message))

    def _resend(self, worker: WorkerRecord, older_than_s: float) -> None:
        """Send again what a worker was told and has not confirmed: it, or its answer, may have been lost."""
        now = self._clock()
        worker.resent_s = now
        for session in worker.sessions.values():
            action = session.action
            if session.stopping:
                self.refuse(worker, session.sid)
            elif action is not None and action.sent and now - (action.granted_s or 0.0) >= older_than_s:
                self._counters["actions_resent"] += 1
                self._send_action(worker, action)

    def recall(self, session: SessionRecord) -> None:
        """Ask for the outcome of a session's last action once more."""
        assert session.worker is not None, "only a session that a worker hosts is recalled"
        self._send(session.worker.identity, encode(wp.Recall(sid=session.sid, seq=session.seq)))

    def stop(self, session: SessionRecord) -> None:
        """Tell a session's worker to stop it."""
        assert session.worker is not None, "only a session that a worker hosts is stopped"
        self.refuse(session.worker, session.sid)

    def refuse(self, worker: WorkerRecord, sid: str) -> None:
        """Tell a worker to stop a session that is not (or no more) known here."""
        self._send(worker.identity, encode(wp.Stop(sid=sid)))

    def __len__(self) -> int:
        return len(self._workers)

    def lose(self, identity: bytes, why: str) -> None:
        """Forget a worker and all that it hosted."""
        worker = self._workers.pop(identity, None)
        if worker is None:
            return
        for environment in worker.environments:
            self._hosts[start_class(environment)].remove(worker)
        self._counters["workers_lost"] += 1
        ids = {"worker": worker.worker_id}
        log.warning("a worker was lost with %d sessions: %s", len(worker.sessions), why, extra=ids)
        self.sessions.lose(worker.sessions.values(), f"worker {worker.worker_id} was lost ({why})")

    def tick(self, now: float) -> None:
        """Lose the workers that were silent for too long."""
        for worker in list(self._workers.values()):
            if worker.heard_s + self._timeout_s <= now:
                self.lose(worker.identity, f"silent for {now - worker.heard_s:.1f} s")
            elif worker.resent_s + RESEND_S <= now:
                self._resend(worker, RESEND_S)

    def status(self) -> tuple[WorkerStatus, ...]:
        now = self._clock()
        return tuple(
            WorkerStatus(
                worker_id=worker.worker_id,
                pid=worker.pid,
                environments=tuple(sorted(worker.environments)),
                sessions=len(worker.sessions),
                running=worker.running,
                abandoned=worker.abandoned,
                draining=worker.draining,
                silent_s=now - worker.heard_s,
            )
            for worker in self._workers.values()
        )
