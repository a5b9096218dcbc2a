"""A trajectory's tokens, rebuilt from what the environment noted down, without any of the code under test.

The test model's tokens are words, so a text has exactly one sequence of ids. Uses the vocabulary file and nothing else:
not transformers, not verl's token builder, not makespan.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Prompt ids, response ids, mask."""


class Words:
    def __init__(self, model: Path) -> None:
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        self._ids: dict[str, int] = tokenizer["model"]["vocab"]
        self._unknown = self._ids["<|unknown|>"]
        self.end = self._ids["<|im_end|>"]

    def ids(self, text: str) -> list[int]:
        return [self._ids.get(word, self._unknown) for word in text.split()]

    def message(self, role: str, content: str) -> list[int]:
        return self.ids(f"<|im_start|> {role} {content} <|im_end|>")


def rebuild(record: dict[str, Any], words: Words, *, max_turn_tokens: int, max_turns: int) -> Row:
    """The training row of one environment session."""
    opening = words.ids("<|im_start|> assistant")
    prompt = [i for role, content in record["first"] for i in words.message(role, content)] + opening
    response: list[int] = []
    mask: list[int] = []
    for number, turn in enumerate(record["turns"], start=1):
        said = words.ids(turn["action"])
        cut = len(said) == max_turn_tokens
        response += said
        mask += [1] * len(said)
        if not cut:  # the model ended its turn itself, and that token is its own
            response.append(words.end)
            mask.append(1)
        if turn["terminated"] or number == max_turns:
            break
        told = [words.end] if cut else []
        told += [i for role, content in turn["observation"] for i in words.message(role, content)] + opening
        response += told
        mask += [0] * len(told)
    return tuple(prompt), tuple(response), tuple(mask)
