"""Whole simulated batches against closed forms, and what every batch must keep to."""

from __future__ import annotations

import asyncio
import math
import random
import time

import pytest

from makespan.rollout.errors import ConfigError
from makespan.rollout.history import ChainRecord, History
from makespan.rollout.replay.environments import STEP, GatedSlots
from makespan.rollout.replay.trace import Trace, TraceHeader, TraceTrajectory, TraceTurn
from makespan.rollout.replicas.simulated import ReplicaHardware
from makespan.rollout.simulation.batch import Hardware, Policies, alone_s, simulate
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.ladder import measured
from makespan.rollout.simulation.loop import run_virtual

AMPLE = ReplicaHardware(kv_tokens=1 << 40)


def chain(name: str, actions: list[float | None], *, group: str = "", reset_s: float = 0.0, generated: int = 50):
    """A trajectory whose every turn adds 100 observed tokens."""
    prompt, turns = 1000, []
    for number, seconds in enumerate(actions):
        observed = 100 if number + 1 < len(actions) else 0
        turns.append(
            TraceTurn(
                prompt_tokens=prompt, generated_tokens=generated, observation_tokens=observed, environment_s=seconds
            )
        )
        prompt += generated + observed
    return TraceTrajectory(trajectory_id=name, task_id=name, group=group or name, turns=tuple(turns), reset_s=reset_s)


def trace(*trajectories: TraceTrajectory) -> Trace:
    return Trace(TraceHeader(), trajectories)


def random_trace(seed: int, chains: int, turns: int = 6) -> Trace:
    rng = random.Random(seed)
    return trace(
        *(
            chain(
                f"c{number}",
                [rng.uniform(0.1, 9) for _ in range(rng.randrange(1, turns))],
                group=f"g{number // 4}",
                reset_s=rng.uniform(0, 3),
                generated=rng.randrange(10, 300),
            )
            for number in range(chains)
        )
    )


def test_a_single_chain_takes_the_sum_of_its_parts():
    work = trace(chain("a", [3.0, 0.5, None], reset_s=7.0))
    _, analysis = measured(work, Hardware(slots=1, replica=AMPLE), Policies(), seed=0)
    cost = InferenceCost()
    # 1,000 tokens in one chunk; then 101 new ones (the last generated token is computed with the observation).
    inference_s = 0.0
    for uncached, prompt in ((1000, 1000), (101, 1150), (101, 1300)):
        inference_s += 0.010 + 50e-6 + uncached * 50e-6
        inference_s += sum(0.010 + 50e-6 + 27e-9 * (prompt + 1 + step) for step in range(49))
    assert analysis.makespan_s == pytest.approx(7.0 + 3.5 + inference_s)
    assert alone_s(work.trajectories[0], cost)[-1] == pytest.approx(7.0 + 3.5 + inference_s)
    assert analysis.lower_bound_s == pytest.approx(analysis.makespan_s)
    assert analysis.tokens.recomputed == 0


def test_an_action_that_never_happens_waits_for_no_slot():
    """The last turn of `quick` leads to no action, so that the slot that `slow` holds does not keep it."""
    work = trace(chain("slow", [1000.0]), chain("quick", [None]))
    log, _ = measured(work, Hardware(slots=1, replica=AMPLE), Policies(), seed=0)
    ends = {event.trajectory_id: event.monotonic_s for event in log.of("ended")}
    assert ends["quick#0"] < 2
    assert ends["slow#0"] > 1000


def test_equal_chains_share_the_slots_in_rounds():
    # Inference takes no time to speak of; 12 chains of one action of 100 s on 4 slots take 3 rounds.
    nothing = InferenceCost(step_s=1e-9, sequence_s=0.0, context_s=0.0, prefill_s=0.0)
    work = trace(*(chain(f"c{number}", [100.0]) for number in range(12)))
    hardware = Hardware(slots=4, replica=ReplicaHardware(kv_tokens=1 << 40, cost=nothing))
    _, analysis = measured(work, hardware, Policies(), seed=0)
    assert analysis.makespan_s == pytest.approx(300.0, abs=1e-3)
    assert analysis.slot_classes[STEP].utilisation == pytest.approx(1.0, abs=1e-3)


def test_coupled_admission_never_waits_for_a_slot_and_admits_as_many_as_there_are():
    work = random_trace(1, 40)
    log, analysis = measured(work, Hardware(slots=5), Policies(admission="coupled", concurrency=5), seed=0)
    assert analysis.phases_s.slot_queue == 0.0
    running = most = 0
    for _, event in log.events:
        running += {"admitted": 1, "ended": -1}.get(event.kind, 0)
        most = max(most, running)
    assert most == 5


