"""The simulated APIs of one session: their instances, and how a call reaches them and its result becomes text.

The benchmark's own executor keeps instances in module globals and evaluates strings. Here a session owns its instances
and a call is data. What a call answers is, character for character, what that executor would answer, because the
response check compares those texts: JSON for a dictionary, `Error during execution: …` for whatever was raised.

The API classes are not free of shared state, which would let one session see another:

* in the long-context scenarios instances hold dictionaries of the module, so an instance is copied once it is loaded;
* `post_tweet` stores its default lists, which `mention` then extends, so defaults are copied for each call;
* `logarithm` and `square_root` set the precision of the process or thread, and the outside temperature is written into
  a dictionary of the module, so one call at a time runs in a process, up to and including the text of its result.
"""

from __future__ import annotations

import contextlib
import copy
import decimal
import inspect
import json
import sys
import threading
from types import MethodType
from typing import Any

from makespan.envs.bfcl import limits
from makespan.envs.bfcl.calls import Call
from makespan.envs.bfcl.data import Scenario, api_class

_STATELESS = frozenset({"MathAPI"})
"""Classes that load no scenario."""

_one_call_at_a_time = threading.Lock()


class ApiSession:
    """Fresh instances of a scenario's API classes, in its initial state."""

    def __init__(self, scenario: Scenario) -> None:
        self.instances: dict[str, Any] = {name: _load(name, scenario) for name in scenario.classes}
        self._functions: dict[str, MethodType] = {}
        for instance in self.instances.values():
            for name, method in inspect.getmembers(instance, predicate=inspect.ismethod):
                if not name.startswith("_"):
                    self._functions[name] = method

    def execute(self, call: Call) -> str:
        """Run one call; its result as text, or what went wrong as text. Never raises for what a call did."""
        with _one_call_at_a_time, decimal.localcontext(), _own_precision():
            try:
                return _as_text(self._invoke(call))
            except Exception as exc:  # whatever a simulated API raises is an answer to the agent
                return f"Error during execution: {exc}"

    def _invoke(self, call: Call) -> Any:
        function = self._functions.get(call.name)
        if function is None:
            raise NameError(f"name {call.name!r} is not defined")
        signature = inspect.signature(function)
        try:
            bound = signature.bind(*call.args, **call.kwargs)
        except TypeError:
            return function(*call.args, **call.kwargs)  # cannot run either; raises in the words the checker expects
        for name, parameter in signature.parameters.items():
            if name not in bound.arguments and parameter.default is not parameter.empty:
                bound.arguments[name] = copy.deepcopy(parameter.default)
        limits.check(function.__self__, call.name, bound.arguments)
        return function(*bound.args, **bound.kwargs)


def _load(name: str, scenario: Scenario) -> Any:
    instance = api_class(name)()
    if name not in _STATELESS:
        config = copy.deepcopy(scenario.initial_config.get(name, {}))
        instance._load_scenario(config, long_context=scenario.long_context)
    return copy.deepcopy(instance)


def _own_precision() -> contextlib.AbstractContextManager[Any]:
    """Restores the precision of `mpmath` afterwards; it is loaded with the one class that sets it, or not at all."""
    mpmath = sys.modules.get("mpmath")
    return contextlib.nullcontext() if mpmath is None else mpmath.workdps(mpmath.mp.dps)


def _as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError, RecursionError):  # holds what JSON has not, such as a set
            return str(result)
    return str(result)
