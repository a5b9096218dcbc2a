"""Measured costs of inference, in the form that the plan and the simulator take.

A probe is a batch of `n` requests that start together, with a prompt of `L` tokens each and `G` generated ones. With
`c` prompt tokens a step at most it takes `ceil(n L / c)` steps to prefill and `G - 1` to decode, so its seconds are
linear in the four constants of `InferenceCost`:

    steps * step_s + sequences in all steps * sequence_s + contexts read * context_s + n L * prefill_s

The constants are the least squares of the *relative* errors, none of them negative. Fitted on one set of lengths and
concurrencies they are judged on another, which gives the errors; the cost itself is then fitted on both, since probes
are few and shared cores disturb each by some percent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from makespan.rollout.errors import FormatError
from makespan.rollout.resources.shape import ResourceError
from makespan.rollout.simulation.cost import InferenceCost

CALIBRATION_VERSION = 1


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch asks for."""

    sequences: int
    prompt_tokens: int
    generated_tokens: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A probe and how long it took: the median of its repetitions, at the cores' mean speed."""

    probe: Probe
    seconds: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """A calibration file."""

    version: int = CALIBRATION_VERSION
    model: str
    machine: str
    cost: InferenceCost
    fitted_on: tuple[Measured, ...]
    judged_on: tuple[Measured, ...]
    median_error: float
    """Of the seconds predicted for `judged_on` by what `fitted_on` alone says, relative."""
    largest_error: float
    core_s: float | None = None
    """How fast the cores were meanwhile (`CoreSpeed`); None on GPUs."""


def terms(probe: Probe, chunk_tokens: int) -> tuple[float, float, float, float]:
    """What `step_s`, `sequence_s`, `context_s` and `prefill_s` are multiplied by for a probe."""
    n, prompt, decode = probe.sequences, probe.prompt_tokens, probe.generated_tokens - 1
    prefill_steps = math.ceil(n * prompt / chunk_tokens)
    sequences = prefill_steps + n * decode
    contexts = n * (decode * (prompt + 1) + decode * (decode - 1) / 2)
    return float(prefill_steps + decode), float(sequences), float(contexts), float(n * prompt)


def seconds(probe: Probe, cost: InferenceCost) -> float:
    """What the cost says that a probe takes."""
    constants = (cost.step_s, cost.sequence_s, cost.context_s, cost.prefill_s)
    return sum(a * b for a, b in zip(terms(probe, cost.chunk_tokens), constants, strict=True))


def fit(measured: Sequence[Measured], chunk_tokens: int) -> InferenceCost:
    """The cost with the least squares of relative errors. Raises `ResourceError` for too few probes."""
    if len(measured) < 4:
        raise ResourceError(f"four constants need at least 4 probes, not {len(measured)}")
    rows = [[term / one.seconds for term in terms(one.probe, chunk_tokens)] for one in measured]
    free = [0, 1, 2, 3]
    while True:
        solution = _least_squares([[row[i] for i in free] for row in rows])
        negative = [i for i, value in zip(free, solution, strict=True) if value < 0]
        if not negative:
            break
        free.remove(min(zip(solution, free, strict=True))[1])
    constants = [0.0] * 4
    for i, value in zip(free, solution, strict=True):
        constants[i] = value
    step_s, sequence_s, context_s, prefill_s = constants
    return InferenceCost(
        step_s=step_s, sequence_s=sequence_s, context_s=context_s, prefill_s=prefill_s, chunk_tokens=chunk_tokens
    )


def _least_squares(rows: list[list[float]]) -> list[float]:
    """The `x` for which every row's product with it is closest to 1: normal equations, solved by elimination."""
    size = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) or 1.0 for i in range(size)]
    scaled = [[row[i] / scale[i] for i in range(size)] for row in rows]
    matrix = [[sum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    right = [sum(row[i] for row in scaled) for i in range(size)]
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda i: abs(matrix[i][pivot]))
        matrix[pivot], matrix[best] = matrix[best], matrix[pivot]
        right[pivot], right[best] = right[best], right[pivot]
        if abs(matrix[pivot][pivot]) < 1e-12:
            raise ResourceError("the probes do not tell the costs apart: vary lengths and concurrencies independently")
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[pivot], strict=True)]
            right[row] -= factor * right[pivot]
    solution = [0.0] * size
    for row in reversed(range(size)):
        known = sum(matrix[row][j] * solution[j] for j in range(row + 1, size))
        solution[row] = (right[row] - known) / matrix[row][row]
    return [value / scale[i] for i, value in enumerate(solution)]


def calibrate(
    model: str,
    machine: str,
    fitted_on: Sequence[Measured],
    judged_on: Sequence[Measured],
    chunk_tokens: int,
    core_s: float | None = None,
) -> Calibration:
    """Judge a fit of one set of measurements on another, then fit on both. Raises `ResourceError` when they share a
    probe."""
    shared = {one.probe for one in fitted_on} & {one.probe for one in judged_on}
    if shared:
        raise ResourceError(f"{len(shared)} probes would be judged by their own fit, for example {next(iter(shared))}")
    part = fit(fitted_on, chunk_tokens)
    errors = [abs(seconds(one.probe, part) / one.seconds - 1) for one in judged_on]
    return Calibration(
        model=model,
        machine=machine,
        cost=fit([*fitted_on, *judged_on], chunk_tokens),
        fitted_on=tuple(fitted_on),
        judged_on=tuple(judged_on),
        median_error=statistics.median(errors),
        largest_error=max(errors),
        core_s=core_s,
    )


def read(path: Path) -> Calibration:
    """Read a calibration file. Raises `FormatError`."""
    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise FormatError(f"cannot read the calibration {str(path)!r}: {error}") from error
    version = document.get("version") if isinstance(document, dict) else None
    if version != CALIBRATION_VERSION:
        raise FormatError(
            f"{path}: calibration of version {version!r}; this makespan reads {CALIBRATION_VERSION}, which "
            "`makespan calibrate` writes"
        )
    try:
        return msgspec.convert(document, Calibration)
    except msgspec.ValidationError as error:
        raise FormatError(f"{path}: {error}") from error
