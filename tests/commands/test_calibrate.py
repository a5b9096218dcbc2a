"""`makespan calibrate`: its probes, its measurement on a real engine, and what takes its file."""

from __future__ import annotations

import json

import msgspec
import pytest

from makespan.cli import main
from makespan.commands.calibrate import FIT, JUDGE, REPETITIONS, Span, at_usual_speed, probes, run_probes
from makespan.rollout.resources.calibration import Calibration, Measured, Probe
from makespan.rollout.resources.core_speed import CoreSpeed, Reading
from makespan.rollout.simulation.cost import InferenceCost


def test_it_is_judged_on_other_lengths_and_concurrencies_than_it_is_fitted_on():
    fitted, judged = set(probes(FIT, 256)), set(probes(JUDGE, 256))
    assert not fitted & judged
    several = {probe.sequences for probe in judged} - {1}
    assert not several & {probe.sequences for probe in fitted}


LITTLE = Probe(sequences=1, prompt_tokens=64, generated_tokens=1)
MUCH = Probe(sequences=2, prompt_tokens=1_024, generated_tokens=24)


@pytest.mark.vllm
def test_a_probe_on_a_real_engine_takes_longer_when_it_asks_for_more(engines, on_loop):
    spans = on_loop(run_probes([engines["uncached"]], [LITTLE, MUCH]))
    assert [span.probe for span in spans] == [LITTLE, MUCH] * REPETITIONS
    (first, second), core_s = at_usual_speed(spans, CoreSpeed(), [()])
    assert (first.probe, second.probe) == (LITTLE, MUCH)
    assert 0 < first.seconds < second.seconds
    assert core_s is None


def test_what_slow_cores_add_does_not_count():
    """Core 0 reads 1 ms until second 4 and 3 ms from then on, as often: 2 ms in the mean. Core 1 always reads 5 ms."""
    readings = [Reading(float(at_s), 0, 0.001 if at_s < 4 else 0.003) for at_s in range(8)]
    readings += [Reading(at_s + 0.5, 1, 0.005) for at_s in range(8)]
    fast, slow, slow_again = Span(0, LITTLE, 0.0, 2.0), Span(0, LITTLE, 4.0, 7.0), Span(0, LITTLE, 4.0, 7.5)
    other = Span(1, MUCH, 0.0, 7.5)
    (little, much), core_s = at_usual_speed([fast, slow, slow_again, other], CoreSpeed(readings), [(0,), (1,)])
    # 2 s on cores twice as fast as usual; 3 and 3.5 s on cores that are half as slow again
    assert little.seconds == pytest.approx(sorted([2.0 * 2, 3.0 / 1.5, 3.5 / 1.5])[1])
    assert much.seconds == pytest.approx(7.5)
    assert core_s == pytest.approx((0.002 + 0.005) / 2)
    (little, _), core_s = at_usual_speed([fast, slow, slow_again, other], CoreSpeed(), [(0,), (1,)])
    assert little.seconds == pytest.approx(3.0)
    assert core_s is None


def calibrated(**cost: float) -> Calibration:
    one = Measured(probe=Probe(sequences=1, prompt_tokens=1, generated_tokens=1), seconds=1.0)
    return Calibration(
        model="m",
        machine="here",
        cost=InferenceCost(**cost),
        fitted_on=(one,),
        judged_on=(one,),
        median_error=0.0,
        largest_error=0.0,
    )


def test_the_simulator_takes_the_costs(tmp_path):
    """A step that takes a hundred times as long makes a longer batch of the same work."""
    spans = []
    for step_s in (0.01, 1.0):
        path = tmp_path / "calibration.json"
        path.write_bytes(msgspec.json.encode(calibrated(step_s=step_s)))
        out = tmp_path / "figures.json"
        arguments = ["simulate", "bfcl", "--chains", "8", "--slots", "4", "--calibration", str(path)]
        assert main([*arguments, "--json", str(out)]) == 0
        spans.append(json.loads(out.read_bytes())["makespan_s"])
    assert spans[1] > 5 * spans[0]


def test_a_file_that_is_none_is_refused(tmp_path, capsys):
    assert main(["simulate", "bfcl", "--calibration", str(tmp_path / "none.json")]) == 2
    assert "cannot read the calibration" in capsys.readouterr().err
