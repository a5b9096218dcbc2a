"""A replay from trace to event log: the engine, a real environment server, and stand-in or real replicas."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from makespan.cli import main
from makespan.envs.client import EnvClient
from makespan.envs.server import ServerConfig
from makespan.envs.spawn import spawn_server
from makespan.rollout.admission import make_admission
from makespan.rollout.coordinator import Coordinator
from makespan.rollout.engine import RolloutEngine
from makespan.rollout.replay.agent import TraceAgent
from makespan.rollout.replay.content import ReplayConversation, check_lengths, check_vocabulary
from makespan.rollout.replay.fidelity import fidelity
from makespan.rollout.replay.plan import limits, plan
from makespan.rollout.replay.playback import PlayedEnvironments, with_playbacks
from makespan.rollout.replay.trace import Trace, TraceHeader, TraceTrajectory, read_trace, write_trace
from makespan.rollout.replicas.base import Replica
from makespan.rollout.routing import StickyLeastInflight
from makespan.rollout.scheduling import action_policy
from makespan.rollout.telemetry.events import EventLog
from makespan.rollout.telemetry.merge import MergedLog, merge
from makespan.rollout.trajectory import TrajectoryResult

from .rollout.fakes import RuleReplica
from .rollout.replay.recordings import recording

VOCABULARY = 1000

RECORDED = (
    recording("a", "g", 40, (4, 9, 0.05), (6, 5, 0.02), (3, 0, None), reward=1.0),
    recording("b", "g", 40, (5, 9, 0.03), (2, 0, 0.01), reset_s=0.05, reward=0.5),
    recording("c", "other", 30, (8, 0, 0.02)),
)


async def replayed(
    directory: Path,
    recorded: Sequence[TraceTrajectory],
    replicas: Mapping[str, Replica],
    *,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> list[TrajectoryResult]:
    """Replay a recording; its log is `engine.jsonl`."""
    tasks, plays = plan(recorded)
    server = ServerConfig(slots={"replay.start": 4, "replay.step": 2})
    with EventLog(directory / "engine.jsonl", "engine", asyncio.get_running_loop().time) as events:
        async with (
            spawn_server(server, log_path=directory / "server.log") as address,
            EnvClient(address, job="test", request_timeout_s=60.0) as client,
        ):
            engine = RolloutEngine(
                replicas=replicas,
                router=StickyLeastInflight(list(replicas), rng=random.Random(0)),
                admission=make_admission("everything", None),
                environments=PlayedEnvironments(client, plays),
                agent=TraceAgent(plays, seed=seed),
                conversation=ReplayConversation(plays, vocabulary=vocabulary, seed=seed),
                coordinator=Coordinator(),
                scheduling=action_policy("fifo", Coordinator()),
                limits=limits(recorded),
                events=events,
            )
            return await engine.run(with_playbacks(tasks, plays))


def counts(log: MergedLog) -> dict[tuple[str, int], tuple[int, int]]:
    """Prompt and generated tokens by trajectory and turn."""
    return {
        (e.trajectory_id, e.data["turn"]): (e.data["prompt_tokens"], e.data["generated_tokens"])
        for e in log.of("generate")
    }


def stand_in() -> RuleReplica:
    """Generates as many tokens as it must, which ones depending on the seed."""
    return RuleReplica(
        "replica-0",
        lambda request: random.Random(request.sampling.seed).choices(range(VOCABULARY), k=request.sampling.max_tokens),
    )


def test_prompts_extend_what_was_generated_in_the_recorded_lengths(tmp_path):
    replica = stand_in()
    results = asyncio.run(replayed(tmp_path, RECORDED, {"replica-0": replica}))
    assert [(r.state, r.reward) for r in results] == [("finished", 1.0), ("finished", 0.5), ("finished", 0.0)]
    log = merge([tmp_path / "engine.jsonl"])
    assert counts(log) == {  # by hand: each prompt is the last one, what was generated and what was observed
        ("g#0", 0): (40, 4),
        ("g#0", 1): (53, 6),
        ("g#0", 2): (64, 3),
        ("g#1", 0): (40, 5),
        ("g#1", 1): (54, 2),
        ("other#0", 0): (30, 8),
    }
    asked = {
        (r.trajectory_id, r.turn): (prompt, r) for r, prompt in zip(replica.requests, replica.prompts, strict=True)
    }
    for (name, turn), (prompt, request) in asked.items():
        assert request.sampling.min_tokens == request.sampling.max_tokens
        if turn:
            before, earlier = asked[name, turn - 1]
            generated = random.Random(earlier.sampling.seed).choices(range(VOCABULARY), k=earlier.sampling.max_tokens)
            assert prompt[: len(before) + len(generated)] == before + generated
    assert asked["g#0", 0][0] == asked["g#1", 0][0]  # siblings share their first prompt
    assert asked["g#0", 0][0] != asked["other#0", 0][0]
    seeds = [request.sampling.seed for _, request in asked.values()]
    assert len(set(seeds)) == len(seeds)  # and go different ways from there
    assert asked["g#1", 1][1].sampling.seed == zlib.crc32(b"0/g#1/1")

    durations = fidelity(log, plan(RECORDED)[1]).durations
    assert durations.actions == 6  # five actions and one reset that took time
    assert durations.recorded_s == pytest.approx(0.18)
    assert 0.17 < durations.measured_s < 0.18 + 6 * 0.15


def test_the_same_seed_replays_the_same_tokens_and_another_one_others(tmp_path):
    def tokens(name, seed):
        (tmp_path / name).mkdir()
        results = asyncio.run(replayed(tmp_path / name, RECORDED, {"replica-0": stand_in()}, seed=seed))
        return [[list(segment.token_ids) for segment in result.segments] for result in results]

    once = tokens("once", 3)
    assert tokens("again", 3) == once
    assert tokens("another", 4) != once


@pytest.mark.vllm
def test_real_replicas_generate_the_recorded_lengths_on_a_warm_prefix(tmp_path, engines, on_loop):
    replica = engines["cached"]
    on_loop(replica.reset_prefix_cache())
    recorded = (
        recording("a", "g", 900, (12, 400, 0.2), (7, 300, 0.1), (9, 0, None)),
        recording("b", "g", 900, (20, 500, 0.1), (5, 0, 0.1)),
    )
    replicas = {replica.replica_id: replica}
    results = on_loop(replayed(tmp_path, recorded, replicas, vocabulary=1024))
    assert {result.state for result in results} == {"finished"}
    log = merge([tmp_path / "engine.jsonl"])
    assert counts(log) == {
        ("g#0", 0): (900, 12),
        ("g#0", 1): (1312, 7),
        ("g#0", 2): (1619, 9),
        ("g#1", 0): (900, 20),
        ("g#1", 1): (1420, 5),
    }
    cached = {(e.trajectory_id, e.data["turn"]): e.data["cached_tokens"] for e in log.of("generate")}
    assert all(cached[key] > 0 for key in (("g#0", 1), ("g#0", 2), ("g#1", 1)))
    report = fidelity(log, plan(recorded)[1])
    assert (report.replayed_turns, report.other_prompts, report.other_generations) == (5, 0, 0)


def test_the_bundled_trace_is_small_and_fits_the_embedded_model(embedded_model):
    path = Path(__file__).parent.parent / "examples" / "traces" / "bfcl.jsonl.gz"
    trace = read_trace(path)
    assert path.stat().st_size < 50_000
    assert len(trace.trajectories) == 16
    assert sum(len(trajectory.turns) for trajectory in trace.trajectories) == 153
    assert all(trajectory.prompt_ids for trajectory in trace.trajectories)
    config = json.loads((embedded_model / "config.json").read_text())
    check_vocabulary(trace.trajectories, config["vocab_size"], "embedded")
    check_lengths(trace.trajectories, 32_768, "embedded")


def write(path: Path, *trajectories: TraceTrajectory) -> str:
    write_trace(path, Trace(TraceHeader(), trajectories))
    return str(path)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--time-scale", "0"], "--time-scale is 0; it must be above 0"),
        (["--scheduling", "cass"], "did you mean 'caas'"),
        (["--admission", "every"], "admission.policy: unknown policy 'every'"),
        (["--routing", "coast"], "did you mean 'cost'"),
        (["--order", "forcast"], "did you mean 'forecast'"),
        (["--limit", "0"], "--limit must be at least 1, not 0"),
        (["--slots", "0"], "environment.slots.step: at least 1 slot is needed, not 0"),
        (["--replicas", "0"], "replicas.count"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_replayed_is_said_before_anything_starts(tmp_path, capsys, options, says):
    trace = write(tmp_path / "trace.jsonl", *RECORDED)
    assert main(["replay", trace, "--runs-directory", str(tmp_path / "runs"), *options]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_contexts_and_ids_that_the_model_does_not_have_are_refused(tmp_path, capsys):
    long = recording("long", "long", 65_000, (1000, 0, 0.1))
    assert main(["replay", write(tmp_path / "long.jsonl", long)]) == 2
    errors = capsys.readouterr().err
    assert "'long'" in errors
    assert "66,000" in errors
    assert "--skip-long" in errors
    assert main(["replay", write(tmp_path / "long.jsonl", long), "--skip-long"]) == 2
    assert "every trajectory is longer than 65,536 tokens" in capsys.readouterr().err
    foreign = msgspec.structs.replace(RECORDED[2], prompt_ids=[1_000_000] * 30)
    assert main(["replay", write(tmp_path / "foreign.jsonl", foreign)]) == 2
    assert "prompt_ids: token id 1000000" in capsys.readouterr().err
