"""The simulated replica against a replica that is stepped one step at a time, and against sums done by hand."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from makespan.rollout.errors import ReplicaFailure
from makespan.rollout.replicas.base import Completion, Request, Sampling
from makespan.rollout.replicas.simulated import ReplicaHardware, SimulatedReplica
from makespan.rollout.resources.footprint import CacheSettings
from makespan.rollout.resources.profile import ProfileTurn, Turns
from makespan.rollout.resources.vllm_wire import Play, Question, ask
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.loop import run_virtual
from makespan.rollout.simulation.tokens import CountedTokens

COST = InferenceCost(step_s=1.0, sequence_s=0.1, context_s=0.001, prefill_s=0.01, chunk_tokens=100)


def request(trajectory: str, prompt: int, generated: int, turn: int = 0, priority: int = 0) -> Request:
    return Request(
        request_id=f"{trajectory}/{turn}",
        trajectory_id=trajectory,
        turn=turn,
        prompt_ids=CountedTokens(prompt),
        sampling=Sampling(max_tokens=generated, min_tokens=generated),
        priority=priority,
    )


def served(hardware: ReplicaHardware, arrivals: list[tuple[float, Request]]) -> dict[str, tuple[float, Completion]]:
    """When each request ended, and with what."""
    ends: dict[str, tuple[float, Completion]] = {}

    async def ask(replica: SimulatedReplica, at_s: float, asked: Request) -> None:
        await asyncio.sleep(at_s)
        completion = await replica.generate(asked)
        ends[asked.request_id] = (asyncio.get_running_loop().time(), completion)

    async def main() -> None:
        replica = SimulatedReplica("replica-0", hardware)
        async with asyncio.TaskGroup() as group:
            for at_s, asked in arrivals:
                group.create_task(ask(replica, at_s, asked))
        assert replica.load().running == 0
        assert replica.load().kv_used_fraction == 0.0
        await replica.close()

    run_virtual(main())
    return ends


def test_one_inference_takes_its_chunks_and_its_steps():
    end_s, completion = served(ReplicaHardware(cost=COST), [(5.0, request("a", 250, 3))])["a/0"]
    prefill_s = 3 * 1.1 + 2.5
    decode_s = 2 * 1.1 + 0.001 * (251 + 252)
    assert end_s == pytest.approx(5.0 + prefill_s + decode_s)
    assert completion.queue_s == 0.0
    assert completion.prefill_s == pytest.approx(prefill_s)
    assert completion.decode_s == pytest.approx(decode_s)
    assert (completion.cached_tokens, completion.preemptions, len(completion.token_ids)) == (0, 0, 3)


def test_the_next_turn_hits_all_but_the_last_token_of_the_one_before():
    arrivals = [(0.0, request("a", 200, 10)), (1000.0, request("a", 260, 5, turn=1))]
    completion = served(ReplicaHardware(cost=COST), arrivals)["a/1"][1]
    assert completion.cached_tokens == 200 + 10 - 1
    assert completion.prefill_s == pytest.approx(1.1 + 0.01 * 51)


def test_a_hit_is_a_multiple_of_the_block():
    arrivals = [(0.0, request("a", 200, 10)), (1000.0, request("a", 260, 5, turn=1))]
    completion = served(ReplicaHardware(cost=COST, block_tokens=64), arrivals)["a/1"][1]
    assert completion.cached_tokens == 192


def test_a_hybrid_finds_the_prompt_before_but_not_what_was_generated():
    arrivals = [(0.0, request("a", 200, 40)), (1000.0, request("a", 300, 5, turn=1))]
    hybrid = ReplicaHardware(cost=COST, block_tokens=16, keeps_generated=False)
    assert served(hybrid, arrivals)["a/1"][1].cached_tokens == 192  # 199 = 12 blocks of 16 and 7
    attention = ReplicaHardware(cost=COST, block_tokens=16)
    assert served(attention, arrivals)["a/1"][1].cached_tokens == 224  # 239 = 14 blocks of 16 and 15


def test_a_groups_first_prompt_is_found_once_it_was_computed():
    arrivals = [
        (0.0, request("g#0", 250, 5)),
        (0.5, request("g#1", 250, 5)),  # starts while the first is still prefilled
        (100.0, request("g#2", 300, 5)),
        (100.0, request("other#0", 250, 5)),
        (300.0, request("g#3", 250, 5)),
    ]

    def cached(shared: bool) -> list[int | None]:
        hardware = ReplicaHardware(cost=COST, block_tokens=20, shared_prompts=shared)
        ends = served(hardware, arrivals)
        return [ends[asked.request_id][1].cached_tokens for _, asked in arrivals]

    assert cached(True) == [0, 0, 240, 0, 240]
    assert cached(False) == [0] * 5


def test_an_arrival_waits_for_the_step_in_progress_and_then_shares_the_steps():
    # a's prompt is done at 1.1 + 1.0 = 2.1 s; its decode steps take 1.1 + 0.001 * context (101, 102, …).
    arrivals = [(0.0, request("a", 100, 100)), (2.5, request("b", 50, 1))]
    ends = served(ReplicaHardware(cost=COST), arrivals)
    first_step_end_s = 2.1 + 1.1 + 0.101
    mixed_s = 1.0 + 2 * 0.1 + 0.001 * 102 + 0.01 * 50
    end_s, completion = ends["b/0"]
    assert completion.queue_s == pytest.approx(first_step_end_s - 2.5)
    assert end_s == pytest.approx(first_step_end_s + mixed_s)


def test_a_waiting_cache_is_overwritten_least_recently_used_first():
    hardware = ReplicaHardware(cost=COST, kv_tokens=1000)
    arrivals = [
        (0.0, request("old", 300, 2)),
        (100.0, request("new", 300, 2)),
        (200.0, request("big", 500, 2)),  # 302 + 302 + 502 do not fit
        (300.0, request("new", 310, 2, turn=1)),
        (400.0, request("old", 310, 2, turn=1)),
    ]
    ends = served(hardware, arrivals)
    assert ends["new/1"][1].cached_tokens == 301
    assert ends["old/1"][1].cached_tokens == 0


@pytest.mark.parametrize(("checkpoint_tokens", "found"), [(150, 200), (250, 0)])
def test_a_waiting_cache_holds_whole_blocks_of_the_prompt_and_one_state(checkpoint_tokens, found):
    """a leaves 250 prompt and 60 generated tokens: two blocks of 100, and a state. Beside it b runs with 160 tokens, a
    block less one, and 300 of states: 559 and 350 of 1,000, and with a larger state 9 too many."""
    hardware = ReplicaHardware(
        cost=COST,
        kv_tokens=1000,
        block_tokens=100,
        state_tokens=300,
        checkpoint_tokens=checkpoint_tokens,
        keeps_generated=False,
    )
    arrivals = [(0.0, request("a", 250, 60)), (200.0, request("b", 150, 10)), (400.0, request("a", 320, 5, turn=1))]
    assert served(hardware, arrivals)["a/1"][1].cached_tokens == found


HYBRID = ReplicaHardware(cost=COST, block_tokens=10, state_tokens=20, checkpoint_tokens=10, keeps_generated=False)
"""A running prompt of 9 holds 9 tokens, half a block (4), two states (20) and the token that it generates: 34."""


@pytest.mark.parametrize(("kv_tokens", "found"), [(114, 20), (113, 0)])
def test_a_checkpoint_that_the_next_turn_has_left_behind_is_overwritten_in_its_turn(kv_tokens, found):
    """Of `old` two blocks and a checkpoint are given back (30), of the turns of `new` what it finds of the second (40)
    and the checkpoint of the first (10). With the 34 of `last` that makes 114, and where one token of it does not fit,
    the oldest has to go: not what is of no use."""
    hardware = msgspec.structs.replace(HYBRID, kv_tokens=kv_tokens)
    arrivals = [
        (0.0, request("old", 25, 1)),
        (100.0, request("new", 25, 1)),
        (200.0, request("new", 35, 1, turn=1)),
        (300.0, request("last", 9, 1)),
        (400.0, request("old", 35, 1, turn=1)),
    ]
    ends = served(hardware, arrivals)
    assert ends["new/1"][1].cached_tokens == 20
    assert ends["old/1"][1].cached_tokens == found


@pytest.mark.parametrize(("kv_tokens", "found"), [(194, (20, 20)), (193, (0, 20))])
def test_a_checkpoint_is_as_old_as_its_prompt_and_not_as_its_turn(kv_tokens, found):
    """The turn of `long` begins before that of `short` and ends after it. Given back are 30 of each, and ten blocks of
    what `long` generated, which it cannot find; with the 34 of `last` 194. The checkpoint of `long` goes first."""
    hardware = msgspec.structs.replace(HYBRID, kv_tokens=kv_tokens)
    arrivals = [
        (0.0, request("long", 25, 100)),
        (5.0, request("short", 25, 2)),
        (500.0, request("last", 9, 1)),
        (600.0, request("short", 35, 1, turn=1)),
        (700.0, request("long", 135, 1, turn=1)),
    ]
    ends = served(hardware, arrivals)
    assert ends["short/0"][0] < ends["long/0"][0]
    assert tuple(ends[name][1].cached_tokens for name in ("long/1", "short/1")) == found


def test_the_newest_gives_way_when_the_running_ones_outgrow_the_memory():
    hardware = ReplicaHardware(cost=COST, kv_tokens=400)
    ends = served(hardware, [(0.0, request("a", 100, 200)), (1.0, request("b", 100, 200))])
    assert ends["a/0"][1].preemptions == 0
    assert ends["b/0"][1].preemptions >= 1
    assert len(ends["b/0"][1].token_ids) == 200
    assert ends["b/0"][0] > ends["a/0"][0]


def test_a_turn_that_can_never_fit_is_refused():
    with pytest.raises(ExceptionGroup) as raised:
        served(ReplicaHardware(cost=COST, kv_tokens=100), [(0.0, request("a", 90, 11))])
    assert raised.group_contains(ReplicaFailure, match="101 tokens")


def test_an_inference_as_large_as_the_memory_is_served():
    ends = served(ReplicaHardware(cost=COST, kv_tokens=100), [(0.0, request("a", 90, 10))])
    assert ends["a/0"][1].preemptions == 0


def test_smaller_priorities_start_first():
    hardware = ReplicaHardware(cost=COST, max_sequences=1)
    arrivals = [
        (0.0, request("running", 100, 50)),
        (1.0, request("late", 100, 5, priority=5)),
        (2.0, request("urgent", 100, 5, priority=-1)),
    ]
    ends = served(hardware, arrivals)
    assert ends["urgent/0"][0] < ends["late/0"][0]


@pytest.mark.parametrize("cancel_at_s", [0.5, 3.0, 40.0])
def test_a_cancelled_request_gives_back_its_memory(cancel_at_s):
    """Cancelled in its prefill, in its decoding and while it waits behind another one."""

    async def main() -> None:
        replica = SimulatedReplica("replica-0", ReplicaHardware(cost=COST, kv_tokens=400))
        task = asyncio.create_task(replica.generate(request("gone", 200, 100)))
        other = asyncio.create_task(replica.generate(request("other", 150, 30)))
        await asyncio.sleep(cancel_at_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await other
        load = replica.load()
        assert (load.running, load.waiting, load.kv_used_fraction) == (0, 0, 0.0)

    run_virtual(main())


class Stepped:
    """The same replica, one step at a time with plain lists: slow and easy to read."""

    def __init__(self, hardware: ReplicaHardware, arrivals: list[tuple[float, Request]]) -> None:
        self.hardware = hardware
        self.arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
        self.waiting: list[dict] = []
        self.running: list[dict] = []
        self.cached: list[tuple[str, int]] = []  # oldest first: (trajectory, tokens held)
        self.ends: dict[str, tuple[float, int, int]] = {}
        self.now_s = 0.0

    def run(self) -> dict[str, tuple[float, int, int]]:
        """Request id: (end, cached tokens, preemptions)."""
        number = 0
        while self.arrivals or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now_s = max(self.now_s, self.arrivals[0][0])
            while self.arrivals and self.arrivals[0][0] <= self.now_s:
                asked = self.arrivals.pop(0)[1]
                self.waiting.append(
                    {"request": asked, "number": number, "context": len(asked.prompt_ids), "generated": 0, "hit": None,
                     "preemptions": 0, "left": 0}
                )  # fmt: skip
                number += 1
            self.start()
            self.make_room()
            self.step()
        return self.ends

    def held(self) -> int:
        return sum(sequence["context"] for sequence in self.running)

    def evict(self, tokens: int) -> None:
        while self.held() + sum(held for _, held in self.cached) + tokens > self.hardware.kv_tokens:
            self.cached.pop(0)

    def start(self) -> None:
        while self.waiting and self.room_in_chunk() and len(self.running) < self.hardware.max_sequences:
            first = min(self.waiting, key=lambda sequence: sequence["number"])
            if self.held() + first["context"] + 1 > self.hardware.kv_tokens:
                return
            self.waiting.remove(first)
            name = first["request"].trajectory_id
            hit = sum(held for trajectory, held in self.cached if trajectory == name)
            self.cached = [entry for entry in self.cached if entry[0] != name]
            hit = 0 if first["generated"] or not hit else min(hit - 1, first["context"] - 1)
            self.evict(first["context"] + 1)
            first["left"] = first["context"] - hit
            if first["hit"] is None:
                first["hit"] = hit
            self.running.append(first)

    def room_in_chunk(self) -> bool:
        return sum(sequence["left"] for sequence in self.running) < self.hardware.cost.chunk_tokens

    def make_room(self) -> None:
        while self.held() + len(self.running) > self.hardware.kv_tokens:
            last = self.running.pop()
            last["preemptions"] += 1
            last["left"] = 0
            self.waiting.append(last)
        self.evict(len(self.running))

    def step(self) -> None:
        cost, budget = self.hardware.cost, self.hardware.cost.chunk_tokens
        decoding = [sequence for sequence in self.running if not sequence["left"]]
        chunks = []
        for sequence in self.running:
            if sequence["left"] and budget:
                tokens = min(budget, sequence["left"])
                budget -= tokens
                chunks.append((sequence, tokens))
        prefilled = sum(tokens for _, tokens in chunks)
        self.now_s += cost.step_s + cost.sequence_s * (len(decoding) + len(chunks)) + cost.prefill_s * prefilled
        self.now_s += cost.context_s * sum(sequence["context"] for sequence in decoding)
        grown = [*decoding]
        for sequence, tokens in chunks:
            sequence["left"] -= tokens
            if not sequence["left"]:
                grown.append(sequence)
        for sequence in grown:
            sequence["context"] += 1
            sequence["generated"] += 1
        # Of those that end in the same step the ones that decoded leave first, in the order of their arrival.
        done = [s for s in grown if s["generated"] == s["request"].sampling.max_tokens]
        for sequence in sorted(done, key=lambda s: (s not in decoding, s["number"])):
            asked = sequence["request"]
            self.running.remove(sequence)
            self.cached = [entry for entry in self.cached if entry[0] != asked.trajectory_id]
            self.cached.append((asked.trajectory_id, sequence["context"]))
            self.ends[asked.request_id] = (self.now_s, sequence["hit"], sequence["preemptions"])


def random_arrivals(rng: random.Random, trajectories: int) -> list[tuple[float, Request]]:
    arrivals = []
    for number in range(trajectories):
        at_s, prompt = rng.uniform(0, 300), rng.randrange(20, 260)
        for turn in range(rng.randrange(1, 4)):
            generated = rng.randrange(1, 60)
            arrivals.append((at_s, request(f"t{number}", prompt, generated, turn)))
            prompt += generated + rng.randrange(5, 80)
            at_s += rng.uniform(400, 900)
    return arrivals


@pytest.mark.parametrize("kv_tokens", [100_000, 3000, 900])
@pytest.mark.parametrize("max_sequences", [1024, 4])
def test_jumping_over_steps_gives_what_stepping_gives(kv_tokens, max_sequences):
    preemptions = lost = 0
    for seed in range(12):
        arrivals = random_arrivals(random.Random(seed), 20)
        hardware = ReplicaHardware(cost=COST, kv_tokens=kv_tokens, max_sequences=max_sequences)
        expected = Stepped(hardware, arrivals).run()
        got = served(hardware, arrivals)
        assert got.keys() == expected.keys()
        for name, (end_s, hit, preempted) in expected.items():
            assert got[name][0] == pytest.approx(end_s, rel=1e-9)
            assert (got[name][1].cached_tokens, got[name][1].preemptions) == (hit, preempted)
            preemptions += preempted
            lost += name[-1] != "0" and hit == 0
    # Scarce memory must have been scarce, or this compares nothing of it.
    if kv_tokens == 100_000:
        assert (preemptions, lost) == (0, 0)
    if kv_tokens == 900:
        assert preemptions > 0
        assert lost > 0


def cached_share(hardware: ReplicaHardware, trajectories: tuple[Turns, ...]) -> float:
    """The share of their prompts that trajectories which all start at once find on one replica."""
    prompts: list[int] = []
    cached: list[int] = []

    async def play(replica: SimulatedReplica, name: str, turns: Turns) -> None:
        context = 0
        for number, turn in enumerate(turns):
            context += turn.new_tokens
            completion = await replica.generate(request(name, context, turn.generated_tokens, number))
            prompts.append(context)
            cached.append(completion.cached_tokens or 0)
            context += turn.generated_tokens
            await asyncio.sleep(turn.environment_s)

    async def main() -> None:
        replica = SimulatedReplica("replica-0", hardware)
        async with asyncio.TaskGroup() as group:
            for number, turns in enumerate(trajectories):
                group.create_task(play(replica, f"t{number}", turns))
        await replica.close()

    run_virtual(main())
    return sum(cached) / sum(prompts)


@pytest.mark.vllm
def test_caches_are_lost_as_in_vllms_scheduler(embedded_model):
    """Three to eight growing trajectories on 36 blocks: vLLM's scheduler finds 71% of the prompts down to 3%, and the
    simulated replica the same within 3 points. Caches that keep both states that their turn held are off by 7, and
    those that keep none by 35."""
    rng = random.Random(5)
    batches = [
        tuple(
            tuple(
                ProfileTurn(
                    new_tokens=rng.randrange(20, 130) if turn else rng.randrange(300, 700),
                    generated_tokens=rng.randrange(5, 25),
                    environment_s=rng.uniform(0.1, 1.2),
                )
                for turn in range(rng.randrange(20, 40))
            )
            for _ in range(count)
        )
        for count in (3, 4, 5, 6, 8)
    ]
    cost = InferenceCost(step_s=0.0135, sequence_s=0.0004, context_s=4e-7, prefill_s=0.00045, chunk_tokens=2048)
    settings = CacheSettings()
    answer = ask(
        Question(
            model=str(embedded_model),
            tensor_parallel=1,
            platform="cpu",
            settings=(settings,),
            max_model_len=8_192,
            max_num_batched_tokens=cost.chunk_tokens,
            plays=tuple(
                Play(settings=settings, num_blocks=36, trajectories=batch, concurrency=len(batch), cost=cost)
                for batch in batches
            ),
        ),
        200.0,
    )
    theirs = [
        sum(turn.cached_tokens for turn in played.turns) / sum(turn.prompt_tokens for turn in played.turns)
        for played in answer.played
    ]
    assert theirs[0] > 0.6
    assert theirs[-1] < 0.1

    def deviations(checkpoint_tokens: int) -> list[float]:
        hardware = ReplicaHardware(
            cost=cost,
            kv_tokens=35 * 384,
            block_tokens=384,
            state_tokens=6 * 384,
            checkpoint_tokens=checkpoint_tokens,
            keeps_generated=False,
        )
        shares = [cached_share(hardware, batch) for batch in batches]
        return [abs(ours - other) for ours, other in zip(shares, theirs, strict=True)]

    assert max(deviations(3 * 384)) < 0.03
    assert max(deviations(6 * 384)) > 0.06
    assert max(deviations(0)) > 0.3
