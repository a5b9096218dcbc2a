import pytest

from makespan.rollout.errors import FormatError
from makespan.rollout.telemetry.analysis import analyse, percentile
from makespan.rollout.telemetry.merge import merge, merge_directory
from tests.rollout.telemetry import logs


def analysed(tmp_path, lines, tail=""):
    return analyse(merge([logs.write(tmp_path / "engine.jsonl", lines, tail)]))


def test_the_percentile_interpolates_between_the_values_around_it():
    assert percentile([10.0, 20.0, 30.0, 40.0, 50.0], 0.5) == 30.0
    assert percentile([20.0, 10.0], 0.9) == pytest.approx(19.0)  # nine tenths of the way from 10 to 20
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_the_figures_of_two_trajectories_are_those_worked_out_by_hand(tmp_path):
    analysis = analysed(tmp_path, logs.two_trajectories())
    assert analysis.makespan_s == 15.0
    assert analysis.complete
    assert analysis.states == {"finished": 2}
    assert analysis.inferences == 2
    assert analysis.rewards == {"a": [0.5], "b": [1.0]}
    assert analysis.preemptions == 1
    # They ended 6 and 14.5 s after the start.
    assert analysis.completion_s.p50 == pytest.approx(10.25)
    assert analysis.completion_s.p90 == pytest.approx(6 + 0.9 * 8.5)


def test_the_phases_of_two_trajectories_add_up_to_what_the_engine_saw(tmp_path):
    phases = analysed(tmp_path, logs.two_trajectories()).phases_s
    assert phases.admission == 6.0
    assert phases.replica_queue == pytest.approx(0.75)
    assert phases.prefill == pytest.approx(2.2)
    assert phases.decode == pytest.approx(1.5)
    assert phases.slot_queue == pytest.approx(1.5)
    assert phases.environment == pytest.approx(7.0)
    # Inferences took 2 + 3 s and actions 1 + 3 + 1 + 4 s: 14, of which 12.95 are accounted for.
    assert phases.overhead == pytest.approx(14.0 - 12.95)


def test_tokens_are_summed_and_recomputed_ones_counted_apart(tmp_path):
    tokens = analysed(tmp_path, logs.two_trajectories()).tokens
    assert (tokens.prompt, tokens.cached, tokens.recomputed, tokens.generated) == (1400, 100, 100, 32)


def test_slot_classes_have_their_use_over_the_makespan(tmp_path):
    classes = analysed(tmp_path, logs.two_trajectories()).slot_classes
    step = classes["env.step"]
    assert (step.slots, step.actions, step.queue_s, step.service_s) == (2, 2, 1.5, 5.0)
    assert step.utilisation == pytest.approx(5.0 / 30.0)
    assert classes["env.start"].utilisation == pytest.approx(2.0 / 15.0)


def test_slots_that_nobody_told_of_leave_the_use_unmeasured(tmp_path):
    lines = [line for line in logs.two_trajectories() if line.get("kind") != "environment_server"]
    analysis = analysed(tmp_path, lines)
    assert analysis.slot_classes["env.step"].slots is None
    assert analysis.slot_classes["env.step"].utilisation is None
    assert analysis.bounds_s.slots == {}


def test_a_figure_that_one_inference_did_not_measure_is_not_measured(tmp_path):
    lines = logs.two_trajectories()
    lines[7] = logs.generate(6, 13.0, "a#0", 11.0, queue_s=None, cached_tokens=None, recomputed_tokens=None)
    lines[7]["data"]["preemptions"] = None
    analysis = analysed(tmp_path, lines)
    assert analysis.phases_s.replica_queue is None
    assert analysis.phases_s.overhead is None
    assert analysis.phases_s.decode is not None
    assert analysis.tokens.cached is None
    assert analysis.tokens.recomputed is None
    assert analysis.preemptions is None


def test_a_log_without_a_batch_is_refused(tmp_path):
    with pytest.raises(FormatError, match="no batch"):
        analysed(tmp_path, [logs.header(), logs.event(0, 0.5, "environment_server", slots={})])


def test_a_batch_that_was_cut_off_ends_with_its_last_event(tmp_path):
    analysis = analysed(tmp_path, logs.two_trajectories()[:11], tail='{"seq":')
    assert not analysis.complete
    assert analysis.makespan_s == 6.0
    assert analysis.states == {"finished": 1}


def test_a_batch_of_which_nothing_ended_has_no_completions(tmp_path):
    analysis = analysed(tmp_path, logs.two_trajectories()[:6])
    assert analysis.completion_s.p50 is None
    assert analysis.tail_s.after_90 is None
    assert analysis.last_chain is None
    assert analysis.lower_bound_s is None


