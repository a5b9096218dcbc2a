"""The benchmark's multi-turn tasks, read from the files of the installed `bfcl-eval` wheel.

A *scenario* is one task of the Berkeley Function-Calling Leaderboard: what the simulated user says in each user turn,
the API classes involved with their initial state, and the ground truth, a list of calls for each user turn. There are
four categories of 200 tasks. `multi_turn_base` is plain; in `multi_turn_miss_func` some functions are held out until a
later user turn that does nothing but offer them; in `multi_turn_miss_param` the user withholds an argument for a turn;
in `multi_turn_long_context` the APIs answer with long results.

The wheel pins old versions of many packages that these tasks do not need, so it is installed without its dependencies
and only its data files and API classes are used. A category's files are read once a process, when first asked for.
"""

from __future__ import annotations

import importlib
import importlib.resources
from functools import cache
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

import msgspec

from makespan.rollout.environment import Message, TaskRefused
from makespan.rollout.errors import ConfigError, FormatError, nearest
from makespan.rollout.trajectory import Task

ENVIRONMENT_NAME = "bfcl"
"""What `Task.environment` says."""

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")

_CLASS_FILES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""Where each API class lives in the wheel: the stem of its module and of the file that documents its functions."""

_API_PACKAGE = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"


class BfclNotInstalled(TaskRefused):
    """The benchmark's wheel, or the one package its API classes need, is missing or has other contents."""

    def __init__(self, seen: str) -> None:
        super().__init__(
            f"the BFCL tasks are not available: {seen}; install the extra `makespan[bfcl]` "
            "(or `pip install --no-deps bfcl-eval==2026.3.23` and `pip install mpmath`)"
        )


class FunctionDoc(msgspec.Struct, frozen=True):
    """What the benchmark tells a model about one function; `parameters` is JSON schema with BFCL's type names."""

    name: str
    description: str
    parameters: dict[str, Any]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One task of the benchmark.

    `initial_config` is shared by every session of the task: copy before handing it to anything that may change it.
    """

    task_id: str
    category: str
    classes: tuple[str, ...]
    """Names of the API classes involved; where two share a function's name the later class has it."""
    initial_config: dict[str, Any]
    """Initial state by class name; a class without an entry starts in its default state."""
    user_turns: tuple[tuple[Message, ...], ...]
    """What the user says in each user turn; nothing in the turn that offers held-out functions."""
    held_out: dict[int, tuple[str, ...]]
    """Names of the functions that are first offered in this user turn."""
    ground_truth: tuple[tuple[str, ...], ...]
    """Source text of the calls that solve each user turn, in order."""

    @property
    def long_context(self) -> bool:
        return self.category == "multi_turn_long_context"


class _Entry(msgspec.Struct, frozen=True):
    id: str
    question: tuple[tuple[Message, ...], ...]
    initial_config: dict[str, Any]
    involved_classes: tuple[str, ...]
    missed_function: dict[str, tuple[str, ...]] = {}


class _Answer(msgspec.Struct, frozen=True):
    id: str
    ground_truth: tuple[tuple[str, ...], ...]


_Line = TypeVar("_Line", FunctionDoc, _Entry, _Answer)


def tasks(category: str, count: int | None = None, start: int = 0) -> tuple[Task, ...]:
    """`count` tasks of a category (all that follow when None), from number `start` on, in the benchmark's order.

    Raises `ConfigError` for an unknown category or a range outside it, `BfclNotInstalled` without the wheel.
    """
    names = tuple(_category(category))
    if not 0 <= start < len(names):
        raise ConfigError(f"start is {start}; {category} has tasks 0 to {len(names) - 1}")
    available = len(names) - start
    if count is not None and not 1 <= count <= available:
        raise ConfigError(f"count is {count}; {category} has 1 to {available} tasks from task {start} on")
    chosen = names[start:] if count is None else names[start : start + count]
    return tuple(Task(task_id=name, environment=ENVIRONMENT_NAME, payload={"category": category}) for name in chosen)


def scenario(task: Task) -> Scenario:
    """The scenario that a task names; raises `TaskRefused` when there is none."""
    category = task.payload.get("category", task.task_id.rpartition("_")[0])
    if category not in CATEGORIES:
        known = nearest(str(category), CATEGORIES)
        raise TaskRefused(f"task {task.task_id!r} is of category {category!r}, which BFCL multi-turn has not{known}")
    scenarios = _category(category)
    if task.task_id not in scenarios:
        last = len(scenarios) - 1
        raise TaskRefused(f"no task {task.task_id!r} in {category}: its tasks are {category}_0 to {category}_{last}")
    return scenarios[task.task_id]


@cache
def function_docs(class_name: str) -> tuple[FunctionDoc, ...]:
    """The documented functions of an API class, in the benchmark's order."""
    lines = _lines("multi_turn_func_doc", f"{_class_file(class_name)}.json")
    return tuple(_decode(line, FunctionDoc) for line in lines)


def api_class(class_name: str) -> type[Any]:
    """The benchmark's implementation of an API, imported when first asked for."""
    try:
        module = importlib.import_module(f"{_API_PACKAGE}.{_class_file(class_name)}")
    except ModuleNotFoundError as exc:
        raise BfclNotInstalled(f"module {exc.name!r} is missing") from exc
    implementation: type[Any] = getattr(module, class_name)
    return implementation


@cache
def _category(category: str) -> dict[str, Scenario]:
    """All scenarios of a category by task id."""
    if category not in CATEGORIES:
        raise ConfigError(f"unknown BFCL category {category!r}{nearest(category, CATEGORIES)}")
    file = f"BFCL_v4_{category}.json"
    answers = (_decode(line, _Answer) for line in _lines("possible_answer", file))
    truths = {answer.id: answer.ground_truth for answer in answers}
    return {entry.id: _scenario(category, entry, truths) for entry in (_decode(line, _Entry) for line in _lines(file))}


def _scenario(category: str, entry: _Entry, truths: dict[str, tuple[tuple[str, ...], ...]]) -> Scenario:
    truth = truths.get(entry.id, ())
    if len(truth) != len(entry.question):
        raise FormatError(f"{entry.id}: {len(entry.question)} user turns but ground truth for {len(truth)}")
    return Scenario(
        task_id=entry.id,
        category=category,
        classes=entry.involved_classes,
        initial_config=entry.initial_config,
        user_turns=entry.question,
        held_out={int(turn): names for turn, names in entry.missed_function.items()},
        ground_truth=truth,
    )


def _class_file(class_name: str) -> str:
    if class_name not in _CLASS_FILES:
        raise FormatError(f"unknown BFCL API class {class_name!r}{nearest(class_name, _CLASS_FILES)}")
    return _CLASS_FILES[class_name]


def _lines(*path: str) -> list[bytes]:
    """The JSON lines of one of the wheel's data files."""
    try:
        file: Traversable = importlib.resources.files("bfcl_eval").joinpath("data", *path)
        return file.read_bytes().splitlines()
    except ModuleNotFoundError as exc:
        raise BfclNotInstalled(f"module {exc.name!r} is missing") from exc
    except FileNotFoundError as exc:
        raise BfclNotInstalled(f"the installed bfcl-eval has no data file {'/'.join(path)}") from exc


def _decode(line: bytes, kind: type[_Line]) -> _Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as exc:
        raise FormatError(f"a line of the BFCL data is no {kind.__name__.lstrip('_')}: {exc}") from exc
