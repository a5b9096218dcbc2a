"""The ladder: the same batches under one policy after another, and what each step changes.

`LADDER` has the baselines. `ABLATION` has the product: from today's practice one part more on each rung, then the whole
without one part each, since the order in which parts are added hides effects, and what bounds it.

Every rung runs the batches of the same seeds, so that differences are paired: the noise between batches is far larger
than any policy's effect. A makespan is a maximum and a single batch tells nothing; means come with standard errors.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.errors import ConfigError
from makespan.rollout.history import History
from makespan.rollout.replay.trace import Trace
from makespan.rollout.routing import STICKY
from makespan.rollout.simulation.batch import Hardware, Policies, simulate
from makespan.rollout.simulation.workload import Workload, at_reference, known_before, reference_concurrency
from makespan.rollout.telemetry.analysis import BatchAnalysis, analyse
from makespan.rollout.telemetry.merge import MergedLog, merge

OVERSAMPLE = 1.25
"""Oversampling starts so many times the trajectories that are needed."""


class Rung(msgspec.Struct, frozen=True):
    """One combination of policies; which one exactly may depend on the batch and the hardware."""

    name: str
    says: str
    policies: Callable[[Trace, Hardware], Policies]


def _coupled(trace: Trace, hardware: Hardware) -> Policies:
    return at_reference(Policies(admission="coupled"), trace, hardware)


def _everything(trace: Trace, hardware: Hardware) -> Policies:
    return Policies()


def _limited(scheduling: str) -> Callable[[Trace, Hardware], Policies]:
    def policies(trace: Trace, hardware: Hardware) -> Policies:
        concurrency = reference_concurrency(trace, hardware)
        return Policies(admission="fixed", concurrency=concurrency, scheduling=scheduling)

    return policies


def _oversample(chosen: Callable[[Trace, Hardware], Policies]) -> Callable[[Trace, Hardware], Policies]:
    """The same policies, stopped when as many have ended as were needed."""

    def policies(trace: Trace, hardware: Hardware) -> Policies:
        needed = max(1, round(len(trace.trajectories) / OVERSAMPLE))
        return msgspec.structs.replace(chosen(trace, hardware), needed=needed)

    return policies


COUPLED = Rung("coupled", "a trajectory holds its slot from start to end", _coupled)

LADDER: tuple[Rung, ...] = (
    COUPLED,
    Rung("decoupled", "a slot is held while an action runs; everything is admitted", _everything),
    Rung("concurrency", "decoupled, as many trajectories as the memory is for", _limited("fifo")),
    Rung("progress", "the same, the most-progressed chain first", _limited("progress")),
    Rung("least-progress", "the same, the least-progressed chain first", _limited("least-progress")),
    Rung("oracle", "the same, the longest true remaining time first", _limited("oracle")),
    Rung(
        "oversample-cut",
        f"the same as `concurrency`, stopped at 1/{OVERSAMPLE} of the trajectories",
        _oversample(_limited("fifo")),
    ),
)


FULL = Policies(admission="parking", routing="cost", scheduling="caas", order="forecast", history="prompts")
"""Every part of the product, with all that earlier steps can teach; the concurrency is the batch's reference."""


def _part(name: str, says: str, **changes: Any) -> Rung:
    """A rung of `FULL` with something else in its place, at the reference concurrency."""
    chosen = msgspec.structs.replace(FULL, **changes)
    return Rung(name, says, lambda trace, hardware: at_reference(chosen, trace, hardware))


STAYING, FIRST_COME = {"routing": STICKY}, {"scheduling": "fifo", "order": "arrival"}

ROUTING = _part("+routing", "the same, routing by cost", **FIRST_COME, history="none")

ABLATION: tuple[Rung, ...] = (
    COUPLED,
    _part("+parking", "decoupled, parking at the reference concurrency", **STAYING, **FIRST_COME, history="none"),
    ROUTING,
    _part("+caas", "the same, caas and admission by forecast, knowing a last step if any", history="last-step"),
    _part("+history", "the same, knowing earlier epochs of the prompts: everything", history="prompts"),
    _part("-decoupling", "everything, but a trajectory holds its slot from start to end", admission="coupled"),
    _part("-parking", "everything, but all are admitted at once", admission="everything"),
    _part("-routing", "everything, but routing is sticky least-in-flight", **STAYING),
    _part("-caas", "everything, but actions and admission are first come, first served", **FIRST_COME),
    _part("oracle", "parking and routing by cost, the longest true time first", scheduling="oracle", order="oracle"),
    Rung("cut", f"as `+routing`, stopped at 1/{OVERSAMPLE} of the trajectories", _oversample(ROUTING.policies)),
)


