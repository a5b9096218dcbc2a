import msgspec
import pytest

from makespan.rollout.telemetry.last_chain import last_chain
from makespan.rollout.telemetry.merge import merge
from tests.rollout.telemetry import logs


def chain_of(tmp_path, lines):
    merged = merge([logs.write(tmp_path / "engine.jsonl", lines)])
    return last_chain(merged, next(merged.of("batch_start")))


def test_the_last_chain_is_taken_apart_as_by_hand(tmp_path):
    chain = chain_of(tmp_path, logs.two_trajectories())
    assert chain.trajectory_id == "b#0"
    assert chain.total == 14.5
    assert chain.admission == 6.0
    assert chain.inference == 3.0
    assert chain.replica_queue == 0.5
    # 300 of 400 prompt tokens were computed in 1.2 s, 100 of them for the second time.
    assert chain.prefill == pytest.approx(0.8)
    assert chain.recomputation == pytest.approx(0.4)
    assert chain.decode == 1.0
    assert chain.slot_queue == 0.5
    assert chain.environment == 4.0
    assert chain.overhead == pytest.approx(14.5 - 6.0 - 0.5 - 1.2 - 1.0 - 0.5 - 4.0)


def test_the_phases_add_up_to_the_chains_time(tmp_path):
    figures = msgspec.structs.asdict(chain_of(tmp_path, logs.two_trajectories()))
    total = figures.pop("total")
    del figures["trajectory_id"], figures["turns"], figures["inference"]
    assert sum(figures.values()) == pytest.approx(total)


def test_unmeasured_inference_is_kept_whole(tmp_path):
    lines = logs.two_trajectories()
    lines[12] = logs.generate(11, 20.0, "b#0", 17.0, queue_s=None, prefill_s=None, decode_s=None)
    chain = chain_of(tmp_path, lines)
    assert (chain.replica_queue, chain.prefill, chain.recomputation, chain.decode) == (None, None, None, None)
    assert chain.inference == 3.0
    assert chain.overhead == pytest.approx(14.5 - 6.0 - 3.0 - 0.5 - 4.0)


def test_a_cancelled_trajectory_is_not_the_last_chain(tmp_path):
    lines = logs.two_trajectories()
    lines[14] = logs.ended(13, 24.5, "b#0", state="cancelled", reward=None)
    assert chain_of(tmp_path, lines).trajectory_id == "a#0"


def test_a_fully_cached_prompt_divides_by_nothing(tmp_path):
    lines = logs.two_trajectories()
    lines[12] = logs.generate(11, 20.0, "b#0", 17.0, cached_tokens=100, prefill_s=0.1)
    chain = chain_of(tmp_path, lines)
    assert chain.prefill == 0.1
    assert chain.recomputation == 0.0


def test_a_trajectory_that_was_parked_waited_for_admission(tmp_path):
    lines = logs.two_trajectories()
    lines.append(logs.event(90, 18.25, "parked", "b#0", turn=0, start_s=17.5, prompt_tokens=100))
    chain = chain_of(tmp_path, lines)
    assert chain.admission == 6.75  # 6 until it was admitted, and 0.75 later
    assert chain.overhead == pytest.approx(14.5 - 6.75 - 0.5 - 1.2 - 1.0 - 0.5 - 4.0)
