"""`makespan env`: configurations that cannot be used are one sentence each."""

from __future__ import annotations

from pathlib import Path

import pytest

from makespan.cli import main

SLOTS = "slots: {counting.start: 1, counting.step: 1}\n"


@pytest.mark.parametrize(
    ("command", "text", "message"),
    [
        ("serve", "&a [*a]", "Expected `object`, got `array`"),
        ("serve", "&a {slots: *a}", "Expected `int`, got `object`"),
        ("serve", "[" * 5_000, "is not YAML"),
        ("serve", "slots: 2026-13-01", "is not YAML: month must be in 1..12"),
        ("serve", SLOTS + 'event_log: "\\ud800"', "surrogates not allowed"),
        ("serve", SLOTS + "environments: {counting: {step_timeout_s: .nan}}", "counting.step_timeout_s is nan"),
        ("serve", SLOTS + "worker_timeout_s: .inf", "worker_timeout_s is inf; it must be above 0 and at most"),
        ("worker", "&a [*a]", "Expected `object`, got `array`"),
        ("worker", "{broker: nonsense, environments: {counting: {}}}", "broker is 'nonsense'; it must be tcp://"),
        ("worker", "{broker: 'tcp://h:5', environments: {}}", "environments is empty"),
        (
            "worker",
            "{broker: 'tcp://h:5', environments: {counting: {step_timeout_s: .nan}}}",
            "environments.counting.step_timeout_s is nan; it must be above 0",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used_is_one_sentence(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, command: str, text: str, message: str
) -> None:
    path = tmp_path / "configuration.yaml"
    path.write_text(text)
    assert main(["env", command, str(path)]) == 2
    said = capfd.readouterr().err
    assert said.startswith("makespan: ")
    assert message in said
