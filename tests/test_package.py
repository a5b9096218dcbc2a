"""The package as a user installs it, and the rules that keep its parts apart."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("rollout", "envs", "integrations")
SOURCES = [path for part in (*PARTS, "src/makespan") for path in sorted((ROOT / part).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
    return names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # setuptools would pack files that are long gone from here
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = directory.glob("makespan-*.whl")
    return built


def test_the_wheel_installs_and_imports_from_anywhere(wheel, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    program = (
        "import makespan, makespan.rollout.engine, makespan.envs.client, makespan.integrations.models, makespan.cli;"
        "from importlib.metadata import entry_points;"
        "print(makespan.__file__); print(makespan.rollout.engine.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=tmp_path, env=environment
    ).stdout
    assert all(line.startswith(str(target)) for line in output.splitlines())


def test_the_wheel_carries_every_source_and_data_file_once(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    for part in PARTS:
        for path in (ROOT / part).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".yaml", ".txt"):
                assert f"makespan/{path.relative_to(ROOT)}" in names
    assert "makespan/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "rollout/", "envs/"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_parts_are_imported_through_the_package_and_in_one_direction(path):
    names = imported(path)
    assert not {name for name in names if name.split(".")[0] in PARTS}, "would load the same file a second time"
    forbidden: tuple[str, ...] = {
        "rollout": ("makespan.envs", "makespan.integrations", "makespan.commands", "makespan.cli"),
        "envs": ("makespan.integrations", "makespan.commands", "makespan.cli"),
        "integrations": ("makespan.commands", "makespan.cli"),
    }.get(path.relative_to(ROOT).parts[0], ())
    assert not {name for name in names if name.startswith(tuple(forbidden))}


def test_importing_the_engine_imports_no_heavy_library():
    program = (
        "import sys, makespan.rollout.engine, makespan.rollout.replicas.vllm, makespan.rollout.config;"
        "heavy = {'vllm', 'verl', 'ray', 'wandb', 'zmq', 'torch', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_command_line_starts_quickly_without_any_heavy_library():
    program = (
        "import sys, makespan.cli; makespan.cli.parser();"
        "assert not {'vllm', 'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
