"""`makespan calibrate`: its probes, its measurement on a real engine, and what takes its file."""

from __future__ import annotations

import json

import msgspec
import pytest

from makespan.cli import main
from makespan.commands.calibrate import FIT, JUDGE, measure, probes
from makespan.rollout.resources.calibration import Calibration, Measured, Probe
from makespan.rollout.simulation.cost import InferenceCost


def test_it_is_judged_on_other_lengths_and_concurrencies_than_it_is_fitted_on():
    fitted, judged = set(probes(FIT, 256)), set(probes(JUDGE, 256))
    assert not fitted & judged
    several = {probe.sequences for probe in judged} - {1}
    assert not several & {probe.sequences for probe in fitted}


@pytest.mark.vllm
def test_a_probe_on_a_real_engine_takes_longer_when_it_asks_for_more(engines, on_loop):
    little = Probe(sequences=1, prompt_tokens=64, generated_tokens=1)
    much = Probe(sequences=2, prompt_tokens=1_024, generated_tokens=24)
    first, second = on_loop(measure([engines["uncached"]], [little, much]))
    assert first.probe == little
    assert 0 < first.seconds < second.seconds


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
