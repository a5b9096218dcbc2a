"""What a simulated API must not be asked to do, because it would take the host's time or memory.

The benchmark's classes touch no file and no network, but a few of their functions do work that grows without bound with
the *value* of an argument or with a state that calls have built up. Each gets a guard that runs before the function:

* integer powers and rounding to `10**n` build integers of any size;
* logarithms and square roots take a precision in digits;
* `logarithm` also reads numbers from text, where `'1e999999999'` is a few characters and an endless computation;
* copies in the simulated file system share their subdirectories, so that a few dozen `cp` and `mv` calls make a tree
  with more paths than atoms, which `find` and `du` would walk.

A guard raises `Refused`; the agent sees it as an error of its call, as it would see any other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_DIGITS = 1_000
"""Digits of precision, or zeros to round to: a millisecond of work."""
MAX_POWER_BITS = 30_000
"""Size of an integer power, at most doubled by estimating it from the base's bits. Python prints integers of up to
4,300 digits (14,285 bits), so nothing printable is refused."""
MAX_PATH_CHARS = 1_000_000
"""Length of all paths below a directory taken together; the benchmark's largest tree has a few thousand."""

_PLAIN_DECIMAL = re.compile(r"\s*[+-]?\d{1,20}(\.\d{1,20})?\s*")


class Refused(ValueError):
    """The call would take unbounded time or memory."""


def check(api: Any, function: str, arguments: Mapping[str, Any]) -> None:
    """Raises `Refused` when `function` of the API instance `api` must not run with these arguments."""
    guard = _GUARDS.get((type(api).__name__, function))
    if guard is not None:
        guard(api, arguments)


def _power(api: Any, arguments: Mapping[str, Any]) -> None:
    base, exponent = arguments["base"], arguments["exponent"]
    grows = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if grows and exponent * base.bit_length() > MAX_POWER_BITS:
        raise Refused(f"{base} to the power of {exponent} is too large")


def _round_number(api: Any, arguments: Mapping[str, Any]) -> None:
    places = arguments["decimal_places"]
    if isinstance(places, int) and places < -MAX_DIGITS:
        raise Refused(f"decimal_places is {places}; at least {-MAX_DIGITS} is supported")


def _precision(api: Any, arguments: Mapping[str, Any]) -> None:
    precision = arguments["precision"]
    if not isinstance(precision, int | float) or not precision <= MAX_DIGITS:
        raise Refused(f"precision must be a number of at most {MAX_DIGITS}")


def _logarithm(api: Any, arguments: Mapping[str, Any]) -> None:
    _precision(api, arguments)
    for name in ("value", "base"):
        number = arguments[name]
        plain_text = isinstance(number, str) and _PLAIN_DECIMAL.fullmatch(number)
        if not isinstance(number, int | float) and not plain_text:
            raise Refused(f"{name} must be a number")


def _walk(api: Any, arguments: Mapping[str, Any]) -> None:
    # `find` may start at the root or below the current directory, which may have been removed from the root's tree.
    if max(path_chars(api.root), path_chars(api._current_dir)) > MAX_PATH_CHARS:
        raise Refused("the directory tree is too large to be walked")


_GUARDS: dict[tuple[str, str], Callable[[Any, Mapping[str, Any]], None]] = {
    ("MathAPI", "power"): _power,
    ("MathAPI", "round_number"): _round_number,
    ("MathAPI", "square_root"): _precision,
    ("MathAPI", "logarithm"): _logarithm,
    ("GorillaFileSystem", "find"): _walk,
    ("GorillaFileSystem", "du"): _walk,
}


def path_chars(directory: Any) -> float:
    """Length of all paths below `directory` (a node with `contents`) as a walk would list them; infinite in a cycle.

    Each distinct directory is visited once, however many paths lead to it.
    """
    totals: dict[int, tuple[float, float]] = {}  # by identity: number of paths below, and their characters
    entered: set[int] = set()
    stack = [directory]
    while stack:
        node = stack[-1]
        children = [(len(name) + 1, child) for name, child in node.contents.items()]
        below = [child for _, child in children if hasattr(child, "contents")]
        if id(node) in entered:
            stack.pop()
            totals[id(node)] = _totals(children, totals)
            continue
        entered.add(id(node))
        if any(id(child) in entered and id(child) not in totals for child in below):
            return math.inf
        stack.extend(child for child in below if id(child) not in totals)
    return totals[id(directory)][1]


def _totals(children: list[tuple[int, Any]], totals: Mapping[int, tuple[float, float]]) -> tuple[float, float]:
    paths = chars = 0.0
    for length, child in children:
        paths_below, chars_below = totals.get(id(child), (0.0, 0.0))
        paths += 1 + paths_below
        chars += length * (1 + paths_below) + chars_below
    return paths, chars
