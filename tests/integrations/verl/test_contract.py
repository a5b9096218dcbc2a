"""What is used of verl is still there; and when it is not, a sentence says which and why."""

from __future__ import annotations

import subprocess
import sys

import pytest

from makespan.integrations.verl import agent_loop_config, router_config
from makespan.integrations.verl.contract import Reliance, broken_reliances
from makespan.integrations.verl.doctor import examine


def test_the_installed_verl_has_everything_that_is_relied_on() -> None:
    assert broken_reliances() == []


@pytest.mark.parametrize(
    ("reliance", "sentence"),
    [
        (Reliance("verl.gone", "x", "a test"), "verl.gone is not installed"),
        (Reliance("json", "loads.gone", "a test"), "json.loads.gone is gone; makespan needs it because: a test."),
        (Reliance("json", "loads", "a test", ("s", "speed")), "json.loads no longer takes speed (it takes s, "),
        (Reliance("json", "loads", "a test", ("s",), ("quantum",)), "does not contain 'quantum' any more"),
    ],
)
def test_a_verl_that_moved_is_reported_in_a_sentence(reliance: Reliance, sentence: str) -> None:
    (reported,) = broken_reliances([reliance])
    assert sentence in reported


def test_the_doctor_sees_the_plug_in_that_verl_loads() -> None:
    report = examine()
    (ours,) = [plugin for plugin in report.plugins if plugin.name == "makespan"]
    assert (ours.module, ours.loaded) == ("makespan.integrations.verl", True)
    assert report.problems == ()


def test_the_doctor_says_when_verl_is_told_not_to_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    report = examine()
    assert "VERL_USE_EXTERNAL_PLUGINS=other excludes it." in "\n".join(report.problems)


def test_importing_the_plug_in_is_cheap_and_imports_neither_verl_nor_ray_nor_torch() -> None:
    code = (
        "import sys, makespan.integrations.verl as p; p.router_config();"
        "print([m for m in ('verl', 'ray', 'torch', 'vllm', 'transformers', 'zmq') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.strip() == "[]"


def test_the_shipped_files_exist_and_the_module_prints_the_overrides_that_name_them() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "makespan.integrations.verl"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for path in (router_config(), agent_loop_config()):
        assert path.is_file()
        assert str(path) in printed
