"""A workload by its name: a regime, or a trace file in any format that can be read.

A regime gives another batch for every seed. A trace is one batch; a seed then only shuffles the order in which its
groups arrive, since that is what differs between two runs of the same work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from makespan.rollout.errors import ConfigError, nearest
from makespan.rollout.history import History
from makespan.rollout.replay.importers import load
from makespan.rollout.replay.scaling import check_scales, scaled_times, scaled_tokens
from makespan.rollout.replay.trace import Trace, TraceTrajectory
from makespan.rollout.simulation.batch import Hardware, Policies, alone_s
from makespan.rollout.simulation.coding import CODING, coding_chains, generate_coding
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.past import history
from makespan.rollout.simulation.regimes import CHAINS, GROUP_SIZE, MAX_CONTEXT_TOKENS, SYNTHETIC, generate

KNEE_SEEDS = range(10)
"""Batches over which a regime's knee is averaged; studies measure on other seeds."""


class Workload(msgspec.Struct, frozen=True):
    """Something to simulate."""

    name: str
    batch: Callable[[int], Trace]
    """The batch of a seed."""
    again: Callable[[int, int], Trace] | None
    """The same prompts as the batch of a seed in another epoch; None where a trace is all there is."""
    is_regime: bool
    max_context_tokens: int | None
    """Contexts are cut to so many of their last tokens."""


def workload(
    name: str,
    *,
    sessions: Path | None = None,
    format_: str | None = None,
    skip_bad: bool = False,
    chains: int = CHAINS,
    group_size: int = GROUP_SIZE,
) -> Workload:
    """The regime of this name, or the trace in this file.

    Args:
        name: a regime's name or a path.
        sessions: the recorded sessions that coding regimes draw from.
        format_, skip_bad: how a trace file is read.
        chains, group_size: the size of a regime's batch.

    Raises `ConfigError` for what is neither, and for a coding regime without sessions; `FormatError` for a bad file.
    """
    if chains < 1 or group_size < 1:
        raise ConfigError(f"a batch needs at least 1 chain in groups of at least 1, not {chains} and {group_size}")
    if name in SYNTHETIC:
        regime = SYNTHETIC[name]

        def synthetic(seed: int, epoch: int) -> Trace:
            return generate(regime, seed, chains=chains, group_size=group_size, epoch=epoch)

        return Workload(name, lambda seed: synthetic(seed, 0), synthetic, True, MAX_CONTEXT_TOKENS)
    if name in CODING:
        coding = CODING[name]
        if sessions is None:
            raise ConfigError(
                f"regime {name!r} draws from recorded coding sessions, which are not shipped: name the file with "
                "--sessions PATH (its shape is in docs/traces.md)"
            )
        source = coding_chains(coding, sessions)

        def recorded(seed: int, epoch: int) -> Trace:
            return generate_coding(coding, source, seed, chains=chains, group_size=group_size, epoch=epoch)

        return Workload(name, lambda seed: recorded(seed, 0), recorded, True, MAX_CONTEXT_TOKENS)
    path = Path(name)
    if not path.exists():
        known = nearest(name, [*SYNTHETIC, *CODING])
        raise ConfigError(f"{name!r} is neither a file nor a regime{known}")
    trace = load(path, format_, skip_bad=skip_bad)
    return Workload(path.name, lambda seed: shuffled(trace, seed), None, False, None)


HISTORIES = ("none", "last-step", "prompts")
"""What a job may know before a batch, by name."""

LAST_STEP_SEED = 1_000_003
"""Added to a batch's seed: the batch before it."""


def known_before(work: Workload, seed: int, kind: str, cost: InferenceCost) -> History | None:
    """What the job knows before the batch of this seed. Raises `ConfigError` for an unknown kind, and for more than
    nothing where the workload is one recorded batch."""
    if kind not in HISTORIES:
        raise ConfigError(f"history: unknown kind {kind!r}{nearest(kind, HISTORIES)}")
    if kind == "none":
        return None
    if work.again is None:
        raise ConfigError(f"history: {work.name} is one recorded batch, and nothing is known of the batch before it")
    epochs = (work.again(seed, 2), work.again(seed, 1)) if kind == "prompts" else None
    return history(work.batch(seed + LAST_STEP_SEED), cost, epochs)


