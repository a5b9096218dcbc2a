"""Costs recovered from measurements that are made of known costs."""

from __future__ import annotations

import random

import msgspec
import pytest

from makespan.rollout.errors import FormatError
from makespan.rollout.resources.calibration import Measured, Probe, calibrate, fit, read
from makespan.rollout.resources.shape import ResourceError

STEP_S, SEQUENCE_S, CONTEXT_S, PREFILL_S, CHUNK = 0.006, 0.0008, 2e-6, 0.0002, 1_000


def took(sequences: int, prompt: int, generated: int, noise: float = 0.0) -> Measured:
    """Step by step: chunks of 1,000 prompt tokens, then every sequence a token a step."""
    seconds, left = 0.0, sequences * prompt
    while left > 0:
        chunk = min(left, CHUNK)
        seconds, left = seconds + STEP_S + SEQUENCE_S + PREFILL_S * chunk, left - chunk
    for step in range(generated - 1):
        seconds += STEP_S + sequences * (SEQUENCE_S + CONTEXT_S * (prompt + 1 + step))
    disturbed = seconds * (1 + noise)
    probe = Probe(sequences=sequences, prompt_tokens=prompt, generated_tokens=generated)
    return Measured(probe=probe, seconds=disturbed)


FIT = [(1, 250, 1), (1, 3_000, 1), (1, 250, 50), (8, 250, 50), (1, 3_000, 50), (8, 2_000, 50)]
JUDGE = [(2, 700, 30), (5, 1_500, 20), (1, 1_800, 1)]


def test_the_costs_that_measurements_are_made_of_are_found():
    cost = fit([took(*shape) for shape in FIT], CHUNK)
    found = (cost.step_s, cost.sequence_s, cost.context_s, cost.prefill_s)
    assert found == pytest.approx((STEP_S, SEQUENCE_S, CONTEXT_S, PREFILL_S), rel=1e-6)
    assert cost.chunk_tokens == CHUNK


def test_no_cost_is_negative_and_noise_costs_little():
    rng = random.Random(1)
    measured = [took(*shape, noise=rng.uniform(-0.1, 0.1)) for shape in FIT]
    result = calibrate("m", "here", measured, [took(*shape) for shape in JUDGE], CHUNK)
    cost = result.cost
    assert min(cost.step_s, cost.sequence_s, cost.context_s, cost.prefill_s) >= 0
    assert result.median_error <= result.largest_error < 0.25


def test_an_error_is_seen_on_other_lengths():
    """Twice the time in what is judged than the fit can know of."""
    judged = [took(*shape, noise=1.0) for shape in JUDGE]
    result = calibrate("m", "here", [took(*shape) for shape in FIT], judged, CHUNK)
    assert result.median_error == pytest.approx(0.5)


def test_the_cost_is_fitted_on_all_that_was_measured_and_the_error_on_a_part():
    """Every probe takes the same share longer in what is judged: the cost lies between, the error does not know it."""
    fitted, judged = [took(*shape) for shape in FIT], [took(*shape, noise=0.1) for shape in JUDGE]
    result = calibrate("m", "here", fitted, judged, CHUNK)
    assert PREFILL_S * 1.01 < result.cost.prefill_s < PREFILL_S * 1.1
    assert result.median_error == pytest.approx(1 - 1 / 1.1)


def test_judging_a_fit_by_itself_is_refused():
    measured = [took(*shape) for shape in FIT]
    with pytest.raises(ResourceError, match="1 probes would be judged by their own fit"):
        calibrate("m", "here", measured, measured[:1], CHUNK)


def test_probes_that_tell_nothing_apart_are_refused():
    with pytest.raises(ResourceError, match="at least 4 probes"):
        fit([took(*shape) for shape in FIT[:3]], CHUNK)
    with pytest.raises(ResourceError, match="do not tell the costs apart"):
        fit([took(1, 250, 1)] * 5, CHUNK)


def test_a_file_is_read_as_it_was_written_and_another_version_refused(tmp_path):
    result = calibrate("m", "here", [took(*shape) for shape in FIT], [took(*shape) for shape in JUDGE], CHUNK)
    path = tmp_path / "calibration.json"
    path.write_bytes(msgspec.json.encode(result))
    assert read(path) == result
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(result), "version": 7}))
    with pytest.raises(FormatError, match="version 7"):
        read(path)
    path.write_text("{")
    with pytest.raises(FormatError, match="cannot read the calibration"):
        read(path)
