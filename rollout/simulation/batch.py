"""One simulated batch: a trace, hardware and policies in, an event log out.

Everything but the replicas and the environments' durations is what runs live: the engine, the admission, routing and
action policies, the gates. The event log is the run's only result; figures are computed from it, as they are for a
live run.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec

from makespan.rollout.admission import OversampleCut, make_admission
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.engine import RolloutEngine
from makespan.rollout.history import History
from makespan.rollout.order import make_order
from makespan.rollout.replay.agent import LengthConversation, TraceAgent
from makespan.rollout.replay.environments import START, STEP, ReplayEnvironments
from makespan.rollout.replay.plan import ENVIRONMENT, Plays, limits, plan
from makespan.rollout.replay.trace import Trace, TraceTrajectory
from makespan.rollout.replicas.simulated import ReplicaHardware, SimulatedReplica
from makespan.rollout.routing import make_router
from makespan.rollout.scheduling import RemainingSeconds, action_policy
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.loop import run_virtual
from makespan.rollout.telemetry.events import LOG_VERSION, EventLog, LogHeader

HEADER = LogHeader(
    version=LOG_VERSION,
    writer="engine@simulation",
    role="engine",
    host="simulation",
    host_boot_id="simulation",
    pid=0,
    wall_s=0.0,
    monotonic_s=0.0,
)
"""The header of every simulated log: the same work gives the same bytes on every machine."""


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What the batch runs on."""

    replicas: int = 4
    replica: ReplicaHardware = ReplicaHardware()
    slots: int
    """Environment actions that run at once."""
    start_slots: int | None = None
    """Environments that start at once; None: no bound."""
    max_context_tokens: int | None = None
    """Contexts are cut to so many of their last tokens."""


class Policies(msgspec.Struct, frozen=True, kw_only=True):
    """Who decides, by the names that a run's configuration uses."""

    admission: str = "everything"
    concurrency: int | None = None
    routing: str = "sticky-least-inflight"
    scheduling: str = "fifo"
    order: str = "arrival"
    """Who is admitted next."""
    history: str = "none"
    """What the forecast knows beforehand: `none`, `last-step`, or `prompts` (that, and earlier epochs)."""
    needed: int | None = None
    """Stop the batch when so many trajectories have finished (oversampling)."""


def alone_s(recorded: TraceTrajectory, cost: InferenceCost) -> list[float]:
    """Seconds that a trajectory takes alone, without any waiting, from the action of each turn on; the last entry is
    its whole time, reset included."""
    seconds: list[float] = []
    later_s = 0.0
    computed = [0, *(turn.prompt_tokens + turn.generated_tokens - 1 for turn in recorded.turns[:-1])]
    for turn, cached in zip(reversed(recorded.turns), reversed(computed), strict=True):
        later_s += turn.environment_s or 0.0
        seconds.append(later_s)
        later_s += cost.alone_s(turn.prompt_tokens - cached, turn.prompt_tokens, turn.generated_tokens)
    seconds.reverse()
    seconds.append(later_s + recorded.reset_s)
    return seconds


def remaining(plays: Plays, cost: InferenceCost) -> RemainingSeconds:
    """What the oracle knows."""
    seconds = {trajectory_id: alone_s(recorded, cost) for trajectory_id, recorded in plays.items()}
    return lambda trajectory_id, turn: seconds[trajectory_id][turn]


def simulate(
    trace: Trace,
    hardware: Hardware,
    policies: Policies,
    *,
    seed: int,
    log_path: Path | None,
    history: History | None = None,
) -> None:
    """Run the batch in virtual time and write its event log; `history` is what the job knows beforehand.

    Raises `ConfigError` for policies that do not exist, and whatever ends the batch.
    """
    run_virtual(_simulate(trace, hardware, policies, seed, log_path, history))


async def _simulate(
    trace: Trace, hardware: Hardware, policies: Policies, seed: int, log_path: Path | None, history: History | None
) -> None:
    loop = asyncio.get_running_loop()
    tasks, plays = plan(trace.trajectories)
    cost = hardware.replica.cost
    replicas = {f"replica-{n}": SimulatedReplica(f"replica-{n}", hardware.replica) for n in range(hardware.replicas)}
    slots = {STEP: hardware.slots} | ({} if hardware.start_slots is None else {START: hardware.start_slots})
    environments = ReplayEnvironments(plays, slots)
    knows = remaining(plays, cost) if policies.scheduling == "oracle" else None
    coordinator = Coordinator(history, slots={ENVIRONMENT: hardware.slots})
    order = make_order(policies.order, coordinator, policies.concurrency)
    with EventLog(log_path, "engine", loop.time, header=HEADER) as events:
        engine = RolloutEngine(
            replicas=replicas,
            router=make_router(policies.routing, list(replicas), random.Random(seed)),
            admission=make_admission(policies.admission, policies.concurrency, order),
            environments=environments,
            agent=TraceAgent(plays),
            conversation=LengthConversation(hardware.max_context_tokens),
            coordinator=coordinator,
            scheduling=action_policy(policies.scheduling, coordinator, knows),
            limits=limits(trace.trajectories),
            events=events,
        )
        events.emit("environment_server", slots=environments.slots)
        for replica_id in replicas:
            events.emit("replica", replica=replica_id, **msgspec.to_builtins(hardware.replica))
        cut = None if policies.needed is None else OversampleCut(policies.needed, engine.stop)
        await engine.run(tasks, on_end=cut)
