import msgspec
import pytest

from makespan.rollout.errors import FormatError
from makespan.rollout.replay.recorder import Recorder, with_ids
from makespan.rollout.replay.trace import Trace, TraceHeader, check, read_trace
from makespan.rollout.simulation.batch import Hardware, Policies
from makespan.rollout.simulation.ladder import measured
from makespan.rollout.simulation.regimes import SYNTHETIC, generate
from makespan.rollout.telemetry.merge import merge
from makespan.rollout.trajectory import Segment, TrajectoryResult, TrajectoryState
from tests.rollout.telemetry import logs

from .recordings import recording


def without_the_runs_own(trajectories):
    """What a recording adds of the run itself (what was cached, when turns began) taken out."""
    return [
        msgspec.structs.replace(
            trajectory,
            reward=None,
            turns=tuple(msgspec.structs.replace(turn, cached_tokens=None, start_s=None) for turn in trajectory.turns),
        )
        for trajectory in trajectories
    ]


def test_a_recorded_simulation_is_the_trace_that_was_simulated():
    trace = generate(SYNTHETIC["lognormal-1-cap50"], 3, chains=24)
    log, _ = measured(trace, Hardware(slots=4), Policies(), seed=0)
    recorded = Recorder(log).trace()
    assert without_the_runs_own(recorded.trajectories) == without_the_runs_own(trace.trajectories)
    assert recorded.header.dropped == {}


def test_a_recording_by_hand(tmp_path):
    log = merge([logs.write(tmp_path / "engine.jsonl", logs.two_trajectories())])
    trace = Recorder(log, source="by hand").write(tmp_path / "trace.jsonl.gz")
    first, second = trace.trajectories
    assert (first.trajectory_id, first.task_id, first.group, first.reward, first.reset_s) == ("a#0", "a", "a", 0.5, 1.0)
    (turn,) = second.turns
    assert (turn.prompt_tokens, turn.generated_tokens, turn.observation_tokens) == (400, 21, 0)
    assert (turn.environment_s, turn.cached_tokens, turn.start_s) == (3.0, 100, 1.0)
    assert first.max_turns is None
    assert read_trace(tmp_path / "trace.jsonl.gz") == trace


def test_trajectories_that_did_not_end_by_themselves_are_counted(tmp_path):
    lines = logs.two_trajectories()
    lines[14] = logs.ended(13, 24.5, "b#0", state="failed", reward=None)
    trace = Recorder(merge([logs.write(tmp_path / "engine.jsonl", lines)])).trace()
    assert [trajectory.trajectory_id for trajectory in trace.trajectories] == ["a#0"]
    assert trace.header.dropped == {"failed": 1}


def test_of_a_restarted_trajectory_only_the_last_attempt_is_kept(tmp_path):
    lines = logs.two_trajectories()
    lost = [
        logs.generate(50, 16.5, "b#0", 16.1, prompt_tokens=999),
        logs.act(51, 16.6, "b#0", 16.5, service_s=0.05),
        logs.event(52, 16.7, "restarted", "b#0", restart=1),
    ]
    trace = Recorder(merge([logs.write(tmp_path / "engine.jsonl", [*lines, *lost])])).trace()
    (turn,) = trace.trajectories[1].turns
    assert (turn.prompt_tokens, turn.environment_s) == (400, 3.0)
    assert trace.header.dropped == {}


def test_a_log_without_a_batch_has_nothing_to_record(tmp_path):
    log = merge([logs.write(tmp_path / "engine.jsonl", [logs.header()])])
    with pytest.raises(FormatError, match="no batch"):
        Recorder(log).trace()


def test_ids_of_prompts_and_observations_are_recorded_and_what_the_agent_said_is_not():
    recorded = recording("a#0", "a", 3, (2, 1, 0.1), (1, 0, 0.1))
    other = recording("b#0", "b", 3, (2, 0, 0.1))
    segments = ([11, 12, 13], False), ([21, 22], True), ([31], False), ([41], True), ([51, 52], False)
    result = TrajectoryResult(
        trajectory_id="a#0",
        task_id="a",
        group="a",
        state=TrajectoryState.TRUNCATED,  # cut before the last observation was answered
        reward=0.0,
        failure=None,
        first_prompt=(),
        turns=(),
        segments=tuple(Segment(ids, generated) for ids, generated in segments),
    )
    first, second = with_ids(Trace(TraceHeader(), (recorded, other)), [result]).trajectories
    check(first)
    assert first.prompt_ids == [11, 12, 13]
    assert [turn.observation_ids for turn in first.turns] == [[31], None]
    assert [turn.generated_ids for turn in first.turns] == [None, None]
    assert second == other
