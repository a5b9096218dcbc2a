"""Token sequences of which only the length is known.

A simulation computes with thousands of contexts of a hundred thousand tokens; which tokens they are does not matter to
it. `CountedTokens` stands wherever the engine expects a sequence of token ids: it has a length, can be extended, and
costs the same whatever its length. Each of its tokens reads as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import Any


class CountedTokens(MutableSequence[int]):
    """`length` tokens, of which at most the last `limit` are kept.

    A limit models a harness that cuts its history when the context is full: `dropped` counts what fell off the front,
    so that `dropped + len(tokens)` is the position of the end among all tokens that ever stood here.
    """

    __slots__ = ("_length", "dropped", "limit")

    def __init__(self, length: int = 0, *, limit: int | None = None) -> None:
        if length < 0:
            raise ValueError(f"a sequence cannot have {length} tokens")
        self._length = 0
        self.limit = limit
        self.dropped = 0
        self._grow(length)

    def _grow(self, tokens: int) -> None:
        self._length += tokens
        if self.limit is not None and self._length > self.limit:
            self.dropped += self._length - self.limit
            self._length = self.limit

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return CountedTokens(len(range(self._length)[index]))
        return 0 * range(self._length)[index]  # raises IndexError as a list would

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("counted tokens are all alike: there is nothing to set")

    def __delitem__(self, index: Any) -> None:
        gone = range(self._length)[index]
        self._length -= len(gone) if isinstance(index, slice) and isinstance(gone, range) else 1

    def insert(self, index: int, value: int) -> None:
        self._grow(1)

    def extend(self, values: Iterable[int]) -> None:
        self._grow(len(values) if isinstance(values, CountedTokens | list | range) else sum(1 for _ in values))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountedTokens) and len(other) == self._length

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"CountedTokens({self._length})"