def test_the_oracle_serves_the_longest_remaining_chain_first():
    short, long = chain("short", [10.0]), chain("long", [10.0, 10.0, 10.0])
    work = trace(chain("first", [20.0]), short, long)
    ends = {}
    for scheduling in ("fifo", "oracle"):
        log, _ = measured(work, Hardware(slots=1, replica=AMPLE), Policies(scheduling=scheduling), seed=0)
        ends[scheduling] = [event.trajectory_id for event in log.of("ended")]
    assert ends["fifo"] == ["first#0", "short#0", "long#0"]
    assert ends["oracle"].index("long#0") > ends["oracle"].index("first#0")
    log, _ = measured(work, Hardware(slots=1, replica=AMPLE), Policies(scheduling="oracle"), seed=0)
    acts = [event for event in log.of("act") if event.trajectory_id in ("short#0", "long#0")]
    assert acts[0].trajectory_id == "long#0"


@pytest.mark.parametrize(("scheduling", "first"), [("progress", "old#0"), ("least-progress", "new#0")])
def test_progress_orders_waiting_actions_by_the_turns_behind_them(scheduling, first):
    # `old` comes back for its second action while `blocker` holds the slot; `new` waits for its first one.
    work = trace(chain("old", [1.0, 5.0]), chain("blocker", [50.0]), chain("new", [5.0]))
    log, _ = measured(work, Hardware(slots=1, replica=AMPLE), Policies(scheduling=scheduling), seed=0)
    after = [event.trajectory_id for event in log.of("act") if event.monotonic_s > 50]
    waiting = [name for name in after if name in ("old#0", "new#0")]
    assert waiting[0] == first


def test_the_same_seed_gives_the_same_log_byte_for_byte(tmp_path):
    hardware = Hardware(slots=3, replica=ReplicaHardware(kv_tokens=6000))
    work = random_trace(2, 60)
    paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl", "other.jsonl")]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        simulate(work, hardware, Policies(admission="fixed", concurrency=20), seed=seed, log_path=path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes() != paths[2].read_bytes()


@pytest.mark.parametrize("scheduling", ["fifo", "progress", "least-progress", "oracle"])
def test_every_policy_does_the_same_work(scheduling):
    work = random_trace(3, 50)
    hardware = Hardware(slots=4, replica=ReplicaHardware(kv_tokens=8000))
    _, analysis = measured(work, hardware, Policies(scheduling=scheduling), seed=0)
    turns = [turn for trajectory in work.trajectories for turn in trajectory.turns]
    assert analysis.states == {"finished": 50}
    assert analysis.inferences == len(turns)
    assert analysis.tokens.generated == sum(turn.generated_tokens for turn in turns)
    assert analysis.tokens.prompt == sum(turn.prompt_tokens for turn in turns)
    assert analysis.slot_classes[STEP].service_s == pytest.approx(sum(turn.environment_s for turn in turns))
    assert analysis.makespan_s >= analysis.lower_bound_s - 1e-6


@pytest.mark.parametrize("scheduling", ["fifo", "progress", "oracle"])
def test_no_slot_idles_while_an_action_waits(scheduling):
    work = random_trace(4, 60)
    log, _ = measured(work, Hardware(slots=4, replica=AMPLE), Policies(scheduling=scheduling), seed=0)
    changes = []
    for event in log.of("act"):
        granted_s = event.monotonic_s - event.data["service_s"]
        asked_s = granted_s - event.data["queue_s"]
        if event.data["queue_s"] > 1e-9:
            changes += [(asked_s, 0, 1), (granted_s, 0, -1)]
        changes += [(granted_s, 1, 0), (event.monotonic_s, -1, 0)]
    running = waiting = 0
    changes.sort()
    for place, (at_s, run, wait) in enumerate(changes):
        running += run
        waiting += wait
        lasts_s = changes[place + 1][0] - at_s if place + 1 < len(changes) else 0.0
        assert running == 4 or waiting == 0 or lasts_s < 1e-6


def test_memory_that_binds_is_seen_in_recomputation():
    work = random_trace(5, 40)
    _, ample = measured(work, Hardware(slots=4, replicas=1, replica=AMPLE), Policies(), seed=0)
    _, scarce = measured(
        work, Hardware(slots=4, replicas=1, replica=ReplicaHardware(kv_tokens=3000)), Policies(), seed=0
    )
    assert ample.tokens.recomputed == 0
    assert scarce.tokens.recomputed > 10_000
    assert scarce.makespan_s > ample.makespan_s


