"""Seeded mutations of a task's ground truth, each of which may or may not still solve the task."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable

Turns = list[list[str]]
"""For each user turn the source texts of its calls."""

READ_ONLY = {
    "GorillaFileSystem": "pwd()",
    "MathAPI": "add(a=1, b=2)",
    "MessageAPI": "list_users()",
    "TwitterAPI": "list_all_following()",
    "TicketAPI": "ticket_get_login_status()",
    "TradingBot": "get_current_time()",
    "TravelAPI": "list_all_airports()",
    "VehicleControlAPI": "check_tire_pressure()",
}
"""For each API class a call that changes nothing."""

CHANGES_STATE = {
    "GorillaFileSystem": "touch(file_name='left_behind.txt')",
    "MathAPI": "add(a=1, b=2)",  # has no state to change
    "MessageAPI": "add_contact(user_name='Zoe')",
    "TwitterAPI": "authenticate_twitter(username='nobody', password='x')",  # refused: changes nothing
    "TicketAPI": "ticket_login(username='mallory', password='x')",
    "TradingBot": "add_to_watchlist(stock='ZETA')",
    "TravelAPI": "authenticate_travel('a', 'b', 'c', 'read', 'Mallory', 'Moe')",
    "VehicleControlAPI": "set_navigation(destination='Nowhere')",
}
"""For each API class a call that usually does."""

WRONG = ["no_such_function(x=1)", "_load_scenario()", "{function}()", "{function}(no_such_argument=1)"]


def drop_call(turns: Turns, classes: list[str], rng: random.Random) -> None:
    turn = _turn_with_calls(turns, rng)
    turn.pop(rng.randrange(len(turn)))


def change_argument(turns: Turns, classes: list[str], rng: random.Random) -> None:
    turn = _turn_with_calls(turns, rng)
    index = rng.randrange(len(turn))
    call = ast.parse(turn[index], mode="eval").body
    assert isinstance(call, ast.Call)
    values = [(call.args, i) for i in range(len(call.args))]
    chosen = rng.randrange(len(values) + len(call.keywords)) if values or call.keywords else None
    if chosen is None:
        turn[index] = "pwd()"
    elif chosen < len(values):
        call.args[chosen] = _changed(call.args[chosen])
        turn[index] = ast.unparse(call)
    else:
        keyword = call.keywords[chosen - len(values)]
        keyword.value = _changed(keyword.value)
        turn[index] = ast.unparse(call)


def swap_calls(turns: Turns, classes: list[str], rng: random.Random) -> None:
    turn = _turn_with_calls(turns, rng, at_least=2)
    if len(turn) >= 2:
        a, b = rng.sample(range(len(turn)), 2)
        turn[a], turn[b] = turn[b], turn[a]


def add_harmless_call(turns: Turns, classes: list[str], rng: random.Random) -> None:
    _insert(turns, READ_ONLY[rng.choice(classes)], rng)


def add_harmful_call(turns: Turns, classes: list[str], rng: random.Random) -> None:
    _insert(turns, CHANGES_STATE[rng.choice(classes)], rng)


def add_wrong_call(turns: Turns, classes: list[str], rng: random.Random) -> None:
    function = rng.choice(_turn_with_calls(turns, rng)).partition("(")[0]
    _insert(turns, rng.choice(WRONG).format(function=function), rng)


def repeat_call(turns: Turns, classes: list[str], rng: random.Random) -> None:
    turn = _turn_with_calls(turns, rng)
    index = rng.randrange(len(turn))
    turn.insert(index, turn[index])


def remove_turn(turns: Turns, classes: list[str], rng: random.Random) -> None:
    _turn_with_calls(turns, rng).clear()


def call_in_next_turn(turns: Turns, classes: list[str], rng: random.Random) -> None:
    index = rng.randrange(len(turns) - 1) if len(turns) > 1 else 0
    if turns[index] and len(turns) > 1:
        turns[index + 1].insert(0, turns[index].pop())


def call_in_previous_turn(turns: Turns, classes: list[str], rng: random.Random) -> None:
    index = rng.randrange(len(turns) - 1) if len(turns) > 1 else 0
    if len(turns) > 1 and turns[index + 1]:
        turns[index].append(turns[index + 1].pop(0))


def swap_turns(turns: Turns, classes: list[str], rng: random.Random) -> None:
    if len(turns) > 1:
        index = rng.randrange(len(turns) - 1)
        turns[index], turns[index + 1] = turns[index + 1], turns[index]


MUTATIONS: list[Callable[[Turns, list[str], random.Random], None]] = [
    drop_call,
    change_argument,
    swap_calls,
    add_harmless_call,
    add_harmful_call,
    add_wrong_call,
    repeat_call,
    remove_turn,
    call_in_next_turn,
    call_in_previous_turn,
    swap_turns,
]


def _turn_with_calls(turns: Turns, rng: random.Random, at_least: int = 1) -> list[str]:
    candidates = [turn for turn in turns if len(turn) >= at_least] or [turn for turn in turns if turn]
    return rng.choice(candidates)


def _insert(turns: Turns, call: str, rng: random.Random) -> None:
    turn = _turn_with_calls(turns, rng)
    turn.insert(rng.randrange(len(turn) + 1), call)


def _changed(node: ast.expr) -> ast.expr:
    value = ast.literal_eval(node)
    match value:
        case bool():
            changed: object = not value
        case int() | float():
            changed = value + 1
        case str():
            changed = value + "x"
        case list():
            changed = [*value, "x"]
        case _:
            changed = {"status": "Changed"}
    return ast.parse(repr(changed), mode="eval").body
