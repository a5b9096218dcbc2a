from __future__ import annotations

import math
import random
import time

import pytest

from makespan.envs.bfcl.apis import ApiSession
from makespan.envs.bfcl.calls import Call
from makespan.envs.bfcl.data import Scenario, scenario, tasks
from makespan.envs.bfcl.limits import path_chars

HUGE = 9 * 10**18


@pytest.fixture
def session() -> ApiSession:
    base = scenario(tasks("multi_turn_base", 1)[0])
    both = Scenario(
        task_id=base.task_id,
        category=base.category,
        classes=("MathAPI", "GorillaFileSystem"),
        initial_config={},
        user_turns=(),
        held_out={},
        ground_truth=(),
    )
    return ApiSession(both)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (Call("power", (10, HUGE)), "too large"),
        (Call("power", (10, 20_000)), "too large"),
        (Call("power", (HUGE, 10_000)), "too large"),
        (Call("power", (1.5, HUGE)), "out of range"),
        (Call("round_number", (5, -HUGE)), "at least -1000"),
        (Call("square_root", (2, HUGE)), "at most 1000"),
        (Call("square_root", (2, float("nan"))), "at most 1000"),
        (Call("square_root", (2, "5")), "at most 1000"),
        (Call("logarithm", (10, 2, HUGE)), "at most 1000"),
        (Call("logarithm", (10, 2, 1e300)), "at most 1000"),
        (Call("logarithm", (10, 2, "1000000000")), "at most 1000"),
        (Call("logarithm", ("1e999999999", 2, 5)), "value must be a number"),
        (Call("logarithm", (10, "1e-999999999", 5)), "base must be a number"),
        (Call("logarithm", ((0, 5, HUGE, 3), 2, 5)), "value must be a number"),
    ],
)
def test_a_computation_without_bound_is_an_error_of_the_call(session: ApiSession, call: Call, answer: str) -> None:
    started = time.perf_counter()
    response = session.execute(call)
    assert response.startswith("Error during execution: ")
    assert answer in response
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (Call("power", (2, 10)), '{"result": 1024}'),
        (Call("power", (10, 4299)), '{"result": 1' + "0" * 4299 + "}"),  # the largest that Python prints
        (Call("power", (-1, HUGE)), '{"result": 1}'),
        (Call("power", (2, -HUGE)), '{"result": 0.0}'),
        (Call("power", (4, 0.5)), '{"result": 2.0}'),
        (Call("round_number", (1234, -2)), '{"result": 1200}'),
        (Call("round_number", (2.5,)), '{"result": 2.0}'),
        (Call("square_root", (2, 5)), "{'result': Decimal('1.4142')}"),
        (Call("logarithm", (8, 2, 5)), "{'result': mpf('3.0')}"),
        (Call("logarithm", ("8", " 2.0 ", 5)), "{'result': mpf('3.0')}"),
    ],
)
def test_an_ordinary_computation_is_done(session: ApiSession, call: Call, answer: str) -> None:
    assert session.execute(call) == answer


def test_a_tree_with_exponentially_many_paths_is_not_walked(session: ApiSession) -> None:
    session.execute(Call("mkdir", ("a",)))
    assert "Error" not in session.execute(Call("find"))  # the walk as such works
    for _ in range(60):  # 2**60 paths to the innermost directory
        for call in [
            Call("mkdir", ("both",)),
            Call("cp", ("a", "copy")),
            Call("mv", ("a", "both")),
            Call("mv", ("copy", "both")),
            Call("mv", ("both", "a")),
        ]:
            assert "rror" not in session.execute(call)
    started = time.perf_counter()
    for walk in [Call("find"), Call("du"), Call("find", ("/a", "x"))]:
        assert session.execute(walk) == "Error during execution: the directory tree is too large to be walked"
    assert time.perf_counter() - started < 5


def test_a_directory_copied_into_itself_is_not_walked(session: ApiSession) -> None:
    session.execute(Call("mkdir", ("a",)))
    session.execute(Call("cp", ("a", "a")))
    assert session.execute(Call("find")) == "Error during execution: the directory tree is too large to be walked"
    session.execute(Call("cd", ("a",)))
    assert "too large" in session.execute(Call("du"))


class File:
    pass


class Directory:
    def __init__(self, **contents: Directory | File) -> None:
        self.contents = contents


def test_path_chars_are_those_of_a_walk() -> None:
    leaf = Directory(ab=File())  # "/ab": 3
    assert path_chars(leaf) == 3
    tree = Directory(x=leaf, yy=leaf)  # "/x" 2, "/x/ab" 5, "/yy" 3, "/yy/ab" 6
    assert path_chars(tree) == 16
    loop = Directory(a=tree)
    tree.contents["loop"] = loop
    assert path_chars(loop) == math.inf
    assert path_chars(Directory()) == 0


def test_path_chars_agree_with_walking_random_trees_with_shared_directories() -> None:
    def walk(directory: Directory, prefix: str) -> int:
        chars = 0
        for name, child in directory.contents.items():
            path = f"{prefix}/{name}"
            chars += len(path) + (walk(child, path) if isinstance(child, Directory) else 0)
        return chars

    rng = random.Random(5)
    for _ in range(50):
        directories = [Directory()]
        for _ in range(12):
            chosen = rng.choices(directories, k=rng.randrange(4))
            directories.append(Directory(file=File(), **{"n" * (i + 1): child for i, child in enumerate(chosen)}))
        assert path_chars(directories[-1]) == walk(directories[-1], "")