@pytest.mark.parametrize(
    ("lengths", "order", "started"),
    [([40] * 50, "forecast", 12), ([10, 20, 40, 160] * 12, "forecast", 4), ([40] * 50, "arrival", 4)],
)
def test_where_lengths_are_alike_all_start_before_the_first_one_ends(lengths, order, started):
    history = History()
    history.learn(ChainRecord(f"old-{n}", length, length, length, 150 * length) for n, length in enumerate(lengths))
    work = trace(*(chain(f"c{n}", [1.0] * 40, group=f"g{n // 4}") for n in range(12)))
    policies = Policies(admission="parking", reference=4, order=order)
    hardware = Hardware(slots=4, replicas=1, replica=ReplicaHardware(kv_tokens=20_000))
    log, analysis = measured(work, hardware, policies, seed=0, history=history)
    first_end_s = min(event.monotonic_s for event in log.of("ended"))
    assert len({event.trajectory_id for event in log.of("generate") if event.monotonic_s < first_end_s}) == started
    assert analysis.states == {"finished": 12}


def test_oversampling_stops_at_the_needed_count():
    work = random_trace(6, 40)
    log, analysis = measured(work, Hardware(slots=4), Policies(needed=30), seed=0)
    assert analysis.states == {"finished": 30, "cancelled": 10}
    _, whole = measured(work, Hardware(slots=4), Policies(), seed=0)
    assert analysis.makespan_s < whole.makespan_s
    assert [event.data["stopped"] for event in log.of("batch_end")] == [True]


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="progress"):
        measured(random_trace(7, 2), Hardware(slots=1), Policies(scheduling="progres"), seed=0)


def waits(servers: int, arrivals: int, rate: float, service, seed: int) -> float:
    """Mean wait of Poisson arrivals at gated slots, after a warm-up of a tenth of them."""
    rng = random.Random(seed)

    async def main() -> float:
        slots = GatedSlots(servers)
        waited: list[float] = []

        async def customer(name: str, service_s: float) -> None:
            queue_s, _ = await slots.hold(name, 0.0, service_s)
            waited.append(queue_s)

        async with asyncio.TaskGroup() as group:
            for number in range(arrivals):
                await asyncio.sleep(rng.expovariate(rate))
                group.create_task(customer(str(number), service(rng)))
        kept = waited[arrivals // 10 :]
        return sum(kept) / len(kept)

    return run_virtual(main())


def erlang_wait_s(servers: int, rate: float, service_s: float) -> float:
    """Mean wait in M/M/k: Erlang C over the spare capacity."""
    load = rate * service_s
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    queued = last / (sum(load**k / math.factorial(k) for k in range(servers)) + last)
    return queued * service_s / (servers - load)


@pytest.mark.parametrize("servers", [1, 4])
def test_slots_under_poisson_arrivals_wait_as_erlang_says(servers):
    """The standard error of the mean wait is 5 to 6% here; a slot more changes it by more than 40%."""
    rate = 0.7 * servers
    measured_s = sum(waits(servers, 20_000, rate, lambda rng: rng.expovariate(1.0), seed) for seed in range(3)) / 3
    assert measured_s == pytest.approx(erlang_wait_s(servers, rate, 1.0), rel=0.15)
    assert measured_s != pytest.approx(erlang_wait_s(servers + 1, rate, 1.0), rel=0.3)


def test_one_slot_with_general_service_waits_as_pollaczek_and_khinchine_say():
    def service(rng: random.Random) -> float:
        return 0.25 if rng.random() < 0.75 else 2.25  # mean 0.75, second moment 1.3125

    measured_s = sum(waits(1, 20_000, 0.8, service, seed) for seed in range(3)) / 3
    assert measured_s == pytest.approx(0.8 * 1.3125 / (2 * (1 - 0.6)), rel=0.1)
    assert measured_s != pytest.approx(0.8 * 0.75**2 / (2 * (1 - 0.6)), rel=0.3)  # as if all services were equal


def test_a_cancelled_wait_gives_its_place_up():
    async def main() -> tuple[int, int]:
        slots = GatedSlots(1)
        holder = asyncio.create_task(slots.hold("holder", 0.0, 10.0))
        await asyncio.sleep(1)
        waiting = asyncio.create_task(slots.hold("waiting", 0.0, 10.0))
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await holder
        figures = slots.statistics()
        return figures.running, figures.waiting

    assert run_virtual(main()) == (0, 0)


def test_a_turn_costs_about_the_same_in_a_large_batch_as_in_a_small_one():
    """Of 200 and of 4,000 trajectories on as many replicas and slots for each; the best of three, as others run too."""

    def seconds_a_turn(chains: int) -> float:
        work = trace(*(chain(f"c{number}", [2.0, 3.0, 4.0]) for number in range(chains)))
        hardware = Hardware(slots=max(1, chains // 20), replicas=max(1, chains // 200), replica=AMPLE)
        best = math.inf
        for _ in range(3 if chains < 1000 else 1):
            began_s = time.process_time()
            simulate(work, hardware, Policies(), seed=0, log_path=None)
            best = min(best, (time.process_time() - began_s) / (3 * chains))
        return best

    assert seconds_a_turn(4_000) < 3 * seconds_a_turn(200)
