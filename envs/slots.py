"""The slot classes of a server: one `ActionGate` each, and the record of every wait and every hold.

Environment `swe` has the classes `swe.start` (resets) and `swe.step` (actions). The broker's event log gets one
`action` event when an action leaves its gate, with the three times that everything else is computed from:
`submitted_s`, `granted_s` (null when it never ran) and `released_s`, all on the broker's clock; and with the key that
it was granted by, or that it was granted by its age.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from makespan.envs.protocol import SlotStatus
from makespan.envs.records import ActionRecord
from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.gate import ActionGate, Grant, RateLimit
from makespan.rollout.telemetry.events import EventLog

MANY = 16
"""From one in so many waiting actions on, rebuilding the queue is cheaper than moving each one."""


def start_class(environment: str) -> str:
    return f"{environment}.start"


def step_class(environment: str) -> str:
    return f"{environment}.step"


class SlotClasses:
    """The gates by class name, and what the event log learns of them.

    Args:
        slots: class name to slot count, at least 1 each.
        rates: optional rate limits by class name.
        clock: seconds on the broker's clock.
    """

    def __init__(
        self,
        slots: Mapping[str, int],
        *,
        rates: Mapping[str, RateLimit] | None = None,
        clock: Callable[[], float],
        event_log: EventLog,
    ) -> None:
        for name, count in slots.items():
            if count < 1:
                raise ConfigError(f"slot class {name!r} has {count} slots; it needs at least 1")
        for name in rates or {}:
            if name not in slots:
                raise ConfigError(f"a rate limit for the unknown slot class {name!r}{nearest(name, slots)}")
        self._gates: dict[str, ActionGate[ActionRecord]] = {
            name: ActionGate(count, rate=(rates or {}).get(name)) for name, count in slots.items()
        }
        self.rate_limited = bool(rates)
        self._clock = clock
        self._event_log = event_log
        self._waiting = 0

    @property
    def counts(self) -> dict[str, int]:
        return {name: gate.slots for name, gate in self._gates.items()}

    def __contains__(self, slot_class: str) -> bool:
        return slot_class in self._gates

    def submit(self, action: ActionRecord, key: float) -> None:
        """Queue an action in its class."""
        action.submitted_s = self._clock()
        self._gates[action.slot_class].submit(action, key, job=action.client.job)
        self._waiting += 1

    def adopt(self, action: ActionRecord) -> None:
        """Count an action that runs already."""
        action.submitted_s = action.granted_s = self._clock()
        self._gates[action.slot_class].adopt(action, job=action.client.job)

    def rekey(self, keys: Iterable[tuple[ActionRecord, float]]) -> int:
        """Give waiting actions new keys; gives how many of them waited."""
        by_class: dict[str, list[tuple[ActionRecord, float]]] = {}
        for action, key in keys:
            by_class.setdefault(action.slot_class, []).append((action, key))
        changed = 0
        for slot_class, entries in by_class.items():
            gate = self._gates[slot_class]
            if len(entries) * MANY < gate.statistics().waiting:
                changed += sum(gate.rekey(action, key) for action, key in entries)
            else:
                changed += gate.rekey_all(entries)
        return changed

    def withdraw(self, action: ActionRecord, outcome: str) -> bool:
        """Take a waiting action out of its queue; False when it does not wait."""
        if not self._gates[action.slot_class].cancel(action):
            return False
        self._waiting -= 1
        action.outcome = outcome
        self._log(action)
        return True

    def grant(self, slot_class: str) -> list[ActionRecord]:
        """The actions of a class that start now."""
        now = self._clock()
        granted = self._gates[slot_class].grant(now)
        for action in granted:
            action.granted_s = now
        self._waiting -= len(granted)
        return granted

    def release(self, action: ActionRecord) -> None:
        """The action is over: free its slot."""
        grant = self._gates[action.slot_class].granted_as(action)
        self._gates[action.slot_class].release(action)
        self._log(action, grant)

    def is_full(self, bound: int) -> bool:
        """Whether `bound` actions wait over all classes."""
        return self._waiting >= bound

    def holds_slot(self, action: ActionRecord) -> bool:
        return self._gates[action.slot_class].is_running(action)

    def times(self, action: ActionRecord) -> tuple[float, float]:
        """Seconds that the action has waited for its slot and has held it so far."""
        if action.recalled:
            return 0.0, 0.0
        now = self._clock()
        if action.granted_s is None:
            return now - action.submitted_s, 0.0
        return action.granted_s - action.submitted_s, now - action.granted_s

    def status(self) -> dict[str, SlotStatus]:
        now = self._clock()
        report: dict[str, SlotStatus] = {}
        for name, gate in self._gates.items():
            figures = gate.statistics()
            oldest = gate.oldest_waiting()
            report[name] = SlotStatus(
                slots=figures.slots,
                running=figures.running,
                waiting=figures.waiting,
                granted=figures.granted,
                cancelled=figures.cancelled,
                oldest_wait_s=None if oldest is None else now - oldest.submitted_s,
            )
        return report

    def _log(self, action: ActionRecord, grant: Grant | None = None) -> None:
        session = action.session
        self._event_log.emit(
            "action",
            session.trajectory_id,
            request=action.id,
            session=session.id,
            job=action.client.job,
            slot_class=action.slot_class,
            seq=action.seq,
            outcome=action.outcome,
            submitted_s=action.submitted_s,
            granted_s=action.granted_s,
            released_s=self._clock(),
            **({} if grant is None else {"key": grant.key, "by_age": grant.by_age}),
        )
