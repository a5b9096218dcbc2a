"""Every setting that cannot be used is refused in one sentence that names it."""

from __future__ import annotations

import pytest
import yaml

from makespan.rollout.config import RunConfig, load, to_yaml
from makespan.rollout.errors import ConfigError, FormatError
from makespan.rollout.yaml_document import format_yaml, parse_yaml


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_settings_and_overrides_arrive(write):
    config = load(write("tasks: 5\nadmission: {concurrency: 3}\n"), ["tasks=8", "admission.concurrency=null"])
    assert (config.tasks, config.admission.concurrency, config.replicas.count) == (8, None, 2)


def test_an_override_reaches_a_group_that_the_file_does_not_mention(write):
    assert load(write("tasks: 5\n"), ["environment.latency.median_s=0.5"]).environment.latency.median_s == 0.5


def test_an_empty_file_is_the_defaults(write):
    assert load(write("")) == RunConfig()


def test_the_resolved_configuration_reads_back_as_itself(write):
    config = load(write("tasks: 5\nenvironment: {latency: {median_s: 1}}\n"))
    again = load(write(to_yaml(config)))
    assert again == config
    expected = {"policy": "parking", "concurrency": 16, "reference": None, "order": "forecast"}
    assert yaml.safe_load(to_yaml(config))["admission"] == expected


@pytest.mark.parametrize(
    ("text", "overrides", "error", "message"),
    [
        ("taskz: 5", [], ConfigError, r"unknown setting taskz \(did you mean 'tasks'\?\)"),
        ("admission: {concurency: 5}", [], ConfigError, r"admission.concurency \(did you mean 'concurrency'\?\)"),
        (
            "environment: {latency: {mean_s: 5}}",
            [],
            ConfigError,
            r"environment.latency.mean_s \(did you mean 'median_s'",
        ),
        ("tasks: 0", [], ConfigError, r"tasks: Expected `int` >= 1 \(seen: 0\)"),
        ("tasks: -4", [], ConfigError, r"tasks: Expected `int` >= 1 \(seen: -4\)"),
        ("tasks: many", [], ConfigError, r"tasks: Expected `int`, got `str` \(seen: 'many'\)"),
        ("admission: {concurrency: 0}", [], ConfigError, r"admission.concurrency: .*>= 1 \(seen: 0\)"),
        ("replicas: {count: 0}", [], ConfigError, r"replicas.count: .*>= 1"),
        ("environment: {slots: {step: 0}}", [], ConfigError, r"environment.slots.step: at least 1 slot"),
        ("environment: {slots: {step: -1}}", [], ConfigError, r"environment.slots.step: at least 1 slot"),
        ("limits: {trajectory_timeout_s: -1}", [], ConfigError, r"limits.trajectory_timeout_s"),
        ("limits: {trajectory_timeout_s: .inf}", [], ConfigError, r"limits.trajectory_timeout_s"),
        ("environment: {request_timeout_s: 1.0e+300}", [], ConfigError, r"environment.request_timeout_s"),
        ("replicas: {kv_cache_gib: .inf}", [], ConfigError, r"replicas.kv_cache_gib"),
        ("sampling: {temperature: .nan}", [], ConfigError, r"sampling.temperature"),
        ("seed: 99999999999999999999999", [], ConfigError, r"seed"),
        ("actions: magic", [], ConfigError, r"actions: Invalid enum value 'magic'"),
        ("version: 7", [], FormatError, r"version 7; this makespan reads 1"),
        ("- a\n- b", [], ConfigError, r"settings by name, not a list"),
        ("a: [", [], ConfigError, r"is not YAML"),
        ("tasks: 2026-13-45", [], ConfigError, r"is not YAML: month must be in 1..12"),
        ("[" * 5_000, [], ConfigError, r"is not YAML"),
        ("", ["tasks=2026-13-45"], ConfigError, r"the value is not YAML"),
        ("", ["tasks"], ConfigError, r"expected NAME=VALUE"),
        ("", ["=3"], ConfigError, r"expected NAME=VALUE"),
        ("", ["tasks.x=3"], ConfigError, r"tasks"),
        ("tasks: 5", ["tasks.x=3"], ConfigError, r"tasks is a value, not a group"),
        ("", ["tasks=[1"], ConfigError, r"the value is not YAML"),
        ("admission: 5", [], ConfigError, r"admission"),
    ],
)
def test_what_cannot_be_used_is_refused(write, text, overrides, error, message):
    with pytest.raises(error, match=message):
        load(write(text), overrides)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.yaml.*No such file"):
        load(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e3", 1000.0), ("1E-2", 0.01), ("+2.5e1", 25.0), (".5e0", 0.5), ("1.e2", 100.0), ("0x10", 16), ("1.5", 1.5)],
)
def test_a_number_with_an_exponent_is_a_number(text, value, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"sampling: {{temperature: {text}}}")
    if value <= 1:
        assert load(path).sampling.temperature == value
    assert parse_yaml(f"a: {text}") == {"a": value}


@pytest.mark.parametrize("text", ["1e3", "e3", "1e", "1e3x", "2e5/data", "0.1", "on", "null", "12:30", "text"])
def test_settings_read_back_as_they_were_written(text):
    assert parse_yaml(format_yaml({"path": text, "number": 1e300})) == {"path": text, "number": 1e300}
    assert parse_yaml(f"a: {text!r}") == {"a": text}
