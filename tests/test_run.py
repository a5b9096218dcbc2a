"""`makespan run` as a user runs it: a process, real vLLM, a real environment server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import atif
import pytest
import yaml

from makespan.rollout.replay.trace import read_trace
from makespan.rollout.telemetry.merge import merge_directory

from .processes import alive, descendants, mapped_shared_memory, wait_until_gone

pytestmark = pytest.mark.vllm

EXAMPLE = Path(__file__).parent.parent / "examples" / "bfcl.yaml"

START_S = 240.0
"""A run must have begun its batch by then; about 30 s on two idle cores."""


def start(directory: Path, *arguments: str, config: Path = EXAMPLE) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "makespan", "run", str(config), *arguments]
    command += ["--set", f"runs_directory={directory}", "--set", "name=run", "--set", "replicas.kv_cache_gib=0.5"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """One run of eight scripted tasks on two replicas, as the README shows it."""
    directory = tmp_path_factory.mktemp("scripted")
    record = ("--record", str(directory / "run.jsonl.gz"))
    process = start(directory, "--set", "tasks=8", "--set", "admission.concurrency=4", "--json", "-", *record)
    output, errors = process.communicate(timeout=480)
    assert process.returncode == 0, errors
    return directory / "run", json.loads(output), errors


def test_scripted_tasks_are_solved_and_labelled_as_scripted(scripted):
    directory, summary, terminal = scripted
    assert summary["reward"] == {
        "source": "script",
        "mean": 1.0,
        "by_task": {f"multi_turn_base_{i}": 1.0 for i in range(8)},
    }
    assert summary["trajectories"] == {"total": 8, "finished": 8, "truncated": 0, "failed": 0, "cancelled": 0}
    assert "says nothing of the model" in terminal
    assert any("scripted" in note for note in summary["notes"])
    assert json.loads((directory / "summary.json").read_text()) == summary


def test_the_summary_agrees_with_the_event_logs(scripted):
    directory, summary, _ = scripted
    log = merge_directory(directory / "events")
    generations = list(log.of("generate"))
    assert {role for role, _ in log.events} >= {"engine", "broker"}
    assert summary["inferences"] == len(generations)
    assert summary["tokens"]["generated"] == sum(event.data["generated_tokens"] for event in generations)
    assert {event.data["replica"] for event in generations} == {"replica-0", "replica-1"}
    start_s = next(log.of("batch_start")).monotonic_s
    assert summary["makespan_s"] == pytest.approx(max(e.monotonic_s for e in log.of("ended")) - start_s, abs=0.5)
    assert summary["completion_s"]["p50"] <= summary["completion_s"]["p99"] <= summary["makespan_s"]
    assert 0 < summary["lower_bound_s"] <= summary["makespan_s"]
    tokens = summary["tokens"]
    assert 0 < tokens["recomputed"] < tokens["prompt"] - tokens["cached"]
    assert 0 < summary["environment_utilisation"] <= 1


def test_the_recorded_trace_has_the_ids_of_prompts_and_observations(scripted):
    directory, summary, _ = scripted
    trace = read_trace(directory.parent / "run.jsonl.gz")
    turns = [turn for trajectory in trace.trajectories for turn in trajectory.turns]
    assert len(trace.trajectories) == 8
    assert sum(turn.generated_tokens for turn in turns) == summary["tokens"]["generated"]
    first, second, *_ = trace.trajectories
    assert first.prompt_ids[:100] == second.prompt_ids[:100]  # one system prompt
    assert all(turn.observation_ids for trajectory in trace.trajectories for turn in trajectory.turns[:-1])


def test_no_more_ran_at_once_than_admission_and_slots_allow(scripted):
    directory, summary, _ = scripted
    log = merge_directory(directory / "events")
    changes = sorted([(e.monotonic_s, 1) for e in log.of("admitted")] + [(e.monotonic_s, -1) for e in log.of("ended")])
    running, most = 0, 0
    for _, change in changes:
        running += change
        most = max(most, running)
    assert most == 4
    actions = [e for role, e in log.events if role == "broker" and e.kind == "action"]
    assert len(actions) == summary["inferences"] + 8  # the broker's own count: every act, and a reset a trajectory


def test_each_trajectory_is_a_valid_atif_document_whose_tokens_add_up(scripted):
    directory, summary, _ = scripted
    files = sorted((directory / "trajectories").glob("*.json"))
    assert len(files) == 8
    generated = 0
    for path in files:
        document = atif.Trajectory.model_validate_json(path.read_text())
        steps = [step for step in document.steps if step.source == "agent"]
        generated += sum(len(step.metrics.completion_token_ids) for step in steps)
        assert document.extra["reward"] == 1.0
        assert steps[0].extra["action_source"] == "script"
        assert all(step.extra["inference"]["prefill_s"] >= 0 for step in steps)
    assert generated == summary["tokens"]["generated"]


def test_the_resolved_configuration_is_kept(scripted):
    directory, _, _ = scripted
    resolved = yaml.safe_load((directory / "config.yaml").read_text())
    assert resolved["tasks"] == 8
    assert resolved["admission"] == {"policy": "parking", "concurrency": 4, "reference": None, "order": "forecast"}
    assert resolved["replicas"]["max_num_batched_tokens"] == 2048  # a default, spelled out


def test_the_batch_goes_on_when_one_session_raises_and_one_task_is_refused(tmp_path):
    """Takes a start-up of vLLM: it protects a batch from its worst member, and the exit code that says so."""
    tasks = tmp_path / "tasks.jsonl"
    script = ["one", "two", "three"]
    entries = [
        {"task_id": "good", "payload": {"length": 3}, "script": script},
        {"task_id": "raises", "payload": {"length": 3, "raise_in": 2}, "script": script},
        {"task_id": "refused", "payload": {"refuse": "no such repository"}, "script": script},
        {"task_id": "fine", "payload": {"length": 2}, "script": script},
    ]
    tasks.write_text("\n".join(json.dumps(entry) for entry in entries))
    overrides = ["tasks=4", "replicas.count=1", "environment.name=counting", f"environment.tasks_file={tasks}"]
    process = start(tmp_path, *(part for o in overrides for part in ("--set", o)), "--json", str(tmp_path / "s.json"))
    output, errors = process.communicate(timeout=480)
    assert process.returncode == 2, errors
    assert "no such repository" in output
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["failures"] == {"raised": 1, "refused": 1}
    assert summary["trajectories"]["finished"] == 2
    assert summary["reward"]["by_task"] == {"good": 1.0, "fine": 1.0}  # the failed ones have none, not 0
    documents = [json.loads(path.read_text()) for path in (tmp_path / "run" / "trajectories").glob("*.json")]
    assert {d["extra"]["state"] for d in documents} == {"finished", "failed"}
    assert len(documents) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_a_run_that_is_ended_early_leaves_no_process_and_no_shared_memory(number, tmp_path):
    """Takes a start-up of vLLM: it protects the next run's memory, and partial results after Ctrl-C."""
    process = start(tmp_path, "--set", "tasks=40", "--set", "admission.concurrency=4")
    deadline = time.monotonic() + START_S
    while "ready after" not in (process.stdout.readline() if process.stdout else ""):
        assert time.monotonic() < deadline
    time.sleep(6.0)
    family = descendants(process.pid)
    assert len(family) >= 7  # the environment server's processes, two hosts, two engines, two workers
    segments = mapped_shared_memory(family)
    assert segments  # vLLM's message queues
    process.send_signal(number)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), errors
    assert not wait_until_gone(family), [Path(f"/proc/{pid}/cmdline").read_text() for pid in alive(family)]
    assert not [name for name in segments if (Path("/dev/shm") / name).exists()]
    if number == signal.SIGINT:
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        counts = summary["trajectories"]
        assert counts["total"] == 40
        assert counts["cancelled"] >= 30
        assert sum(count for state, count in counts.items() if state != "total") == 40
        assert "interrupted" in output
