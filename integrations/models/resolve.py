"""What a user may write after `--model`: `embedded`, `smollm2`, or the path of any model directory."""

from __future__ import annotations

from pathlib import Path

from makespan.integrations.models.cache import cache_directory
from makespan.rollout.errors import ConfigError

BUNDLED = ("embedded", "smollm2")


def resolve(name: str) -> Path:
    """The directory of the model called `name`, built or converted at the first call.

    Raises `ConfigError` for a path that is not a model's directory.
    """
    if name == "embedded":
        from makespan.integrations.models import embedded

        return embedded.build(cache_directory())
    if name == "smollm2":
        from makespan.integrations.models import smollm2

        return smollm2.convert(cache_directory())
    path = Path(name)
    if not path.is_dir():
        raise ConfigError(f"model.path: {name!r} is neither a directory nor one of {', '.join(BUNDLED)}")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path: {name!r} has no config.json: give the directory of a Hugging Face model")
    return path
