"""The README's table is what the files beside it say, and `benchmarks/ablation.py --from` makes it of them."""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "docs").glob("ablation-epyc-[3-9].json"))
ROWS = {
    "short function calls": "bfcl",
    "search": "search",
    "turns that differ moderately": "lognormal-0.5",
    "turns that differ much": "lognormal-1",
    "recorded sessions, scarce memory": "sessions",
    "repository repair, scarce memory": "long swe",
    "very unequal chains, scarce memory": "long lognormal-1.5-cap100",
    "recorded sessions cut at 60 turns, scarce memory": "long capped sessions",
    "search, scarce memory, short contexts": "scarce search",
    "turns that differ moderately, scarce memory, short contexts": "scarce lognormal-0.5",
    "function calls, a slot for all": "slots for all",
}
COLUMNS = ("+parking", "+history", "-parking", "oracle")


def measured() -> dict[str, Any]:
    workloads: dict[str, Any] = {}
    for path in FILES:
        workloads |= json.loads(path.read_text())["workloads"]
    return workloads


def seconds(workload: dict[str, Any], rung: str) -> dict[int, float]:
    return {run["seed"]: run["outcome"]["makespan_s"] for run in workload["runs"] if run["rung"] == rung}


def mean(values: list[float]) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) / math.sqrt(len(values))


def readme_rows() -> dict[str, list[str]]:
    text = (ROOT / "README.md").read_text()
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ") and "±" in line]
    return {cells[0].strip(): [cell.strip(" *") for cell in cells[1:]] for cells in rows}


def figure(cell: str) -> tuple[float, float] | None:
    """(mean, error) of a cell such as `−22 ±8`; what stands in brackets is of older policies."""
    found = re.match(r"([−+]?[\d.]+) ±([\d.]+)", cell)
    return None if found is None else (float(found[1].replace("−", "-")), float(found[2]))


@pytest.mark.parametrize("title", ROWS)
def test_the_readme_says_what_was_measured(title: str) -> None:
    """Makespans paired by seed, worked out here from the single runs."""
    workload = measured()[ROWS[title]]
    ratio, coupled_cell, *cells = readme_rows()[title]
    assert float(ratio) == pytest.approx(workload["environment_to_inference"], abs=0.051)
    coupled = seconds(workload, "coupled")
    assert figure(coupled_cell) == pytest.approx(mean(list(coupled.values())), abs=0.051)
    checked = 0
    for rung, cell in zip(COLUMNS, cells, strict=True):
        if (said := figure(cell)) is not None:
            ours = seconds(workload, rung)
            changes = [100 * (ours[seed] / coupled[seed] - 1) for seed in coupled]
            assert said == pytest.approx(mean(changes), abs=0.51), rung
            checked += 1
    assert checked


def test_every_row_of_the_readme_is_checked() -> None:
    assert set(readme_rows()) == set(ROWS)


def from_files(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "ablation.py"), "--from", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_table_and_figure_are_made_of_the_files(tmp_path: Path) -> None:
    made = from_files(*map(str, FILES), "--figure", str(tmp_path / "ablation.svg"))
    assert made.returncode == 0, made.stderr
    assert "| scarce search | 1.3 | 70.3 ±10.4 |  |  |  | -31 ±1 | -21 ±2 | -33 ±4 |" in made.stdout
    assert "| long swe | 0.8 | 93.5 ±3.6 |" in made.stdout  # of two measurements the last one
    assert (tmp_path / "ablation.svg").read_bytes() == (ROOT / "docs" / "ablation.svg").read_bytes()


@pytest.mark.parametrize("content", ["not JSON", "[]", '{"rows": []}', None])
def test_another_file_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    refused = from_files(str(path))
    assert refused.returncode == 1
    assert f"{path}: not what --json writes" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_files_without_a_workload_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"workloads": {"mine": {}}}')
    refused = from_files(str(path))
    assert refused.returncode == 1
    assert f"{path}: none of this benchmark's workloads is in there" in refused.stderr
