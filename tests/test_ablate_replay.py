"""`makespan ablate --replay` on a real engine, and the simulation beside it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from makespan.cli import main
from makespan.commands import ablate_replay
from makespan.commands.ablate import Row, order_agreement, with_simulation
from makespan.commands.ablate_replay import LEAST_DRAWS, MOST_DRAWS, Replayed, at_speed, drawn_s
from makespan.rollout.errors import ConfigError
from makespan.rollout.replay.trace import Trace, TraceHeader, write_trace
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.resources.calibration import Calibration, Measured, Probe
from makespan.rollout.routing import STICKY
from makespan.rollout.simulation.batch import Hardware, Policies
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.ladder import Outcome, Paired
from makespan.rollout.telemetry.merge import merge

from .rollout.replay.recordings import recording

RECORDED = tuple(
    recording(f"{group}{number}", group, 500, (8, 60, 0.4), (6, 40, 0.3 + 0.1 * number), (5, 0, None))
    for group in "ab"
    for number in range(3)
)


def calibrated(path: Path) -> str:
    probe = Measured(probe=Probe(sequences=1, prompt_tokens=1, generated_tokens=1), seconds=1.0)
    cost = InferenceCost(step_s=0.02, sequence_s=0.0, context_s=0.0, prefill_s=2e-4, chunk_tokens=2048)
    known = Calibration(
        model="embedded",
        machine="this one",
        cost=cost,
        fitted_on=(probe,),
        judged_on=(probe,),
        median_error=0.0,
        largest_error=0.0,
    )
    path.write_bytes(msgspec.json.encode(known))
    return str(path)


@pytest.mark.vllm
def test_rungs_replay_the_same_batch_on_the_same_engine(tmp_path, capsys, embedded_model):
    """Protects the ablation as a user runs it: engines start once, every rung replays the same work, the simulation and
    its report stand beside it. It takes a minute, as it starts an engine of its own."""
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, Trace(TraceHeader(), RECORDED))
    arguments = ["ablate", str(trace), "--replay", "--rungs", "coupled,+parking,+history,cut", "--seeds", "2"]
    arguments += ["--replicas", "1", "--slots", "1", "--time-scale", "0.5", "--token-scale", "0.5"]
    arguments += ["--calibration", calibrated(tmp_path / "calibration.json"), "--json", str(tmp_path / "out.json")]
    assert main([*arguments, "--model", str(embedded_model), "--runs-directory", str(tmp_path / "runs")]) == 0
    figures = json.loads((tmp_path / "out.json").read_bytes())
    assert [row["rung"] for row in figures["rows"]] == ["coupled", "+parking", "cut"]  # a trace has no past
    rows = {row["rung"]: row for row in figures["rows"]}
    work_s = 0.5 * sum(turn.environment_s or 0.0 for recorded in RECORDED for turn in recorded.turns)
    one_slot = [run["outcome"]["makespan_s"] for run in figures["runs"] if run["rung"] != "cut"]
    assert len(one_slot) == 4
    assert min(one_slot) > work_s
    # A slot that is held through inference serves later than one that is held while an action runs.
    assert rows["+parking"]["against_pct"]["coupled"]["mean"] < 0
    assert [run["other_turns"] for run in figures["runs"]] == [0] * 6
    assert rows["cut"]["kept_length_ratio"] > 0
    assert all(row["simulated_s"]["mean"] > work_s for row in figures["rows"] if row["rung"] != "cut")
    assert all(1e-5 < run["core_s"] < 1.0 for run in figures["runs"])
    # Sticky routing's placements are known afterwards; `cut` routes by cost, which moves trajectories.
    where = {f"{group}#{number}": "replica-0" for group in "ab" for number in range(3)}
    assert [run["homes"] for run in figures["runs"] if run["rung"] != "cut"] == [where] * 4
    assert [run["homes"] for run in figures["runs"] if run["rung"] == "cut"] == [None] * 2
    (directory,) = (tmp_path / "runs").iterdir()
    assert json.loads((directory / "ablation.json").read_bytes())["runs"] == figures["runs"]
    lengths = {}
    for path in directory.glob("*/events/engine.jsonl"):
        events = merge([path]).of("generate")
        found = sorted((e.data["turn"], e.data["prompt_tokens"], e.data["generated_tokens"]) for e in events)
        lengths[path.parts[-3]] = tuple(found)
    assert sorted(lengths) == [f"{rung}.{seed}" for rung in ("+parking", "coupled", "cut") for seed in (100, 101)]
    # 500, 8 and 60, 6 and 40, 5 tokens, each halved
    whole = {found for name, found in lengths.items() if not name.startswith("cut")}
    assert whole == {((0, 250, 4),) * 6 + ((1, 284, 3),) * 6 + ((2, 307, 2),) * 6}
    assert "environments took" in capsys.readouterr().out
    sides = [str(directory / f"{rung}.100") for rung in ("coupled", "+parking")]
    assert main(["report", *sides, "-o", str(tmp_path / "report.html")]) == 0


def run(rung: str, seed: int, replayed_s: float, simulated_s: float) -> Replayed:
    outcome = Outcome(
        makespan_s=replayed_s,
        lower_bound_s=1.0,
        recomputed_share=0.0,
        preemptions=0,
        discarded_tokens=0,
        kept_length=1.0,
    )
    return Replayed(rung=rung, seed=seed, outcome=outcome, environment_pct=0.0, other_turns=0, simulated_s=simulated_s)


def test_a_batch_on_slower_cores_is_simulated_on_slower_cores():
    cost = InferenceCost(step_s=0.01, sequence_s=0.001, context_s=1e-6, prefill_s=1e-4, chunk_tokens=100)
    hardware = Hardware(replicas=2, replica=ReplicaHardware(cost=cost, block_tokens=7), slots=3)
    slower = at_speed(hardware, 0.003, 0.002).replica
    assert slower.block_tokens == 7
    # 10 steps of 3 sequences with 50 to 77 tokens of context and 20 prompt tokens of one more, half as long again
    once_s = 0.01 + 4 * 0.001 + 20 * 1e-4
    assert slower.cost.steps_s(10, 3, 50, 1, 20) == pytest.approx(1.5 * (10 * once_s + 1e-6 * sum(range(50, 80, 3))))
    assert slower.cost.chunk_tokens == 100
    assert at_speed(hardware, None, 0.002) == hardware
    assert at_speed(hardware, 0.003, None) == hardware


def chains_and_hardware(*seconds: int) -> tuple[Trace, Hardware]:
    """Chains of one turn that takes so many seconds, on two replicas that serve one at a time."""
    chains = tuple(recording(f"{n}", f"{n}", 5, (tokens, 0, None)) for n, tokens in enumerate(seconds))
    cost = InferenceCost(step_s=1.0, sequence_s=0.0, context_s=0.0, prefill_s=0.0)
    replica = ReplicaHardware(cost=cost, max_sequences=1)
    return Trace(TraceHeader(), chains), Hardware(replicas=2, replica=replica, slots=1)


def test_what_a_tie_decides_is_simulated_until_its_mean_is_known():
    """Chains of 10, 1, 10 and 1 s: the third one's replica is a tie. The batch takes 20 s if that is the first one's,
    11 s if not. A draw deviates by 4.5 s, 29% of the mean: 64 draws leave 3.6%, more than the 2% that are enough."""
    drawn = drawn_s(*chains_and_hardware(10, 1, 10, 1), Policies(), 3, lambda: None)
    assert set(drawn) == {11.0, 20.0}
    assert len(drawn) == MOST_DRAWS
    assert 0.25 < drawn.count(20.0) / len(drawn) < 0.75  # by chance once in 20,000 times


@pytest.mark.parametrize(("third", "fourth", "seconds"), [("0", "1", 20.0), ("1", "0", 11.0), ("0", "0", 21.0)])
def test_what_a_replay_drew_is_not_drawn_again(third, fourth, seconds):
    """The same chains where the replay placed them: only its makespan is possible."""
    homes = {"0#0": "replica-0", "1#0": "replica-1", "2#0": f"replica-{third}", "3#0": f"replica-{fourth}"}
    drawn = drawn_s(*chains_and_hardware(10, 1, 10, 1), Policies(), 3, lambda: None, homes)
    assert set(drawn) == {seconds}


@pytest.mark.parametrize(
    ("routing", "homes", "complaint"),
    [
        ("cost", {"0#0": "replica-0"}, "'cost' moves trajectories"),
        (STICKY, {"0": "replica-0"}, "the batch has no 0$"),
        (STICKY, {"0#0": "replica-2"}, "the batch has no replica-2$"),
    ],
)
def test_homes_that_nobody_can_have_are_refused(routing, homes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        drawn_s(*chains_and_hardware(1), Policies(routing=routing), 3, lambda: None, homes)


def test_what_no_tie_decides_is_simulated_a_few_times():
    assert drawn_s(*chains_and_hardware(10, 10), Policies(), 3, lambda: None) == [10.0] * LEAST_DRAWS


@pytest.mark.parametrize(("jitter", "both"), [(0.01, True), (0.0, False)])
def test_milliseconds_that_decide_who_comes_first_are_drawn(jitter, both, monkeypatch):
    """One replica that serves one at a time. Both chains come back from their environments at 12 s, one to generate for
    100 s, the other for 1 s before an action of 50 s: the batch takes 163 s if the first one comes first, 113 s if not.
    """
    monkeypatch.setattr(ablate_replay, "JITTER", jitter)
    chains = (
        recording("a", "a", 5, (1, 1, 11.0), (100, 0, None)),
        recording("b", "b", 5, (1, 1, 10.0), (1, 1, 50.0), (1, 0, None)),
    )
    _, hardware = chains_and_hardware(1)
    hardware = msgspec.structs.replace(hardware, replicas=1, slots=2)
    drawn = drawn_s(Trace(TraceHeader(), chains), hardware, Policies(), 3, lambda: None)
    first = [seconds > 150 for seconds in drawn]
    assert (any(first) and not all(first)) == both


def test_a_deviation_stands_beside_what_chance_explains():
    """Replays of 100 and 140 s, simulated as 130 ±30 and 150 ±40: 140 is 17% above the mean of 120, and two such draws
    deviate by 25 (the root of 30² + 40², halved) in the root mean square, 21% of 120."""
    runs = [
        msgspec.structs.replace(run("a", 1, 100.0, 130.0), simulated_sd_s=30.0),
        msgspec.structs.replace(run("a", 2, 140.0, 150.0), simulated_sd_s=40.0),
    ]
    once = Paired(1.0, None)
    row = Row(
        rung="a",
        says="",
        makespan_s=Paired(120.0, 20.0),
        over_lower_bound=once,
        against_pct={},
        recomputed_share=0.0,
        preemptions=0.0,
        discarded_tokens=0.0,
        kept_length_ratio=1.0,
    )
    row = with_simulation(row, runs)
    assert row.simulated_pct == pytest.approx(100 * 20 / 120)
    assert row.simulated_sd_pct == pytest.approx(100 * 25 / 120)


def test_only_differences_beyond_the_noise_judge_the_simulation():
    a = [run("a", 1, 100.0, 90.0), run("a", 2, 102.0, 91.0)]
    clearly_less = [run("b", 1, 80.0, 95.0), run("b", 2, 81.0, 96.0)]
    noise = [run("c", 1, 90.0, 99.0), run("c", 2, 112.0, 99.0)]
    assert order_agreement([*a, *clearly_less], ["a", "b"]) == (0, 1)
    agreeing = [msgspec.structs.replace(one, simulated_s=70.0) for one in clearly_less]
    assert order_agreement([*a, *agreeing], ["a", "b"]) == (1, 1)
    assert order_agreement([*a, *noise], ["a", "c"]) == (0, 0)


def test_one_of_simulation_and_replay_has_to_be_chosen(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["ablate", "bfcl"])
    assert "--simulate --replay is required" in capsys.readouterr().err
