"""What the agent is told: the functions it may call and how, and later the functions that were held out.

The benchmark repeats the description of an API with each of its functions and documents every result; here an API is
described once and results are not, which halves the prompt. A function is one line of JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from makespan.envs.bfcl.data import FunctionDoc, Scenario, function_docs
from makespan.rollout.environment import Message

_INSTRUCTIONS = """\
You help a user by calling functions. To call functions, answer with nothing but a Python list of calls, for example:
[cd(folder='reports'), ls(a=True)]
Arguments are literal values: text in quotes, numbers, True, False, None, lists and dictionaries. You are then shown \
what each call returned and may call again. When the user's request is fulfilled, or cannot be fulfilled with these \
functions or without more information, answer in plain words instead: that ends your turn, and the user goes on.

The functions, one JSON object a line:"""

_OFFER = "These functions are available from now on, too:\n{functions}\nPlease go on with what was missing."

_API_PREFIX_END = " Tool description: "
"""Ends the part of a function's description that describes its API."""


def system_message(scenario: Scenario) -> Message:
    """How to call, and the functions of the scenario that are offered from the start."""
    held_out = {name for names in scenario.held_out.values() for name in names}
    sections = [_INSTRUCTIONS]
    for class_name in scenario.classes:
        docs = function_docs(class_name)
        about = docs[0].description.partition(_API_PREFIX_END)[0]
        lines = "\n".join(_lines(doc for doc in docs if doc.name not in held_out))
        sections.append(f"# {about}\n{lines}")
    return Message(role="system", content="\n".join(sections))


def turn_messages(scenario: Scenario, user_turn: int) -> tuple[Message, ...]:
    """What the user says at the start of a user turn (from 0), including the offer of functions held out until then."""
    names = scenario.held_out.get(user_turn, ())
    if not names:
        return scenario.user_turns[user_turn]
    docs = (doc for class_name in scenario.classes for doc in function_docs(class_name) if doc.name in names)
    offer = Message(role="user", content=_OFFER.format(functions="\n".join(_lines(docs))))
    return (*scenario.user_turns[user_turn], offer)


def _lines(docs: Iterable[FunctionDoc]) -> Iterator[str]:
    for doc in docs:
        description = doc.description.partition(_API_PREFIX_END)[2] or doc.description
        compact = {"name": doc.name, "description": description, "parameters": doc.parameters}
        yield msgspec.json.encode(compact).decode()
