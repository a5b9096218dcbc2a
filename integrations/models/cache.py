"""Where built models are kept, and how one gets there: whole, or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_directory() -> Path:
    """`$MAKESPAN_CACHE`, else `makespan` under the user's cache directory."""
    if configured := os.environ.get("MAKESPAN_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "makespan"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, made by `build(directory)` at the first call.

    It appears in one step, so a build that was interrupted leaves nothing that looks like a model, and two processes
    that build at once do not disturb each other.
    """
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(scratch)
        os.replace(scratch, target)
    except OSError:
        if not (target / "config.json").exists():  # another process may have built it meanwhile
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
