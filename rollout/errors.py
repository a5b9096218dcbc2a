"""Every error a user can meet derives from `MakespanError` and says what was wrong, what was seen and what to do.

The command line turns a `MakespanError` into one line on standard error and exit code 2; anything else is a bug of
ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MakespanError(Exception):
    """Base of the errors that a user can act on."""


class ConfigError(MakespanError):
    """A setting that cannot be used: unknown, of the wrong type or out of its range."""


class TransitionError(MakespanError):
    """A trajectory was asked to enter a state that its present state does not lead to."""


class ReplicaFailure(MakespanError):
    """An inference replica could not serve a request (it died, or refused it).

    `retryable` says whether another replica may be asked for the same turn.
    """

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class EnvironmentUnreachable(MakespanError):
    """Nobody answers at the environment server's address."""


class FormatError(MakespanError):
    """A file or a message of an unknown version, or one that does not parse."""


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest of `known`, else the list of what is known."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(names)})" if names else ""
