"""Environment names: the bundled ones, and any `module:attribute`.

A *factory* is called without arguments for each session and gives an `Environment` or a `SyncEnvironment`; a class is
its own factory. Names are resolved in the worker, and the module is imported there and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from makespan.rollout.environment import Environment, SyncEnvironment
from makespan.rollout.errors import ConfigError, nearest

Factory = Callable[[], Environment | SyncEnvironment]

BUNDLED: dict[str, str] = {
    "bfcl": "makespan.envs.bfcl.environment:BfclEnvironment",
    "counting": "makespan.envs.counting:CountingEnvironment",
    "counting_sync": "makespan.envs.counting:SyncCountingEnvironment",
    "replay": "makespan.envs.replay:ReplayEnvironment",
}
"""Name to `module:attribute`."""


def location(name: str) -> str:
    """The `module:attribute` behind a name. Raises `ConfigError` for a name that is neither bundled nor a location."""
    if name in BUNDLED:
        return BUNDLED[name]
    module, _, attribute = name.partition(":")
    if module and attribute:
        return name
    hint = "give the name of a bundled environment or a location like 'package.module:Class'"
    raise ConfigError(f"no bundled environment {name!r}{nearest(name, BUNDLED)}: {hint}")


def resolve(name: str) -> Factory:
    """Import the factory behind a name. Raises `ConfigError` saying what is missing."""
    where = location(name)
    module_name, _, attribute = where.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"environment {name!r}: cannot import {module_name!r} ({error})") from error
    factory = module
    for part in attribute.split("."):
        if not hasattr(factory, part):
            names = (known for known in vars(factory) if not known.startswith("_"))
            raise ConfigError(f"environment {name!r}: {module_name!r} has no {attribute!r}{nearest(part, names)}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise ConfigError(f"environment {name!r}: {where!r} is a {type(factory).__name__}, not a class or a function")
    return factory
