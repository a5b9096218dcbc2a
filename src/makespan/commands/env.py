"""`makespan env serve` and `makespan env status`: environment servers of their own, apart from a run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from makespan.envs import client, server, worker_process
from makespan.envs.config import hosted_environments, parse_config
from makespan.envs.registry import resolve
from makespan.envs.worker import WorkerConfig
from makespan.rollout.errors import ConfigError


def _read(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error


def serve(path: Path) -> int:
    """Serve what a YAML file describes, until SIGTERM or Ctrl-C."""
    parsed = parse_config(msgspec.json.encode(_read(path)).decode())
    hosted_environments(parsed)
    return server.serve(parsed)


def worker(path: Path) -> int:
    """Host environments for a broker that runs elsewhere, until SIGTERM or Ctrl-C."""
    try:
        parsed = msgspec.convert(_read(path), WorkerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    for name, environment in parsed.environments.items():
        resolve(environment.factory or name)
    return worker_process.serve_worker(parsed)


def status(console: Console, address: str, timeout_s: float, json_path: str | None) -> int:
    """Ask a server how it is."""
    reply = asyncio.run(client.status(address, timeout_s))
    if json_path is not None:
        encoded = msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(reply)), indent=2).decode() + "\n"
        if json_path == "-":
            sys.stdout.write(encoded)
            return 0
        Path(json_path).write_text(encoded)
    document = msgspec.to_builtins(reply)
    table = Table(title=f"environment server at {address}", title_justify="left")
    columns = list(next(iter(document["slots"].values()), {}))
    table.add_column("slot class", no_wrap=True)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for name, slot in document["slots"].items():
        table.add_row(name, *(_cell(slot[column]) for column in columns))
    console.print(table)
    for name, value in document.items():
        if name not in ("slots", "workers", "counters", "type", "id", "v"):
            console.print(f"{name.replace('_', ' ')}: {_cell(value)}", soft_wrap=True)
    for worker in document["workers"]:
        console.print("worker: " + ", ".join(f"{k} {_cell(v)}" for k, v in worker.items()), soft_wrap=True)
    console.print(
        "counters: " + (", ".join(f"{k} {v}" for k, v in document["counters"].items()) or "none"), soft_wrap=True
    )
    return 0


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
