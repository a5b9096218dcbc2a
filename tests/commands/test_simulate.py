"""`makespan simulate` and `makespan ablate` as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from makespan.cli import main
from makespan.commands.figure import Bar, figure


def simulated(tmp_path, *arguments):
    path = tmp_path / "figures.json"
    assert main(["simulate", *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_bytes())


def test_a_regime_is_simulated_and_says_what_it_measured(tmp_path, capsys):
    figures = simulated(tmp_path, "bfcl", "--chains", "16", "--slots", "3")
    assert figures["states"] == {"finished": 16}
    assert figures["makespan_s"] >= figures["lower_bound_s"] > 0
    chain = figures["last_chain"]
    phases = (
        "admission",
        "replica_queue",
        "prefill",
        "recomputation",
        "decode",
        "slot_queue",
        "environment",
        "overhead",
    )
    assert sum(chain[name] for name in phases) == pytest.approx(chain["total"])
    assert "times the lower bound" in capsys.readouterr().out


def test_a_recorded_simulation_can_be_simulated_again_with_the_same_end(tmp_path):
    trace, log = tmp_path / "trace.jsonl.gz", tmp_path / "events.jsonl"
    size = ("--slots", "3", "--replicas", "2")
    first = simulated(tmp_path, "bfcl", "--chains", "16", *size, "--record", str(trace), "--events", str(log))
    again = simulated(tmp_path, str(trace), *size)
    assert again["makespan_s"] == pytest.approx(first["makespan_s"])
    assert simulated(tmp_path, str(log), *size)["makespan_s"] == pytest.approx(first["makespan_s"])


def test_figures_go_to_standard_output_and_words_elsewhere(capsys):
    assert main(["simulate", "bfcl", "--chains", "8", "--slots", "2", "--json", "-"]) == 0
    written = capsys.readouterr()
    assert json.loads(written.out)["workload"] == "bfcl"
    assert "makespan" in written.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "lognormel-1"], "did you mean 'lognormal-1'"),
        (["simulate", "coding-sessions"], "--sessions PATH"),
        (["simulate", "bfcl", "--slots", "0"], "--slots must be at least 1"),
        (["simulate", "bfcl", "--scheduling", "fifa"], "did you mean 'fifo'"),
        (["simulate", "bfcl", "--admission", "fix"], "did you mean 'fixed'"),
        (["simulate", "bfcl", "--concurrency", "4"], "must be null"),
        (["ablate", "bfcl", "--simulate", "--rungs", "coupled,cass"], "--rungs: unknown rung 'cass'"),
        (["ablate", "bfcl", "--simulate", "--token-scale", "0"], "--token-scale is 0; it must be above 0"),
        (["ablate", "bfcl", "--replay", "--ample"], "--ample is of simulations"),
        (["ablate", "bfcl", "--replay", "--kv-tokens", "9"], "--kv-tokens is of simulations"),
        (["ablate", "bfcl", "--replay", "--model", "nowhere"], "nowhere"),
        (["ablate", "bfcl", "--simulate", "--seeds", "0"], "--seeds"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(arguments, says, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_the_ladder_is_a_table_json_and_a_figure(tmp_path, capsys):
    path, image = tmp_path / "ladder.json", tmp_path / "ladder.svg"
    arguments = ["ablate", "bfcl", "--simulate", "--seeds", "2", "--chains", "24", "--slots", "2"]
    assert main([*arguments, "--json", str(path), "--figure", str(image)]) == 0
    figures = json.loads(path.read_bytes())
    rows = {row["rung"]: row for row in figures["rows"]}
    assert figures["seeds"] == 2
    assert rows["coupled"]["against_pct"]["coupled"]["mean"] == 0.0
    assert rows["concurrency"]["against_pct"]["coupled"]["mean"] < 0
    assert rows["oversample-cut"]["discarded_tokens"] > 0
    assert "oracle" in capsys.readouterr().out
    labels = [element.text for element in ElementTree.parse(image).iter("{http://www.w3.org/2000/svg}text")]
    assert set(rows) < set(labels)


def test_a_figures_bars_are_as_long_as_their_values():
    root = ElementTree.fromstring(figure("a & b", "s", [Bar("x", 50.0, 0.0), Bar("y", 100.0, 0.0)]))
    widths = [float(r.get("width")) for r in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[1] == pytest.approx(2 * widths[0])


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["simulate", "bfcl"], "--json"),
        (["simulate", "bfcl"], "--events"),
        (["simulate", "bfcl"], "--record"),
        (["ablate", "bfcl", "--simulate"], "--json"),
        (["ablate", "bfcl", "--simulate"], "--figure"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(tmp_path, capsys, monkeypatch, command, option):
    worked = []
    for name in ("simulate", "ablate"):
        monkeypatch.setattr(f"makespan.commands.{name}.resolve", worked.append)
    file = tmp_path / "file"
    file.write_text("kept")
    for path in (tmp_path, file / "below"):
        assert main([*command, option, str(path)]) == 2
        error = capsys.readouterr().err
        assert f"{option}: cannot write {str(path)!r}" in error
        assert error.count("\n") == 1
    assert worked == []
    assert file.read_text() == "kept"


def test_a_reader_that_went_away_is_no_error():
    command = [sys.executable, "-m", "makespan", "simulate", "bfcl", "--chains", "8", "--slots", "2", "--json", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0
    assert "makespan" in said
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


def test_a_simulation_of_which_everything_failed_says_so(capsys):
    size = ["--chains", "4", "--slots", "2", "--kv-tokens", "10"]
    assert main(["simulate", "bfcl", *size]) == 1
    said = capsys.readouterr().out
    assert "failed 4" in said
    assert "nan" not in said
    assert main(["ablate", "bfcl", "--simulate", "--seeds", "1", *size]) == 2
    assert "nothing to compare" in capsys.readouterr().err
