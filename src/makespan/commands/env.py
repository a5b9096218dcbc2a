"""`makespan env serve` and `makespan env status`: environment servers of their own, apart from a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from makespan.commands.output import check_output, write_json
from makespan.envs import client, server, worker_process
from makespan.envs.config import ServerConfig, WorkerConfig, hosted_environments
from makespan.rollout.errors import ConfigError
from makespan.rollout.yaml_document import NOT_YAML, parse_yaml

Config = TypeVar("Config")


def _read(path: Path) -> Any:
    try:
        return parse_yaml(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {str(path)!r}: {error.strerror}") from error
    except NOT_YAML as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error


def _parsed(path: Path, kind: type[Config]) -> Config:
    try:
        parsed = msgspec.convert(_read(path), kind)
        msgspec.json.encode(parsed)  # the form in which the server's processes get it
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return parsed


def serve(path: Path) -> int:
    """Serve what a YAML file describes, until SIGTERM or Ctrl-C."""
    parsed = _parsed(path, ServerConfig)
    hosted_environments(parsed)
    return server.serve(parsed)


def worker(path: Path) -> int:
    """Host environments for a broker that runs elsewhere, until SIGTERM or Ctrl-C."""
    return worker_process.serve_worker(_parsed(path, WorkerConfig))


def status(console: Console, address: str, timeout_s: float, json_path: str | None) -> int:
    """Ask a server how it is."""
    check_output("--json", json_path)
    reply = asyncio.run(client.status(address, timeout_s))
    write_json(json_path, msgspec.to_builtins(reply))
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
