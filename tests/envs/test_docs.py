"""The pages for authors of environments and of clients say what happens: their code runs as printed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_environment_authors_page_works_as_printed(tmp_path: Path) -> None:
    environment, play = blocks("environments.md", "python")
    server_yaml = blocks("environments.md", "yaml")[0]
    _, expected = blocks("environments.md", "console")
    assert len(environment.strip().splitlines()) <= 18  # 15 and two imports
    (tmp_path / "guess.py").write_text(environment)
    (tmp_path / "server.yaml").write_text(server_yaml)
    (tmp_path / "play.py").write_text(play)
    server = subprocess.Popen(
        [sys.executable, "-m", "makespan", "env", "serve", "server.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "."},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        assert run(tmp_path, "play.py", address) == expected.partition("\n")[2]
        assert "guess.step" in run(tmp_path, "-m", "makespan", "env", "status", address)
    finally:
        server.terminate()
        assert server.wait(15.0) == 0


def test_the_settings_that_the_page_shows_are_accepted(tmp_path: Path) -> None:
    import msgspec
    import yaml

    from makespan.envs.config import hosted_environments, parse_config
    from makespan.envs.worker import WorkerConfig

    first, rates, environments, worker = (yaml.safe_load(text) for text in blocks("environments.md", "yaml"))
    environments["environments"]["guess"]["factory"] = "counting"
    config = parse_config(json.dumps({**first, **rates, **environments}))
    assert hosted_environments(config)["guess"].execution == "process"
    assert msgspec.convert(worker, WorkerConfig).environments["guess"].factory == "guess:GuessEnvironment"


def test_a_client_written_from_the_protocol_page_works_as_printed(tmp_path: Path) -> None:
    (program,) = blocks("protocol.md", "python")
    (expected,) = blocks("protocol.md", "console")
    (tmp_path / "by_hand.py").write_text(program)
    config = '{"slots": {"counting.start": 1, "counting.step": 1}}'
    server = subprocess.Popen(
        [sys.executable, "-m", "makespan.envs.server", config], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        assert run(tmp_path, "by_hand.py", address) == expected
    finally:
        server.terminate()
        server.wait(15.0)
