"""Where figures go that a program reads: `--json PATH`, `-` for standard output.

A path is tried before the work whose figures it takes, so that a batch is not run for nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.errors import ConfigError

STANDARD_OUTPUT = "-"


def check_output(option: str, path: str | None) -> None:
    """Raise `ConfigError` when a file that `option` names cannot be written. Leaves an existing file as it is."""
    if path is None or path == STANDARD_OUTPUT:
        return
    existed = Path(path).exists()
    try:
        with Path(path).open("ab"):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: cannot write {path!r}: {error}") from error
    if not existed:
        Path(path).unlink()


def check_file(option: str, path: Path | None) -> None:
    """Make the directory that a file is to stand in. Raises `ConfigError` when the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {str(path)!r}: {error}") from error
    check_output(option, str(path))


def write_json(path: str | None, figures: Any) -> None:
    """Write figures where `--json` says; None writes nothing. A reader that has gone away is no error."""
    if path is None:
        return
    encoded = msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n"
    if path != STANDARD_OUTPUT:
        Path(path).write_bytes(encoded)
        return
    try:
        sys.stdout.write(encoded.decode())
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more at exit, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
