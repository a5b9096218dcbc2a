"""`makespan report` as a user calls it, and what a run and a simulation leave."""

from __future__ import annotations

import json

import msgspec
import pytest
from rich.console import Console

from makespan.cli import main
from makespan.commands import tracking
from makespan.rollout.config import RunConfig, TrackingConfig, WandbConfig
from tests.rollout.telemetry import batches, logs


def run_directory(tmp_path, name="run"):
    (tmp_path / name / "events").mkdir(parents=True)
    logs.write(tmp_path / name / "events" / "engine.jsonl", logs.two_trajectories())
    return tmp_path / name


def test_a_runs_report_stands_in_its_directory_unless_told_otherwise(tmp_path, capsys):
    directory = run_directory(tmp_path)
    assert main(["report", str(directory)]) == 0
    assert "15.0 s" in (directory / "report.html").read_text()
    assert "report.html" in capsys.readouterr().out
    assert main(["report", str(directory), "-o", str(tmp_path / "x.html"), "--perfetto", str(tmp_path / "x.json")]) == 0
    assert (tmp_path / "x.html").exists()
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]


def test_several_runs_need_a_file_and_have_one_report(tmp_path, capsys):
    runs = [str(run_directory(tmp_path, name)) for name in ("one", "two")]
    assert main(["report", *runs]) == 2
    assert "-o FILE is needed" in capsys.readouterr().err
    assert main(["report", *runs, "-o", str(tmp_path / "both.html")]) == 0
    page = (tmp_path / "both.html").read_text()
    assert "<b>one</b>, <b>two</b>" in page
    assert main(["report", *runs, "-o", str(tmp_path / "both.html"), "--perfetto", str(tmp_path / "x.json")]) == 2
    assert "a trace is of one run" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-o", "--perfetto"])
def test_a_place_that_cannot_be_written_is_refused_first(tmp_path, capsys, option):
    directory = run_directory(tmp_path)
    assert main(["report", str(directory), option, str(tmp_path / "no" / "x")]) == 2
    assert f"{option}: cannot write" in capsys.readouterr().err
    assert not (directory / "report.html").exists()


def test_what_is_no_run_is_one_sentence(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing"), "-o", str(tmp_path / "x.html")]) == 2
    assert capsys.readouterr().err.startswith("makespan: cannot read the run")


def test_a_simulation_writes_its_report(tmp_path, capsys):
    path = tmp_path / "deep" / "report.html"
    assert main(["simulate", "bfcl", "--chains", "16", "--slots", "3", "--report", str(path)]) == 0
    assert "report: " in capsys.readouterr().out
    assert "simulated" in path.read_text()


def tracked(tmp_path, console, **settings):
    log = batches.merged(tmp_path, logs.two_trajectories())
    directory = tmp_path / "run"
    directory.mkdir(exist_ok=True)
    tracking.track(RunConfig(tracking=TrackingConfig(**settings)), console, directory, log, ["a note"])
    return directory


def test_a_run_leaves_its_report_and_names_it(tmp_path):
    console = Console(record=True, width=200)
    directory = tracked(tmp_path, console)
    assert "a note" in (directory / "report.html").read_text()
    assert f"report: {directory / 'report.html'}" in console.export_text()


def test_a_run_without_tracking_leaves_nothing(tmp_path):
    directory = tracked(tmp_path, Console(), report=False)
    assert list(directory.iterdir()) == []


def test_a_report_that_cannot_be_written_is_said_and_costs_no_more(tmp_path):
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    console = Console(record=True, width=200)
    tracked(tmp_path, console)
    assert "the report could not be written" in console.export_text()


def test_a_run_logs_to_wandb_where_its_configuration_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    directory = tracked(tmp_path, Console(), report=False, wandb=WandbConfig(project="p", mode="offline"))
    assert len(list(directory.glob("wandb/offline-run-*/run-*.wandb"))) == 1


def test_settings_of_tracking_are_checked(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("tracking: {metrics_port: 70000}\n")
    assert main(["run", str(tmp_path / "run.yaml")]) == 2
    assert "tracking.metrics_port" in capsys.readouterr().err
    assert msgspec.to_builtins(RunConfig())["tracking"]["report"] is True
