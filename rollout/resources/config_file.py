"""Reads a model's `config.json`: what a file must say, under which of its names, and what to tell whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from makespan.rollout.resources.shape import BadConfig


class ModelConfigFile:
    """One `config.json`. A multimodal model's text part is what is read."""

    def __init__(self, document: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.document = document
        architectures = document.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise BadConfig(f"{where}: `architectures` must name a model class, not {architectures!r}")
        self.architecture: str = architectures[0]
        text = document.get("text_config")
        self._text: Mapping[str, Any] = text if isinstance(text, Mapping) else document

    @classmethod
    def read(cls, model: Path) -> ModelConfigFile:
        """The configuration of a model's directory, or the file itself. Raises `BadConfig`."""
        path = model / "config.json" if model.is_dir() else model
        try:
            document = msgspec.json.decode(path.read_bytes())
        except OSError as error:
            raise BadConfig(f"cannot read the model's configuration {str(path)!r}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise BadConfig(f"{path} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise BadConfig(f"{path} must hold an object, not a {type(document).__name__}")
        return cls(document, str(path))

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of these names that is set, else the default."""
        for name in names:
            if self._text.get(name) is not None:
                return self._text[name]
        return default

    def count(self, *names: str, default: int | None = None, least: int = 0) -> int:
        """A whole number of at least `least`. Raises `BadConfig` for another value, or for none where there is no
        default."""
        value = self.get(*names, default=default)
        if value is None:
            raise BadConfig(f"{self.where}: {self.architecture} needs `{'` or `'.join(names)}`, which is not there")
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadConfig(f"{self.where}: `{names[0]}` must be a whole number of at least {least}, not {value!r}")
        return value

    def layers(self, *names: str) -> list[str] | None:
        """A list of layer types, None where it is not there. Raises `BadConfig` when it has another length."""
        value = self.get(*names)
        if value is None:
            return None
        count = self.count("num_hidden_layers")
        if not isinstance(value, list) or len(value) != count:
            seen = len(value) if isinstance(value, list) else value
            raise BadConfig(f"{self.where}: `{names[0]}` must name the type of each of {count} layers, not {seen}")
        return [str(name) for name in value]