def without_past(rungs: Sequence[Rung]) -> tuple[Rung, ...]:
    """The rungs for a single recorded batch, before which nothing is known: those that are then the same as another
    are left out."""

    def forgetful(rung: Rung) -> Rung:
        return Rung(rung.name, rung.says, lambda t, h: msgspec.structs.replace(rung.policies(t, h), history="none"))

    return tuple(forgetful(rung) for rung in rungs if rung.name != "+history")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One batch under one combination of policies."""

    makespan_s: float
    lower_bound_s: float
    recomputed_share: float
    """Of all prefilled tokens, those that had been computed before."""
    preemptions: int
    discarded_tokens: int
    """Generated by trajectories that were cut."""
    kept_length: float
    """Mean turns of the trajectories that were kept, over those of all: below 1 the short ones were kept."""


class Paired(msgspec.Struct, frozen=True):
    """A mean over seeds and its standard error (None with one seed)."""

    mean: float
    se: float | None


def paired(values: Sequence[float]) -> Paired:
    """Mean and standard error of paired differences."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return Paired(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Paired(mean, math.sqrt(variance / len(values)))


def change_pct(outcomes: Iterable[Outcome], against: Iterable[Outcome]) -> Paired:
    """How much longer the makespan is, in percent, seed by seed; negative is shorter."""
    pairs = zip(outcomes, against, strict=True)
    return paired([100 * (ours.makespan_s / theirs.makespan_s - 1) for ours, theirs in pairs])


def measured(
    trace: Trace,
    hardware: Hardware,
    policies: Policies,
    seed: int,
    history: History | None = None,
    homes: Mapping[str, str] | None = None,
) -> tuple[MergedLog, BatchAnalysis]:
    """Simulate a batch without leaving anything behind; gives its log and what it says.

    Arguments and errors are those of `simulate`.
    """
    with tempfile.TemporaryDirectory(prefix="makespan-") as directory:
        path = Path(directory) / "engine.jsonl"
        simulate(trace, hardware, policies, seed=seed, log_path=path, history=history, homes=homes)
        log = merge([path])
    return log, analyse(log)


def outcome(
    trace: Trace,
    hardware: Hardware,
    policies: Policies,
    seed: int,
    history: History | None = None,
    homes: Mapping[str, str] | None = None,
) -> Outcome:
    """One simulated batch in the figures that a comparison needs. Arguments and errors are those of `simulate`."""
    return outcome_of(*measured(trace, hardware, policies, seed, history, homes), trace)


def outcome_of(log: MergedLog, analysis: BatchAnalysis, trace: Trace) -> Outcome:
    """The figures of a batch that is over, whatever it ran on."""
    prefilled = analysis.tokens.prompt - (analysis.tokens.cached or 0)
    discarded, kept_length = oversampling(log, trace)
    return Outcome(
        makespan_s=analysis.makespan_s,
        lower_bound_s=analysis.lower_bound_s or 0.0,
        recomputed_share=(analysis.tokens.recomputed or 0) / prefilled if prefilled else 0.0,
        preemptions=analysis.preemptions or 0,
        discarded_tokens=discarded,
        kept_length=kept_length,
    )


def oversampling(log: MergedLog, trace: Trace) -> tuple[int, float]:
    """(tokens generated by trajectories that were cut, mean length of the kept ones over that of all)."""
    ended = list(log.of("ended"))
    kept = [event.data["turns"] for event in ended if event.data["state"] != "cancelled"]
    discarded = sum(event.data["generated_tokens"] for event in ended if event.data["state"] == "cancelled")
    mean_turns = sum(len(trajectory.turns) for trajectory in trace.trajectories) / len(trace.trajectories)
    return discarded, sum(kept) / len(kept) / mean_turns if kept else 0.0


def climb(
    work: Workload,
    hardware: Hardware,
    seeds: Sequence[int],
    rungs: Sequence[Rung] = LADDER,
    on_outcome: Callable[[Rung, int, Outcome], None] | None = None,
) -> dict[str, list[Outcome]]:
    """Every rung on the batch of every seed. Raises `ConfigError` without seeds."""
    if not seeds:
        raise ConfigError("--seeds: at least 1 batch is needed, not 0")
    outcomes: dict[str, list[Outcome]] = {rung.name: [] for rung in rungs}
    for seed in seeds:
        batch = work.batch(seed)
        for rung in rungs:
            policies = rung.policies(batch, hardware)
            known = known_before(work, seed, policies.history, hardware.replica.cost)
            result = outcome(batch, hardware, policies, seed, known)
            outcomes[rung.name].append(result)
            if on_outcome is not None:
                on_outcome(rung, seed, result)
    return outcomes
