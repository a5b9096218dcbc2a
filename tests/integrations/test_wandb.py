"""What W&B was given, read back from the file of a real offline run, and what happens where W&B fails."""

from __future__ import annotations

import json
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from makespan.integrations.wandb import AXIS, PANEL, TABLE, attach, attach_existing
from makespan.rollout.telemetry.report import ReportedRun, reported
from tests.integrations.verl.wandb_file import history, metrics, wait_until_written
from tests.rollout.telemetry import batches, logs


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    if wandb.run is not None:
        wandb.run.finish()


@pytest.fixture(scope="module", autouse=True)
def _no_service_left() -> Iterator[None]:
    yield
    wandb.teardown()


@pytest.fixture
def batch(tmp_path: Path) -> ReportedRun:
    return reported(batches.merged(tmp_path, logs.two_trajectories()), name="by-hand")


def trainers_run(tmp_path: Path, **settings: Any) -> Any:
    return wandb.init(project="trainer", mode="offline", dir=str(tmp_path), **settings)


def run_file(tmp_path: Path) -> Path:
    (found,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    return wait_until_written(found)


def media(tmp_path: Path, name: str) -> Path:
    (found,) = tmp_path.glob(f"wandb/offline-run-*/files/{name}")
    return found


def test_a_run_of_its_own_holds_figures_table_and_timeline(tmp_path: Path, batch: ReportedRun) -> None:
    tracker = attach(project="p", mode="offline", directory=str(tmp_path))
    tracker.log(batch, step=3)
    tracker.close()
    assert wandb.run is None  # finished with its tracker
    (row,) = history(run_file(tmp_path))
    # By hand: 14.5 s of the last trajectory, 6 of them waiting for the first to end; 15 s in all.
    assert row["makespan/makespan_s"] == 15.0
    assert row["makespan/last_chain/admission_s"] == 6.0
    assert row["makespan/tokens/cached"] == 100
    assert row["makespan/trajectories/failed"] == 0
    assert row["makespan/reward/mean"] == 0.75
    assert row[AXIS] == 3
    assert "makespan/forecast/turns_error" not in row  # not measured is absent, not 0
    assert "makespan/concurrency/reference" not in row
    table = json.loads(media(tmp_path, row[f"{TABLE}.path"]).read_bytes())
    first = dict(zip(table["columns"], table["data"][0], strict=True))
    assert [entry[0] for entry in table["data"]] == ["b#0", "a#0"]
    assert (first["end_s"], first["environment_s"], first["admission_s"]) == (14.5, 4.0, 6.0)
    # The median of 0 and 6 s of admission is 3 s.
    assert first["why_late"] == "admission 6.0 s, 3.0 s beyond the median; 1 turns (median 1)"
    page = media(tmp_path, row[f"{PANEL}.path"]).read_text()
    assert "<b>by-hand</b>" in page
    assert "makespan-data" in page


def test_the_axis_is_makespans_own(tmp_path: Path, batch: ReportedRun) -> None:
    run = trainers_run(tmp_path)
    attach()
    run.finish()
    defined = metrics(run_file(tmp_path))
    assert defined["makespan/*"]["step_metric"] == AXIS
    assert defined[AXIS]["hidden"]


def test_nothing_is_lost_where_a_trainer_logs_its_own_steps_between_and_out_of_order(
    tmp_path: Path, batch: ReportedRun
) -> None:
    run = trainers_run(tmp_path)
    tracker = attach()
    tracker.log(batch, step=100, panel=False)
    run.log({"loss": 1.0}, step=1)
    tracker.log(batch, step=101, panel=False)
    tracker.log(batch, step=102, panel=False)  # twice in one of the trainer's steps
    run.log({"loss": 3.0}, step=3)
    run.log({"loss": 2.0}, step=2)  # out of order: W&B drops it, with us or without
    tracker.log(batch, step=103, panel=False)
    run.log({"loss": 7.0}, step=7)
    run.log({"accuracy": 0.5}, step=7)
    for step in (104, 105, 106):
        tracker.log(batch, step=step, panel=False)
    tracker.close()
    run.finish()
    rows = history(run_file(tmp_path))
    ours = [row for row in rows if AXIS in row]
    assert [row[AXIS] for row in ours] == [100, 101, 102, 103, 104, 105, 106]
    assert all(row["makespan/makespan_s"] == 15.0 and row[f"{TABLE}.nrows"] == 2 for row in ours)
    assert {row["_step"]: row["loss"] for row in rows if "loss" in row} == {1: 1.0, 3: 3.0, 7: 7.0}
    assert [row["accuracy"] for row in rows if "accuracy" in row] == [0.5]
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps))