def test_the_tail_runs_from_when_a_share_had_ended_to_the_last_end(tmp_path):
    # 100 trajectories end at 1, 2, … 98 s, and the last two at 150 and 400 s; a cancelled one at 500 does not count.
    ends = [*(float(second) for second in range(1, 99)), 150.0, 400.0]
    lines = [logs.header(), logs.start(0, 0.0)]
    lines += [logs.ended(number, at_s, f"t{number}#0", reward=None) for number, at_s in enumerate(ends, start=1)]
    lines.append(logs.ended(101, 500.0, "cut#0", state="cancelled", reward=None))
    tail = analysed(tmp_path, lines).tail_s
    assert tail.after_90 == 400.0 - 90.0
    assert tail.after_99 == 400.0 - 150.0


def test_failures_are_counted_by_their_kind(tmp_path):
    failure = {"kind": "refused", "message": "no"}
    lines = [logs.header(), logs.start(0, 0.0), logs.ended(1, 1.0, "a#0", state="failed", reward=None, failure=failure)]
    analysis = analysed(tmp_path, lines)
    assert analysis.failures == {"refused": 1}
    assert analysis.rewards == {}


def test_two_batches_in_a_log_are_refused(tmp_path):
    lines = [*logs.two_trajectories(), logs.start(15, 30.0)]
    with pytest.raises(FormatError, match="2 batches"):
        analysed(tmp_path, lines)


def test_an_end_without_its_beginning_names_the_trajectory(tmp_path):
    lines = [line for line in logs.two_trajectories() if line.get("seq") != 3]
    with pytest.raises(FormatError, match="'b#0' ended and was never submitted"):
        analysed(tmp_path, lines)


def with_a_failure(**data):
    """`b` ends with a second action, from 20 to 24.5 s, that failed."""
    lines = logs.two_trajectories()
    failed = {"turn": 1, "queue_s": None, "service_s": None, "outcome": "timeout"} | data
    lines[13:15] = [
        logs.act(12, 21.0, "b#0", 20.0, queue_s=0.25, service_s=0.5),
        logs.act(13, 24.5, "b#0", 21.0, **failed),
        logs.ended(14, 24.5, "b#0", state="failed", reward=None, failure={"kind": "timeout", "message": "late"}),
    ]
    lines[-1]["seq"] = 15
    return lines


def test_slot_times_of_a_failed_action_are_not_measured_without_the_servers_log(tmp_path):
    analysis = analysed(tmp_path, with_a_failure())
    step = analysis.slot_classes["env.step"]
    assert (step.actions, step.queue_s, step.service_s, step.utilisation) == (3, None, None, None)
    assert analysis.slot_classes["env.start"].service_s == 2.0
    assert (analysis.phases_s.slot_queue, analysis.phases_s.environment, analysis.phases_s.overhead) == (None,) * 3
    assert (analysis.last_chain.slot_queue, analysis.last_chain.environment) == (None, None)
    # 14.5 s less admission, inference's phases, and 1 + 1 + 3.5 s of actions as the engine saw them.
    assert analysis.last_chain.overhead == pytest.approx(14.5 - 6.0 - (0.5 + 1.2 + 1.0) - 5.5)


def test_slot_times_of_a_failed_action_are_those_of_the_servers_log(tmp_path):
    # It waited from 21 to 22 s, was given up at 24.5 s, and its tool held the slot to 24.75 s.
    records = [
        logs.action(0, 1, 20.1, 20.9, trajectory="b#0", granted_s=20.4),
        logs.action(1, 2, 21.0, 24.75, trajectory="b#0", granted_s=22.0, outcome="timeout"),
    ]
    logs.write(tmp_path / "broker.jsonl", [logs.header("broker"), *records])
    logs.write(tmp_path / "engine.jsonl", with_a_failure())
    analysis = analyse(merge_directory(tmp_path))
    step = analysis.slot_classes["env.step"]
    assert (step.actions, step.queue_s, step.service_s) == (3, 1.0 + 0.25 + 1.0, 2.0 + 0.5 + 2.75)
    assert step.utilisation == pytest.approx(5.25 / (2 * 15.0))
    # The trajectory itself waited for 2.5 of the 2.75 s.
    assert analysis.phases_s.environment == pytest.approx(2.0 + 2.0 + 0.5 + 2.5)
    assert analysis.phases_s.slot_queue == pytest.approx(2.25)
    assert analysis.last_chain.environment == pytest.approx(1.0 + 0.5 + 2.5)
    # What failed is not work that another schedule has to do: 2 + 0.5 s over 2 slots.
    assert analysis.bounds_s.slots["env.step"] == 1.25


def test_a_failure_of_no_known_class_leaves_every_class_unmeasured(tmp_path):
    classes = analysed(tmp_path, with_a_failure(slot_class="", outcome="unreachable")).slot_classes
    assert {name: figures.utilisation for name, figures in classes.items()} == {"env.start": None, "env.step": None}
    assert classes["env.step"].actions == 2
