"""From the text a model generated to the calls it means, without evaluating any of it.

An action is a Python list of calls, such as `[cd(folder='documents'), ls()]`. It is parsed with `ast` and read as data:
a function is a plain name, an argument a literal (text, number, `True`, `False`, `None`, or lists, tuples and
dictionaries of those). Three things can come of a text:

* *calls*, to be executed in order;
* *no call*: the text does not look like calls at all, or is an empty list. It ends the user turn;
* *malformed*: it looks like calls but is not readable as such. Nothing of it is executed.

A text looks like calls when it begins with `[` or with a name directly followed by `(`, after white space and a
Markdown code fence are taken off. Prose that only mentions a call is prose.

The text may be hostile. The limits below keep the parser, and what gets its arguments, within bounds; all of them are
far above what the benchmark's ground truth needs.
"""

from __future__ import annotations

import ast
import re
import threading
from typing import Any

import msgspec

MAX_ACTION_CHARS = 32_768
MAX_CALLS = 64
MAX_NESTING = 8
"""Levels of lists, tuples and dictionaries inside one argument."""
MAX_INTEGER = 2**63 - 1
"""Largest magnitude of an integer: what JSON readers agree on, and too small to be a computation by itself."""

_one_parse_at_a_time = threading.Lock()
"""CPython 3.11 keeps one recursion count for all threads that build syntax trees (its issue 106905); parsing at the
same time may raise `SystemError: AST constructor recursion depth mismatch`."""

_LOOKS_LIKE_CALLS = re.compile(r"\[|[A-Za-z_][\w.]*\(")
_FENCE_LANGUAGE = re.compile(r"\A(?:python|py)\s*\n")
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}


class Call(msgspec.Struct, frozen=True):
    """One function call with literal arguments."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class Malformed(msgspec.Struct, frozen=True):
    """A text that looks like calls but cannot be read; `reason` says what is wrong with it."""

    reason: str


class _NotLiteral(Exception):
    pass


def parse_action(text: str) -> tuple[Call, ...] | Malformed:
    """What a generated text means: its calls, none of them (an empty tuple), or `Malformed`."""
    text = _FENCE_LANGUAGE.sub("", text.strip().strip("`")).strip()
    if not _LOOKS_LIKE_CALLS.match(text):
        return ()
    if len(text) > MAX_ACTION_CHARS:
        return Malformed(f"{len(text):,} characters, the limit is {MAX_ACTION_CHARS:,}")
    try:
        with _one_parse_at_a_time:
            expression = ast.parse(text, filename="action", mode="eval").body
    except SyntaxError as exc:
        return Malformed(f"not a Python list of calls: {exc.msg} (line {exc.lineno}, column {exc.offset})")
    except (ValueError, RecursionError, MemoryError):  # null bytes and lone surrogates; nested too deeply (twice)
        return Malformed("not a Python list of calls: unreadable characters or too deeply nested")
    elements = expression.elts if isinstance(expression, ast.List | ast.Tuple) else [expression]
    if len(elements) > MAX_CALLS:
        return Malformed(f"{len(elements)} calls in one action, the limit is {MAX_CALLS}")
    try:
        return tuple(_call(element, position) for position, element in enumerate(elements, start=1))
    except _NotLiteral as exc:
        return Malformed(str(exc))


def _call(node: ast.expr, position: int) -> Call:
    if not isinstance(node, ast.Call):
        raise _NotLiteral(f"item {position} is not a call")
    if not isinstance(node.func, ast.Name):
        raise _NotLiteral(f"item {position} calls something that is not a plain function name")
    name = node.func.id
    args = tuple(_literal(arg, f"argument {index} of {name}") for index, arg in enumerate(node.args, start=1))
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _NotLiteral(f"{name} is called with `**`; name each argument")
        if keyword.arg in kwargs:
            raise _NotLiteral(f"argument {keyword.arg!r} of {name} is given twice")
        kwargs[keyword.arg] = _literal(keyword.value, f"argument {keyword.arg!r} of {name}")
    return Call(name=name, args=args, kwargs=kwargs)


def _literal(node: ast.expr, where: str, depth: int = 0) -> Any:
    """The value of a literal; raises `_NotLiteral` for anything else."""
    if depth == MAX_NESTING and isinstance(node, ast.List | ast.Tuple | ast.Dict):
        raise _NotLiteral(f"{where} is nested more than {MAX_NESTING} levels deep")
    match node:
        case ast.Constant(value=str() | bool() | None | float()):
            return node.value
        case ast.Constant(value=int(number)):
            return _bounded(number, where)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=ast.Constant(value=int() | float() as number)):
            if isinstance(number, bool):
                raise _NotLiteral(f"{where} has a sign before a truth value")
            return -_bounded(number, where) if isinstance(node.op, ast.USub) else _bounded(number, where)
        case ast.List():
            return [_literal(item, where, depth + 1) for item in node.elts]
        case ast.Tuple():
            return tuple(_literal(item, where, depth + 1) for item in node.elts)
        case ast.Dict():
            return _dictionary(node, where, depth)
        case ast.Name(id=word) if word in _JSON_WORDS:
            raise _NotLiteral(f"{where} is `{word}`; in Python it is `{_JSON_WORDS[word]}`")
    raise _NotLiteral(f"{where} is not a literal value ({type(node).__name__})")


def _dictionary(node: ast.Dict, where: str, depth: int) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        if not isinstance(key, ast.Constant):
            raise _NotLiteral(f"{where} has a dictionary key that is not a plain value")
        result[_literal(key, where, depth + 1)] = _literal(value, where, depth + 1)
    return result


def _bounded(number: int | float, where: str) -> int | float:
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise _NotLiteral(f"{where} is an integer beyond 64 bits")
    return number
