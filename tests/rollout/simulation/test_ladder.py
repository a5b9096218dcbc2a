import msgspec
import pytest

from makespan.rollout.errors import ConfigError
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.simulation.batch import Hardware
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.ladder import ABLATION, LADDER, Outcome, change_pct, climb, paired, without_past
from makespan.rollout.simulation.workload import (
    Workload,
    environment_to_inference,
    knee_slots,
    reference_concurrency,
    shuffled,
    workload,
)
from tests.rollout.simulation.test_batch import chain, trace


def result(makespan_s):
    return Outcome(
        makespan_s=makespan_s, lower_bound_s=1, recomputed_share=0, preemptions=0, discarded_tokens=0, kept_length=1
    )


def test_a_paired_mean_has_its_standard_error():
    assert paired([1.0, 2.0, 3.0, 6.0]).mean == 3.0
    assert paired([1.0, 2.0, 3.0, 6.0]).se == pytest.approx((14 / 3 / 4) ** 0.5)
    assert paired([5.0]).se is None


def test_a_change_is_taken_batch_by_batch():
    change = change_pct([result(110), result(90)], [result(100), result(100)])
    assert change.mean == pytest.approx(0.0)
    assert change.se == pytest.approx(10.0)


def test_the_knee_is_the_work_over_the_longest_chain():
    nothing = InferenceCost(step_s=1e-12, sequence_s=0.0, context_s=0.0, prefill_s=0.0)
    batch = trace(*(chain(f"c{number}", [10.0] * 4) for number in range(6)))
    work = Workload("by hand", lambda seed: batch, None, False, None)
    assert knee_slots(work, nothing) == 6


def test_environment_time_is_compared_with_what_inference_takes_alone():
    # Two turns of 50 tokens: prompts of 1,000 and 101 new tokens at 1 ms, and 2 * 50 steps of 10 ms each: 2.1 s.
    cost = InferenceCost(step_s=0.01, sequence_s=0.0, context_s=0.0, prefill_s=0.001)
    batch = trace(chain("c", [3.0, 1.2]))
    assert environment_to_inference([batch, batch], cost) == pytest.approx(4.2 / 2.1, rel=0.02)


def test_the_reference_concurrency_fills_the_memory_at_the_mean_context():
    # Turns of 1,000 + 50 and 1,150 + 50 tokens: a mean of 1,125. 2 * 9,000 / 1,125 = 16.
    batch = trace(*(chain(f"c{number}", [1.0, 1.0]) for number in range(3)))
    hardware = Hardware(slots=1, replicas=2, replica=ReplicaHardware(kv_tokens=9000))
    assert reference_concurrency(batch, hardware) == 16


def test_long_trajectories_count_for_the_reference_concurrency_as_long_as_they_are_there():
    # Three turns that end at 1,050 tokens, and a ninefold trajectory's at 1,050, 1,200 … 2,250: 18,000 in twelve turns.
    batch = trace(*(chain(f"c{number}", [1.0]) for number in range(3)), chain("long", [1.0] * 9))
    hardware = Hardware(slots=1, replicas=2, replica=ReplicaHardware(kv_tokens=9000))
    assert reference_concurrency(batch, hardware) == 12


def test_blocks_and_states_take_of_the_memory_that_the_reference_concurrency_fills():
    # Each holds 1,125 tokens, wastes 49 of its last block on average and has 275 for its state: 18,000 / 1,449 = 12.4.
    batch = trace(*(chain(f"c{number}", [1.0, 1.0]) for number in range(3)))
    replica = ReplicaHardware(kv_tokens=9000, block_tokens=100, state_tokens=275)
    assert reference_concurrency(batch, Hardware(slots=1, replicas=2, replica=replica)) == 12


def test_each_rung_of_the_ablation_differs_from_the_whole_by_what_it_says():
    batch = trace(*(chain(f"c{number}", [1.0, 1.0]) for number in range(4)))
    hardware = Hardware(slots=3, replicas=2, replica=ReplicaHardware(kv_tokens=9000))
    found = {rung.name: rung.policies(batch, hardware) for rung in ABLATION}
    whole = msgspec.structs.asdict(found["+history"])
    assert whole | {"concurrency": None, "reference": 16} == whole

    def changes(name):
        own = msgspec.structs.asdict(found[name])
        return {key: value for key, value in own.items() if value != whole[key]}

    assert changes("-decoupling") == {"admission": "coupled", "concurrency": 3, "reference": None}
    assert changes("-parking") == {"admission": "everything", "reference": None}
    assert changes("-routing") == {"routing": "sticky-least-inflight"}
    assert changes("-caas") == {"scheduling": "fifo", "order": "arrival"}
    assert changes("+caas") == {"history": "last-step"}
    assert changes("oracle") == {"scheduling": "oracle", "order": "oracle"}
    ladder = [found[name] for name in ("coupled", "+parking", "+routing", "+caas")]
    assert [p.admission for p in ladder] == ["coupled", "parking", "parking", "parking"]
    assert [p.routing for p in ladder] == ["sticky-least-inflight"] * 2 + ["cost"] * 2
    assert [p.scheduling for p in ladder] == ["fifo"] * 3 + ["caas"]
    assert found["cut"].needed == 3  # of 4, a quarter more than were needed


def test_before_a_single_recorded_batch_nothing_is_known():
    batch = trace(*(chain(f"c{number}", [1.0, 1.0]) for number in range(4)))
    rungs = without_past(ABLATION)
    assert [rung.name for rung in rungs] == [rung.name for rung in ABLATION if rung.name != "+history"]
    assert {rung.policies(batch, Hardware(slots=3)).history for rung in rungs} == {"none"}


def test_the_ladder_runs_every_rung_on_every_batch():
    work = workload("bfcl", chains=32)
    outcomes = climb(work, Hardware(slots=3), range(2))
    assert {name: len(results) for name, results in outcomes.items()} == {rung.name: 2 for rung in LADDER}
    assert all(decoupled.makespan_s < coupled.makespan_s for decoupled, coupled in zip(
        outcomes["decoupled"], outcomes["coupled"], strict=True
    ))  # fmt: skip
    cut = outcomes["oversample-cut"][0]
    assert cut.discarded_tokens > 0
    assert cut.kept_length < 1
    assert outcomes["concurrency"][0].discarded_tokens == 0


def test_a_ladder_without_batches_is_refused():
    with pytest.raises(ConfigError, match="--seeds"):
        climb(workload("bfcl", chains=8), Hardware(slots=3), [])


def test_a_trace_is_shuffled_by_groups_and_seed_0_leaves_it(tmp_path):
    batch = trace(*(chain(f"c{number}", [1.0], group=f"g{number // 2}") for number in range(12)))
    assert shuffled(batch, 0) == batch
    other = shuffled(batch, 1).trajectories
    assert other != batch.trajectories
    assert sorted(t.trajectory_id for t in other) == sorted(t.trajectory_id for t in batch.trajectories)
    groups = [t.group for t in other]
    assert groups[::2] == groups[1::2]


def test_unknown_workloads_are_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="did you mean 'lognormal-1'"):
        workload("lognormal1")
    with pytest.raises(ConfigError, match="--sessions PATH"):
        workload("coding-sessions")
    with pytest.raises(ConfigError, match="at least 1"):
        workload("bfcl", chains=0)
