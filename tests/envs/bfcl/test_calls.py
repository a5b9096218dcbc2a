from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makespan.envs.bfcl.calls import MAX_ACTION_CHARS, MAX_CALLS, Call, Malformed, parse_action


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[cd(folder='x'), ls()]", [Call("cd", (), {"folder": "x"}), Call("ls")]),
        ("ls()", [Call("ls")]),
        ("cd('a'), ls(a=True)", [Call("cd", ("a",)), Call("ls", (), {"a": True})]),
        ("  \n[ls()]\n ", [Call("ls")]),
        ("[ls(),]", [Call("ls")]),
        ("```python\n[ls()]\n```", [Call("ls")]),
        ("```\nls()\n```", [Call("ls")]),
        ("`ls()`", [Call("ls")]),
        ("[\n  f(\n    x=-1.5,\n  ),\n]", [Call("f", (), {"x": -1.5})]),
        ("[f(x=[1, (2, None), {'k': False}])]", [Call("f", (), {"x": [1, (2, None), {"k": False}]})]),
        ("[f('a' 'b', +3, 1e3)]", [Call("f", ("ab", 3, 1000.0))]),
        ("[f(x='not [a(call)] inside')]", [Call("f", (), {"x": "not [a(call)] inside"})]),
        (f"[f({2**63 - 1}, -{2**63 - 1})]", [Call("f", (2**63 - 1, -(2**63 - 1)))]),
    ],
)
def test_a_list_of_calls_is_read(text: str, calls: list[Call]) -> None:
    assert parse_action(text) == tuple(calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "[]",
        "Done.",
        "I listed the files (there are two).",
        "The next call would be [cd(folder='x')].",
        "Sure: ls()",
        "(cd('x'))",
        "{'name': 'cd'}",
        "A" * 10 * MAX_ACTION_CHARS,
        "\ud800",
    ],
)
def test_a_text_that_does_not_look_like_calls_is_no_call(text: str) -> None:
    assert parse_action(text) == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[cd(folder='x'", "was never closed"),
        ("[cd(folder='x')", "was never closed"),
        ("[cd('x')] then [ls()]", "not a Python list of calls"),
        ("[cd('x')] and then [ls()]", "item 1 is not a call"),
        ("cd('x')\nls()", "not a Python list of calls"),
        ("[1]", "item 1 is not a call"),
        ("[ls(), 'cd']", "item 2 is not a call"),
        ("[note] all done", "not a Python list of calls"),
        ("[ls() for x in [1]]", "item 1 is not a call"),
        ("[*ls()]", "item 1 is not a call"),
        ("[fs.cd('x')]", "item 1 calls something that is not a plain function name"),
        ("fs.cd('x')", "not a plain function name"),
        ("[f()()]", "not a plain function name"),
        ("[(lambda: 1)()]", "not a plain function name"),
        ("[cd(folder=home)]", "argument 'folder' of cd is not a literal value (Name)"),
        ("[cd(f'{1}')]", "argument 1 of cd is not a literal value (JoinedStr)"),
        ("[cd(pwd())]", "not a literal value (Call)"),
        ("[cd([x for x in 'ab'])]", "not a literal value (ListComp)"),
        ("[cd(*['a'])]", "not a literal value (Starred)"),
        ("[cd(**{'folder': 'a'})]", "`**`"),
        ("[cd({**{}})]", "dictionary key"),
        ("[cd({[]: 1})]", "dictionary key"),
        ("[cd(b'a')]", "not a literal value (Constant)"),
        ("[cd(1j)]", "not a literal value (Constant)"),
        ("[cd(...)]", "not a literal value (Constant)"),
        ("[cd({1})]", "not a literal value (Set)"),
        ("[f(10**10**10)]", "not a literal value (BinOp)"),
        ("[f(not True)]", "not a literal value (UnaryOp)"),
        ("[f(-True)]", "sign before a truth value"),
        ("[ls(a=true)]", "`true`; in Python it is `True`"),
        ("[cd(folder='a', folder='b')]", "'folder' of cd is given twice"),
        (f"[f({2**63})]", "beyond 64 bits"),
        (f"[f(x=-{2**63})]", "beyond 64 bits"),
        (f"[f(0x{'f' * 1000})]", "beyond 64 bits"),
        (f"[f({'9' * 5000})]", "not a Python list of calls"),
        (f"[f({'[' * 9}{']' * 9})]", "nested more than 8 levels"),
        (f"[{'f(),' * (MAX_CALLS + 1)}]", "65 calls in one action, the limit is 64"),
        (f"[f('{'a' * MAX_ACTION_CHARS}')]", "32,775 characters, the limit is 32,768"),
        ("[f('\0')]", "not a Python list of calls"),
        ("[f('\ud800')]", "unreadable characters"),
        ("[f(x='a'", "never closed"),
    ],
)
def test_what_looks_like_calls_but_is_not_readable_is_malformed(text: str, reason: str) -> None:
    parsed = parse_action(text)
    assert isinstance(parsed, Malformed)
    assert reason in parsed.reason


def test_text_built_to_break_a_parser_is_malformed_at_once() -> None:
    n = MAX_ACTION_CHARS - 100
    hostile = [
        "[" * n,
        "f(" * (n // 2),
        f"f({'-' * n}1)",
        f"f({'~' * n}1)",
        f"f({'not ' * (n // 4)}1)",
        f"f({'lambda:' * (n // 7)}1)",
        f"f({'1 if 1 else ' * (n // 12)}1)",
        f"f({'1**' * (n // 3)}1)",
        f"f({'1+' * (n // 2)}1)",
        f"f({'1<' * (n // 2)}1)",
        f"f{'.a' * (n // 2)}()",
        f"f{'()' * (n // 2)}",
        f"[f{'[0]' * (n // 4)}]",
        f"f({'{1:' * (n // 3)}",
        f"f({'(a:=' * (n // 4)}",
        "f(f'" + "{" * n + "')",
        f"f({'x for x in y ' * (n // 13)})",
    ]
    started = time.perf_counter()
    assert [text[:20] for text in hostile if not isinstance(parse_action(text), Malformed)] == []
    assert time.perf_counter() - started < 5


LITERALS: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63 - 1), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(args=st.lists(LITERALS, max_size=3), kwargs=st.dictionaries(st.sampled_from(["a", "b", "c"]), LITERALS))
def test_any_literal_arguments_survive_the_way_through_text(args: list[Any], kwargs: dict[str, Any]) -> None:
    arguments = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
    assert parse_action(f"[f({arguments})]") == (Call("f", tuple(args), kwargs),)


PIECES = [
    "[",
    "]",
    "(",
    ")",
    "cd",
    "ls",
    "x",
    "=",
    ",",
    "'",
    '"',
    "1",
    "-",
    ".",
    "\\",
    "\n",
    " ",
    "{",
    ":",
    "**",
    "f'",
    "\0",
]


@settings(deadline=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=30).map("".join))
def test_any_text_is_calls_no_call_or_malformed(text: str) -> None:
    parsed = parse_action(text)
    assert isinstance(parsed, Malformed) or all(isinstance(call, Call) for call in parsed)
