"""The tasks of a run, and the scripts that solve them, from a benchmark's data or from a file."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.config import EnvironmentConfig, RunConfig
from makespan.rollout.errors import ConfigError, FormatError
from makespan.rollout.trajectory import Task

Scripts = dict[str, tuple[str, ...]]


class TaskLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a task file."""

    task_id: str
    payload: dict[str, Any] = {}
    script: tuple[str, ...] | None = None


def load_tasks(config: RunConfig) -> tuple[list[Task], Scripts]:
    """The first `config.tasks` tasks, and the scripts of those that have one.

    Raises `ConfigError` when there are fewer, or when the actions are to be scripted and a task has no script.
    """
    environment = config.environment
    tasks, scripts = _from_file(environment) if environment.tasks_file else _from_benchmark(config)
    if len(tasks) < config.tasks:
        raise ConfigError(f"tasks: {config.tasks} were asked for, and there are {len(tasks)}")
    tasks = tasks[: config.tasks]
    if config.actions == "script":
        missing = [task.task_id for task in tasks if task.task_id not in scripts]
        if missing:
            raise ConfigError(f"actions: 'script' needs a script for each task, and {missing[0]!r} has none")
    return tasks, scripts


def _from_benchmark(config: RunConfig) -> tuple[list[Task], Scripts]:
    name, category = config.environment.name, config.environment.category
    if name != "bfcl":
        raise ConfigError(
            f"environment.tasks_file: environment {name!r} has no tasks of its own, so name a file of them"
        )
    from makespan.envs import bfcl

    if category not in bfcl.CATEGORIES:
        known = ", ".join(bfcl.CATEGORIES)
        raise ConfigError(f"environment.category: {category!r} is not a category of bfcl (known: {known})")
    tasks = list(bfcl.tasks(category, config.tasks))
    return tasks, {task.task_id: bfcl.script(task) for task in tasks}


def _from_file(environment: EnvironmentConfig) -> tuple[list[Task], Scripts]:
    path = Path(str(environment.tasks_file))
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(f"environment.tasks_file: cannot read {str(path)!r}: {error.strerror}") from error
    tasks, scripts = [], Scripts()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = msgspec.json.decode(line, type=TaskLine)
        except msgspec.MsgspecError as error:
            raise FormatError(f"{path}, line {number}: {error}") from error
        tasks.append(Task(task_id=entry.task_id, environment=environment.name, payload=entry.payload))
        if entry.script is not None:
            scripts[entry.task_id] = entry.script
    if len({task.task_id for task in tasks}) < len(tasks):
        raise FormatError(f"{path}: a task_id stands more than once")
    return tasks, scripts
