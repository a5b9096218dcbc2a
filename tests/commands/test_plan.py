"""`makespan plan` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from makespan.cli import main
from makespan.commands.plan import size
from makespan.rollout.errors import ConfigError
from tests.rollout.resources.conftest import config_of

SMALL = str(config_of("granite-4-h-small"))
NUMBERS = ("--prompt", "600", "--turns", "4")


def planned(tmp_path: Path, *arguments: str) -> dict[str, object]:
    path = tmp_path / "plan.json"
    assert main(["plan", *arguments, "--json", str(path)]) == 0
    written: dict[str, object] = json.loads(path.read_bytes())
    return written


def test_a_plan_is_written_with_its_main_figures_by_name(tmp_path, capsys):
    figures = planned(tmp_path, SMALL, "--memory", "141GiB", "--training-resident", "40GiB", "--closed-form", *NUMBERS)
    expected = {
        "state_bytes_per_sequence": 77_322_240,
        "kv_bytes_per_token": 16_384,
        "block_tokens": 528,
        "page_bytes": 2_162_688,
        "bytes_per_block": 8_650_752,
        "attention_groups": 1,
        "recurrent_groups": 9,
        "prefix_caching": True,
    }
    assert {name: figures[name] for name in expected} == expected
    arguments = figures["vllm_args"]
    assert isinstance(arguments, dict)
    assert figures["num_blocks"] == arguments["kv_cache_memory_bytes"] // 8_650_752
    assert figures["reference_concurrency"] > 1
    said = capsys.readouterr().out
    for part in ("reference concurrency", "vllm serve MODEL --tensor-parallel-size 1", "Remedy:", "closed form"):
        assert part in said


def test_a_trace_is_a_workload(tmp_path):
    trace = tmp_path / "trace.jsonl"
    assert main(["simulate", "bfcl", "--chains", "16", "--slots", "3", "--record", str(trace)]) == 0
    figures = planned(tmp_path, SMALL, "--memory", "141GiB", "--closed-form", "--workload", str(trace))
    assert figures["plan"]["workload"]["trajectories"] == 16


@pytest.mark.vllm
def test_vllm_itself_is_asked_where_it_is_installed(tmp_path, capsys):
    figures = planned(tmp_path, str(config_of("granite-4-h-tiny")), "--memory", "80GiB", "--tp", "2", *NUMBERS)
    plan = figures["plan"]
    if plan["footprint"]["source"] != "vllm":  # a busy machine: the command gives up in time, and says so
        assert "did not answer in" in capsys.readouterr().out
        return
    assert "vLLM's own" in capsys.readouterr().out
    assert figures["block_tokens"] == 400
    assert len(plan["candidates"]) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "many"], "--memory: 'many' is no size"),
        (["--memory", "40GiB"], "the weights need 59.99 GiB"),
        (["--memory", "141GiB", "--tp", "3"], "cannot be divided between 3 ranks"),
        (["--memory", "141GiB", "--no-prefix-caching", "--mamba-cache-mode", "align"], "contradict each other"),
        (["--memory", "141GiB", "--retain-all", "--prefix-match-unit", "16"], "contradict each other"),
        (["--memory", "141GiB", "--mamba-cache-mode", "none", "--prefix-match-unit", "16"], "contradict each other"),
        (["--memory", "141GiB", "--prefix-match-unit", "100"], "must divide the block of 528 tokens"),
        (["--memory", "141GiB", "--prompt", "200000"], "outgrow the model's context of 131,072 tokens"),
        (["--memory", "141GiB", "--workload", "x.jsonl", "--turns", "3"], "contradict each other"),
        (["--memory", "141GiB", "--block-size", "0"], "--block-size must be at least 1"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(arguments, says, capsys):
    assert main(["plan", SMALL, "--closed-form", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_an_unknown_architecture_is_refused_with_what_was_found(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"architectures": ["GraniteForCausalLN"]}')
    assert main(["plan", str(tmp_path), "--memory", "80GiB", "--closed-form"]) == 2
    said = capsys.readouterr().err
    assert "'GraniteForCausalLN' (did you mean 'GraniteForCausalLM'?)" in said


def test_sizes_are_read_with_their_units():
    assert size("--memory", "141GiB") == 141 * 2**30
    assert size("--memory", "80 GB") == 80 * 10**9
    assert size("--memory", "1.5gib") == 3 * 2**29
    assert size("--memory", "4096") == 4096
    with pytest.raises(ConfigError, match="is no size"):
        size("--memory", "-1GiB")
