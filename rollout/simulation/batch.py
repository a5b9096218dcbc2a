"""One simulated batch: a trace, hardware and policies in, an event log out.

Everything but the replicas and the environments' durations is what runs live: the engine, the admission, routing and
action policies, the gates. The event log is the run's only result; figures are computed from it, as they are for a
live run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from makespan.rollout.admission import OversampleCut, make_admission
from makespan.rollout.coordinator import RERANK_DISPATCHES, RERANK_INTERVAL_S, Coordinator
from makespan.rollout.engine import RolloutEngine
from makespan.rollout.errors import ConfigError
from makespan.rollout.history import History
from makespan.rollout.order import make_order, smaller_limit
from makespan.rollout.replay.agent import LengthConversation, TraceAgent
from makespan.rollout.replay.environments import START, STEP, ReplayEnvironments
from makespan.rollout.replay.plan import ENVIRONMENT, Plays, limits, plan
from makespan.rollout.replay.trace import Trace, TraceTrajectory
from makespan.rollout.replicas.simulated import ReplicaHardware, SimulatedReplica
from makespan.rollout.route import Router
from makespan.rollout.routing import STICKY, StickyLeastInflight, make_router
from makespan.rollout.scheduling import RemainingSeconds, action_policy
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.loop import run_virtual
from makespan.rollout.telemetry.events import LOG_VERSION, EventLog, LogHeader
from makespan.rollout.trajectory import Task

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
    reference: int | None = None
    """How many trajectories the memory is meant for, for `parking`."""
    routing: str = STICKY
    scheduling: str = "fifo"
    order: str = "arrival"
    """Who is admitted next."""
    history: str = "none"
    """What the forecast knows beforehand: `none`, `last-step`, or `prompts` (that, and earlier epochs)."""
    rerank_dispatches: int = RERANK_DISPATCHES
    """After how many actions a pass of the coordinator is due. At 1 passes do not wait for their interval either."""
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


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One job's batch: what it runs, by which policies, and where its event log goes."""

    trace: Trace
    policies: Policies
    seed: int = 0
    log_path: Path | None
    history: History | None = None
    """What the job knows beforehand."""
    homes: Mapping[str, str] | None = None
    """Where sticky routing places these trajectories, as it did in a run; None: as it chooses."""


def simulate(
    trace: Trace,
    hardware: Hardware,
    policies: Policies,
    *,
    seed: int,
    log_path: Path | None,
    history: History | None = None,
    homes: Mapping[str, str] | None = None,
) -> None:
    """Run the batch in virtual time and write its event log; `history` is what the job knows beforehand, `homes` where
    sticky routing places trajectories.

    Raises `ConfigError` for policies that do not exist, or do not know homes, and whatever ends the batch.
    """
    job = Job(trace=trace, policies=policies, seed=seed, log_path=log_path, history=history, homes=homes)
    simulate_jobs([job], hardware)


def simulate_jobs(jobs: Sequence[Job], hardware: Hardware) -> None:
    """Run the batches of several jobs side by side: each has replicas of its own, all share the environment slots.

    Raises as `simulate` does.
    """
    run_virtual(_side_by_side(jobs, hardware))


async def _side_by_side(jobs: Sequence[Job], hardware: Hardware) -> None:
    slots = {STEP: hardware.slots} | ({} if hardware.start_slots is None else {START: hardware.start_slots})
    first: ReplayEnvironments | None = None
    runs = []
    for number, job in enumerate(jobs):
        tasks, plays = plan(job.trace.trajectories)
        environments = ReplayEnvironments(plays, slots, job=f"job-{number}", shares_with=first)
        first = first or environments
        runs.append(_simulate(job, hardware, tasks, plays, environments))
    try:
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(run)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _simulate(
    job: Job, hardware: Hardware, tasks: list[Task], plays: Plays, environments: ReplayEnvironments
) -> None:
    loop = asyncio.get_running_loop()
    policies, cost = job.policies, hardware.replica.cost
    replicas = {f"replica-{n}": SimulatedReplica(f"replica-{n}", hardware.replica) for n in range(hardware.replicas)}
    knows = remaining(plays, cost) if "oracle" in (policies.scheduling, policies.order) else None
    coordinator = Coordinator(
        job.history,
        slots={ENVIRONMENT: hardware.slots},
        rerank_dispatches=policies.rerank_dispatches,
        rerank_interval_s=0.0 if policies.rerank_dispatches == 1 else RERANK_INTERVAL_S,
    )
    order = make_order(policies.order, coordinator, smaller_limit(policies.concurrency, policies.reference), knows)
    with EventLog(job.log_path, "engine", loop.time, header=HEADER) as events:
        engine = RolloutEngine(
            replicas=replicas,
            router=_router(job, hardware, list(replicas), plays),
            admission=make_admission(
                policies.admission,
                policies.concurrency,
                order,
                memory=hardware.replica,
                replicas=hardware.replicas,
                reference=policies.reference,
            ),
            environments=environments,
            agent=TraceAgent(plays),
            conversation=LengthConversation(hardware.max_context_tokens),
            coordinator=coordinator,
            scheduling=action_policy(policies.scheduling, coordinator, knows),
            limits=limits(job.trace.trajectories),
            events=events,
        )
        events.emit("environment_server", slots=environments.slots)
        for replica_id in replicas:
            events.emit("replica", replica=replica_id, **msgspec.to_builtins(hardware.replica))
        cut = None if policies.needed is None else OversampleCut(policies.needed, engine.stop)
        await engine.run(tasks, on_end=cut)


def _router(job: Job, hardware: Hardware, replica_ids: list[str], plays: Plays) -> Router:
    policy, rng = job.policies.routing, random.Random(job.seed)
    if job.homes is None:
        return make_router(policy, replica_ids, rng, memory=hardware.replica, cost=hardware.replica.cost)
    if policy != STICKY:
        raise ConfigError(f"routing {policy!r} moves trajectories: only {STICKY!r} can be told their homes")
    if strangers := sorted(job.homes.keys() - plays.keys()) or sorted(set(job.homes.values()) - set(replica_ids)):
        raise ConfigError(f"homes: the batch has no {', '.join(strangers)}")
    return StickyLeastInflight(replica_ids, rng=rng, homes=job.homes)
