"""The broker's figures for Prometheus: what its status says, as metric families (`makespan_env_…`)."""

from __future__ import annotations

from makespan.envs.protocol import StatusReply
from makespan.rollout.telemetry.exposition import Family


def families(report: StatusReply) -> list[Family]:
    """The metrics of a status."""
    classes = [({"slot_class": name}, slot) for name, slot in sorted(report.slots.items())]
    workers = [({"worker": worker.worker_id}, worker) for worker in report.workers]
    return [
        Family("makespan_env_slots", "gauge", "Slots of a class.", [(at, slot.slots) for at, slot in classes]),
        Family(
            "makespan_env_slots_running",
            "gauge",
            "Actions that hold a slot.",
            [(at, slot.running) for at, slot in classes],
        ),
        Family(
            "makespan_env_slots_waiting",
            "gauge",
            "Actions that wait for a slot.",
            [(at, slot.waiting) for at, slot in classes],
        ),
        Family(
            "makespan_env_oldest_wait_seconds",
            "gauge",
            "How long the oldest waiting action has waited; 0 when none waits.",
            [(at, slot.oldest_wait_s or 0.0) for at, slot in classes],
        ),
        Family("makespan_env_grants_total", "counter", "Slots granted.", [(at, slot.granted) for at, slot in classes]),
        Family(
            "makespan_env_withdrawn_total",
            "counter",
            "Actions that never ran.",
            [(at, slot.cancelled) for at, slot in classes],
        ),
        Family("makespan_env_sessions", "gauge", "Open sessions.", [({}, report.sessions)]),
        Family("makespan_env_clients", "gauge", "Clients with a lease.", [({}, report.clients)]),
        Family("makespan_env_workers", "gauge", "Workers that are alive.", [({}, len(report.workers))]),
        Family(
            "makespan_env_worker_sessions",
            "gauge",
            "Sessions of a worker.",
            [(at, worker.sessions) for at, worker in workers],
        ),
        Family(
            "makespan_env_worker_abandoned_calls",
            "gauge",
            "Calls of environments that were given up and still hold a thread.",
            [(at, worker.abandoned) for at, worker in workers],
        ),
        Family("makespan_env_uptime_seconds", "gauge", "Since this broker process started.", [({}, report.uptime_s)]),
        Family(
            "makespan_env_events_total",
            "counter",
            "What happened, by kind, since this broker process started.",
            [({"event": name}, count) for name, count in sorted(report.counters.items())],
        ),
    ]
