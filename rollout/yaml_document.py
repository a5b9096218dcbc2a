"""YAML as people write it: PyYAML's safe subset, in which 1e3 is a number as in YAML 1.2 (by YAML 1.1 it is text)."""

from __future__ import annotations

import re
from typing import Any

import yaml

NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)
"""What reading and parsing raise for what is none: `ValueError` for a date that is none, and for what is not UTF-8."""


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    pass


for _either in (_Loader, _Dumper):
    _either.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


def parse_yaml(text: str) -> Any:
    """What the text says. Raises `NOT_YAML`."""
    return yaml.load(text, Loader=_Loader)


def format_yaml(document: dict[str, Any]) -> str:
    """Text that says this, in the order of the document."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False)
