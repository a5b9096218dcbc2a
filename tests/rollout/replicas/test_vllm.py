"""A real vLLM engine as a replica: what it generates, what it hits in its cache, and what it leaves behind."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from makespan.rollout.errors import ReplicaFailure
from makespan.rollout.replicas.base import Completion, Request, Sampling
from makespan.rollout.replicas.vllm import VllmReplica, divide_cores
from tests.conftest import host_config
from tests.processes import descendants, wait_until_gone

pytestmark = pytest.mark.vllm

TOLERANCE = 0.02
"""Largest difference of a log-probability that counts as the same; the token ids must be equal.

The model's logits are bfloat16. Between 1 and 2 their last place is worth 0.0078, and how a prompt is cut into chunks,
how many sequences share a step and which kernel the CPU picks decide now and then which way one is rounded: 0.0079 was
the largest difference measured here (0.0 on another CPU).
"""

CHAINS, TURNS = 8, 3


def request(name: str, prompt: list[int], tokens: int = 24, **sampling: object) -> Request:
    settings = {"max_tokens": tokens, "min_tokens": tokens, "temperature": 0.0, **sampling}
    return Request(
        request_id=f"{name}-{time.monotonic_ns()}",
        trajectory_id=name,
        turn=0,
        prompt_ids=prompt,
        sampling=Sampling(**settings),  # type: ignore[arg-type]
    )


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(count)]


def one_token(prompt: list[int]) -> None:
    """Corrupt one token, five before the end."""
    prompt[-5] = 3 + (prompt[-5] - 2) % 997


def stale_state(prompt: list[int]) -> None:
    """Put another conversation's first block in place of this one's, as a hit on a wrong checkpoint would."""
    prompt[:384] = words(1234, 384)


async def chains(
    replica: VllmReplica, concurrency: int, corrupt: Callable[[list[int]], None] | None = None
) -> list[list[Completion]]:
    """Multi-turn conversations whose prompts extend what was generated, so many of them at once.

    `corrupt` changes the first prompt of the chains with an even number.
    """
    gate = asyncio.Semaphore(concurrency)

    async def chain(index: int) -> list[Completion]:
        prompt, turns = words(index, 500 + 130 * index), []
        if corrupt is not None and index % 2 == 0:
            corrupt(prompt)
        async with gate:
            for turn in range(TURNS):
                completion = await replica.generate(request(f"chain-{index}", list(prompt)))
                turns.append(completion)
                prompt += completion.token_ids + words(100 * index + turn, 90)
        return turns

    return await asyncio.gather(*(chain(index) for index in range(CHAINS)))


def largest_difference(a: list[list[Completion]], b: list[list[Completion]]) -> float:
    """Of any log-probability; infinite where the tokens differ."""
    worst = 0.0
    for first, second in zip([t for c in a for t in c], [t for c in b for t in c], strict=True):
        if first.token_ids != second.token_ids:
            return math.inf
        assert first.logprobs is not None
        assert second.logprobs is not None
        worst = max([worst, *(abs(x - y) for x, y in zip(first.logprobs, second.logprobs, strict=True))])
    return worst


@pytest.fixture(scope="module")
def reference(engines, on_loop) -> list[list[Completion]]:
    on_loop(engines["cached"].reset_prefix_cache())
    return on_loop(chains(engines["cached"], 1))


def test_greedy_generation_does_not_depend_on_concurrency(engines, on_loop, reference):
    on_loop(engines["cached"].reset_prefix_cache())
    assert largest_difference(reference, on_loop(chains(engines["cached"], 8))) <= TOLERANCE


def test_greedy_generation_is_the_same_again_from_a_warm_cache(engines, on_loop, reference):
    again = on_loop(chains(engines["cached"], 8))
    assert any(turn.cached_tokens for chain in again for turn in chain)  # else this would test nothing
    assert largest_difference(reference, again) <= TOLERANCE


@pytest.mark.parametrize("concurrency", [1, 8])
def test_greedy_generation_does_not_depend_on_prefix_caching(engines, on_loop, reference, concurrency):
    uncached = on_loop(chains(engines["uncached"], concurrency))
    assert {turn.cached_tokens for chain in uncached for turn in chain} == {0}
    assert largest_difference(reference, uncached) <= TOLERANCE


@pytest.mark.parametrize("corrupt", [one_token, stale_state])
def test_one_corrupted_token_or_state_is_noticed(engines, on_loop, reference, corrupt):
    corrupted = on_loop(chains(engines["cached"], 8, corrupt))
    assert largest_difference(reference[0::2], corrupted[0::2]) > TOLERANCE
    assert largest_difference(reference[1::2], corrupted[1::2]) <= TOLERANCE  # and only where it is


def test_the_next_turn_hits_the_whole_blocks_of_the_last_prompt(engines, on_loop):
    block = engines["cached"].ready.block_tokens
    assert block == 384  # by hand: 128 * ceil(134,912 bytes of state / (128 * 512 bytes of KV a token))
    prompt = words(77, 1000)
    first = on_loop(engines["cached"].generate(request("hit", list(prompt))))
    second = on_loop(engines["cached"].generate(request("hit", prompt + first.token_ids + words(78, 50))))
    assert first.cached_tokens == 0
    assert second.cached_tokens == 999 // block * block == 768


def test_a_completion_carries_its_costs(engines, on_loop):
    completion = on_loop(engines["cached"].generate(request("cost", words(5, 700), tokens=40)))
    assert len(completion.token_ids) == 40
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 40
    assert all(value <= 0 for value in completion.logprobs)
    assert completion.stop_reason == "length"
    assert completion.preemptions == 0
    assert completion.prefill_s > 0
    assert completion.decode_s > 0
    assert completion.queue_s >= 0


def test_generation_ends_at_a_stop_token(engines, on_loop):
    free = on_loop(engines["cached"].generate(request("stop", words(6, 60), tokens=20)))
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    stopped = on_loop(
        engines["cached"].generate(request("stop", words(6, 60), tokens=20, min_tokens=0, stop_token_ids=(stop,)))
    )
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.stop_reason == "stop"


def test_a_seeded_request_whose_prompt_takes_several_steps_does_not_kill_the_engine(engines, on_loop):
    prompt = words(7, 5_000)  # three chunks of 2,048
    completion = on_loop(engines["cached"].generate(request("seed", prompt, tokens=8, temperature=1.0, seed=11)))
    assert len(completion.token_ids) == 8


def test_a_prompt_that_does_not_fit_is_refused_with_the_engines_sentence(engines, on_loop):
    with pytest.raises(ReplicaFailure, match="maximum context length is 16384") as caught:
        on_loop(engines["cached"].generate(request("long", words(8, 17_000))))
    assert not caught.value.retryable


def test_a_cancelled_call_frees_its_place_in_the_engine(engines, on_loop):
    async def go() -> int:
        replica = engines["cached"]
        tasks = [
            asyncio.create_task(replica.generate(request(f"long-{i}", words(i, 200), tokens=8_000))) for i in range(8)
        ]
        await asyncio.sleep(0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # All eight places of the engine were taken: this answers at once only if they were freed.
        async with asyncio.timeout(30):
            await replica.generate(request("after", words(9, 50), tokens=4))
        load = replica.load()
        assert load is not None
        return load.running

    assert on_loop(go()) == 0


def test_cores_are_divided_without_overlap():
    assert divide_cores(2, [0, 1, 2, 3, 4]) == [(0, 1, 2), (3, 4)]
    assert divide_cores(1, [4, 5]) == [(4, 5)]
    assert divide_cores(3, [0, 1]) == [(0,), (1,), (0,)]


# Faults


@pytest.mark.parametrize("victim", ["host", "engine"])
def test_a_killed_process_fails_its_requests_and_leaves_nothing(victim, on_loop, embedded_model, tmp_path):
    """Takes a start-up of vLLM: it protects against engines that go on using a GPU after their run is over."""

    async def go() -> tuple[set[int], ReplicaFailure, tuple[str, ...]]:
        replica = await VllmReplica.start("victim", host_config(embedded_model), tmp_path / "victim.log", 300.0)
        host = replica._process.pid
        family = {host, *descendants(host)}
        assert len(family) >= 3  # the host, vLLM's engine and its worker
        waiting = asyncio.create_task(replica.generate(request("victim", words(1, 100), tokens=8_000)))
        await asyncio.sleep(0.5)
        os.kill(host if victim == "host" else engine_of(host), signal.SIGKILL)
        with pytest.raises(ReplicaFailure) as caught:
            await asyncio.wait_for(waiting, 60)
        with pytest.raises(ReplicaFailure, match="not running"):
            await replica.generate(request("victim", words(1, 100)))
        await replica.close()
        return family, caught.value, replica.ready.shared_memory

    family, failure, segments = on_loop(go())
    assert failure.retryable
    assert "replica victim died" in str(failure)
    assert not wait_until_gone(family)
    assert segments  # else the next line would test nothing
    assert not [name for name in segments if (Path("/dev/shm") / name).exists()]


def engine_of(host: int) -> int:
    """vLLM's engine process under a host."""
    for pid in descendants(host):
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("the host has no engine process")


def test_an_engine_that_cannot_start_says_why(on_loop, embedded_model, tmp_path):
    async def go() -> None:
        config = host_config(embedded_model, kv_cache_bytes=2**20)
        await VllmReplica.start("tiny", config, tmp_path / "tiny.log", 300.0)

    with pytest.raises(ReplicaFailure, match="replica tiny did not start") as caught:
        on_loop(go())
    assert "KV cache" in str(caught.value)


def test_a_start_that_takes_too_long_is_ended(on_loop, embedded_model, tmp_path):
    async def go() -> set[int]:
        starting = asyncio.create_task(
            VllmReplica.start("slow", host_config(embedded_model), tmp_path / "slow.log", 4.0)
        )
        await asyncio.sleep(3.0)
        family = descendants(os.getpid())
        with pytest.raises(ReplicaFailure, match=r"did not start in 4 s"):
            await starting
        return family - descendants(os.getpid())

    gone = on_loop(go())
    assert gone
    assert not wait_until_gone(gone)
