"""Is a verl trainer going to find makespan's plug-ins here? Facts only: `makespan doctor` prints them.

verl imports every entry point of the group `verl.plugins` when it is imported itself, and keeps quiet about those that
fail. So a plug-in that does not load looks like one that is not there; here each is loaded aloud.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import msgspec

from makespan.integrations.verl import VERL_VERSION, agent_loop_config, router_config
from makespan.integrations.verl.contract import broken_reliances

GROUP = "verl.plugins"
POLICY_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """One entry point of verl's plug-in group."""

    name: str
    module: str
    distribution: str
    loaded: bool
    """Whether verl would load it: allowed by the policy, and importable."""
    problem: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was found; `problems` has a sentence for each thing to do something about."""

    verl_version: str | None
    plugins: tuple[Plugin, ...]
    configs: tuple[Path, ...]
    """The shipped YAML files."""
    problems: tuple[str, ...]


def examine() -> Report:
    """Look at the installed verl, its plug-ins and what they rely on. Imports the plug-ins, not verl."""
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        return Report(verl_version=None, plugins=(), configs=(), problems=())
    problems = []
    if version != VERL_VERSION:
        problems.append(f"verl {version} is installed; makespan's plug-ins are tested with {VERL_VERSION}.")
    plugins = tuple(_plugin(entry) for entry in importlib.metadata.entry_points(group=GROUP))
    problems += [f"The verl plug-in {p.name!r} ({p.module}) is not loaded: {p.problem}" for p in plugins if p.problem]
    if not any(plugin.name == "makespan" for plugin in plugins):
        problems.append("makespan's own entry point is missing: install the project again (pip install -e .).")
    configs = (router_config(), agent_loop_config())
    problems += [
        f"The shipped file {path} is missing: install the project again." for path in configs if not path.is_file()
    ]
    problems += broken_reliances()
    return Report(verl_version=version, plugins=plugins, configs=configs, problems=tuple(problems))


def _plugin(entry: importlib.metadata.EntryPoint) -> Plugin:
    problem = ""
    policy = os.environ.get(POLICY_VARIABLE, "auto").strip().lower()
    if policy == "none" or (policy != "auto" and entry.name not in {name.strip() for name in policy.split(",")}):
        problem = f"{POLICY_VARIABLE}={policy} excludes it."
    else:
        try:
            entry.load()
        except Exception as error:  # verl swallows whatever a plug-in raises; this is where it is shown
            problem = f"{type(error).__name__}: {error}"
    return Plugin(
        name=entry.name,
        module=entry.value,
        distribution=entry.dist.name if entry.dist else "",
        loaded=not problem,
        problem=problem,
    )