def shuffled(trace: Trace, seed: int) -> Trace:
    """The same trajectories with their groups in another order; seed 0 leaves them as recorded."""
    groups: dict[str, list[TraceTrajectory]] = {}
    for trajectory in trace.trajectories:
        groups.setdefault(trajectory.group, []).append(trajectory)
    order = list(groups)
    if seed:
        random.Random(seed).shuffle(order)
    return Trace(trace.header, tuple(trajectory for group in order for trajectory in groups[group]))


def knee_slots(work: Workload, cost: InferenceCost) -> int:
    """Environment slots at the knee: mean environment work over the mean longest chain.

    With fewer the slots decide how long a batch takes, with more its longest chain does.
    """
    seeds = KNEE_SEEDS if work.is_regime else range(1)
    batches = [work.batch(seed) for seed in seeds]
    longest_s = sum(max(alone_s(chain, cost)[-1] for chain in batch.trajectories) for batch in batches)
    return max(1, round(sum(environment_s(batch) for batch in batches) / longest_s))


def environment_to_inference(batches: Sequence[Trace], cost: InferenceCost) -> float:
    """Seconds in environments, resets included, for each second that inference takes alone."""
    chains = [chain for batch in batches for chain in batch.trajectories]
    outside_s = sum(map(environment_s, batches)) + sum(chain.reset_s for chain in chains)
    return outside_s / (sum(alone_s(chain, cost)[-1] for chain in chains) - outside_s)


def environment_s(trace: Trace) -> float:
    """Seconds of environment actions in a trace, resets excluded."""
    return sum(turn.environment_s or 0.0 for trajectory in trace.trajectories for turn in trajectory.turns)


def reference_concurrency(trace: Trace, hardware: Hardware) -> int:
    """Trajectories that fit into all replicas' memory at the mean context of the batch's turns.

    Every turn counts once, so that long trajectories count more, as they are there longer: what `makespan plan` says
    for a replica (`WorkloadProfile.contexts_tokens`), but for the knee that it looks for around it.
    """
    limit = hardware.max_context_tokens or 1 << 60
    contexts = [
        min(limit, turn.prompt_tokens + turn.generated_tokens)
        for trajectory in trace.trajectories
        for turn in trajectory.turns
    ]
    memory = hardware.replicas * hardware.replica.kv_tokens
    return max(1, memory * len(contexts) // (sum(contexts) + len(contexts) * hardware.replica.held(0)))


def at_reference(policies: Policies, trace: Trace, hardware: Hardware) -> Policies:
    """The policies with what they leave open: a concurrency of as many as there are slots for `coupled`, the reference
    for `parking`."""
    if policies.concurrency is not None or policies.reference is not None:
        return policies
    if policies.admission == "coupled":
        return msgspec.structs.replace(policies, concurrency=hardware.slots)
    if policies.admission == "parking":
        return msgspec.structs.replace(policies, reference=reference_concurrency(trace, hardware))
    return policies


def smaller(work: Workload, *, token_scale: float, time_scale: float) -> Workload:
    """The same workload with fewer tokens and shorter environment times. Raises `ConfigError` for a scale that is
    none."""
    if token_scale == time_scale == 1.0:
        return work
    check_scales(token_scale, time_scale)

    def scaled(trace: Trace) -> Trace:
        return Trace(trace.header, scaled_times(scaled_tokens(trace.trajectories, token_scale), time_scale))

    again = work.again
    limit = work.max_context_tokens
    return msgspec.structs.replace(
        work,
        batch=lambda seed: scaled(work.batch(seed)),
        again=None if again is None else lambda seed, epoch: scaled(again(seed, epoch)),
        max_context_tokens=None if limit is None else max(1, round(limit * token_scale)),
    )