def test_logging_the_plain_way_would_lose_the_trainers_steps(tmp_path: Path) -> None:
    """Why rows are laid into the trainer's: the control of the test above."""
    run = trainers_run(tmp_path)
    for step in (1, 2, 3):
        run.log({"makespan/makespan_s": 15.0})
        run.log({"makespan/makespan_s": 15.0})
        run.log({"loss": float(step)}, step=step)
    run.finish()
    losses = [row["loss"] for row in history(run_file(tmp_path)) if "loss" in row]
    assert losses != [1.0, 2.0, 3.0]


def test_a_trainer_that_counts_by_itself_keeps_its_rows(tmp_path: Path, batch: ReportedRun) -> None:
    run = trainers_run(tmp_path)
    tracker = attach(run)
    for step in range(3):
        tracker.log(batch, step=step, panel=False)
        run.log({"loss": float(step)})
    tracker.close()
    run.finish()
    rows = history(run_file(tmp_path))
    assert [(row["loss"], row[AXIS]) for row in rows] == [(0.0, 0), (1.0, 1), (2.0, 2)]


def test_a_run_file_that_is_still_being_written_is_read_up_to_its_last_whole_record(
    tmp_path: Path, batch: ReportedRun
) -> None:
    """Of the reader that these tests rest on: W&B's service may still be writing when a test reads."""
    run = trainers_run(tmp_path)
    attach(run).log(batch, step=0)
    run.log({"loss": 1.0})
    run.finish()
    whole = run_file(tmp_path).read_bytes()
    rows = history(run_file(tmp_path))
    part = tmp_path / "part.wandb"
    for length in {*range(7, len(whole), 13), *range(len(whole) - 64, len(whole))}:
        part.write_bytes(whole[:length])
        read = history(part)
        assert read == rows[: len(read)]
    assert len(rows) == 1


def test_a_table_beside_a_trainers_own_figures_leaves_their_axis_alone(tmp_path: Path) -> None:
    run = trainers_run(tmp_path)
    for step in (1, 2):
        attach_existing().log_table(["step", "trajectory"], [[step, "a"]])
        run.log({"makespan/makespan_s": float(step), AXIS: step}, step=step)
    run.finish()
    rows = history(run_file(tmp_path))
    assert [(row["makespan/makespan_s"], row[AXIS]) for row in rows if "makespan/makespan_s" in row] == [
        (1.0, 1),
        (2.0, 2),
    ]
    assert sum(f"{TABLE}.nrows" in row for row in rows) == 2


def test_a_disabled_run_takes_everything_and_writes_nothing(tmp_path: Path, batch: ReportedRun) -> None:
    tracker = attach(mode="disabled", directory=str(tmp_path))
    tracker.log(batch, step=1)
    tracker.log(batch, step=2)
    tracker.close()
    assert not list(tmp_path.glob("wandb/**/*.wandb"))


class Broken:
    """A W&B run that raises whatever is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise RuntimeError(f"{name}: the service is gone")


def test_a_run_that_fails_costs_its_figures_and_one_warning_a_kind(
    batch: ReportedRun, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    with caplog.at_level(logging.WARNING):
        tracker = attach(broken)
        for step in range(5):
            tracker.log(batch, step=step)
        tracker.log_table(["a"], [[1]])
        tracker.close()
    assert {"define_metric", "step"} <= set(broken.asked)
    assert len(caplog.records) == 2
    assert all("makespan figures are missing there" in record.message for record in caplog.records)


def test_an_init_that_fails_and_a_missing_package_track_nothing(
    batch: ReportedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**_: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(wandb, "init", init)
    tracker = attach()
    tracker.log(batch, step=1)
    tracker.close()
    assert "W&B is not available" in caplog.text
    assert "no network" in caplog.text
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    tracker = attach()
    tracker.log(batch, step=1)
    tracker.close()
    assert "ModuleNotFoundError" in caplog.text or "ImportError" in caplog.text


def test_joining_what_exists_starts_and_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "wandb")
    attach_existing().log_table(["a"], [[1]])
    assert "wandb" not in sys.modules
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(run=None))
    attach_existing().close()
