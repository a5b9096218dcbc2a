"""What it buys to keep a trajectory's blocks between its turns, and what it can cost, on a real vLLM engine.

    python benchmarks/pinned_turns.py --json pinned_turns.json

vLLM's streaming input lets one request go on: after each turn it waits with its blocks held, and the next turn
computes only what is new. A prefix cache finds whole blocks of what was computed before, if nobody has overwritten
them. The same trajectories run both ways, in turn. What waits so cannot be preempted: the second part fills a small
pool with waiting turns and asks for something else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from makespan.integrations.models import resolve
from makespan.rollout.replicas.vllm_host import engine_arguments, prepare_process
from makespan.rollout.replicas.wire import HostConfig

TRAJECTORIES, TURNS = 12, 6
FIRST_TOKENS, NEW_TOKENS, GENERATED_TOKENS = 300, 90, 16
WAIT_S = 0.8
"""Between two turns, in place of an environment."""

AMPLE_BLOCKS = 400
SCARCE_BLOCKS = 56
HOLDERS = 28
"""More waiting turns than the small pool has room for."""
ROUNDS = 3
STUCK_S = 10.0


class Way(msgspec.Struct, kw_only=True):
    """One way of running the trajectories."""

    seconds: list[float] = []
    computed_tokens: list[int] = []
    """Of all prompts; vLLM counts only the first prompt of a request that goes on."""


class Part(msgspec.Struct, kw_only=True):
    """Both ways with one pool."""

    blocks: int
    cached: Way
    pinned: Way | None
    """None: not all trajectories can be pinned at once."""


class Engine:
    """A vLLM engine in this process, with a count of the prompt tokens that it computed."""

    def __init__(self, model: Path, num_blocks: int) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        self.computed_tokens = 0
        engine = self

        class Counter(StatLoggerBase):  # type: ignore[misc]  # vLLM is not type-checked here
            def __init__(self, *_: Any, **__: Any) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if iteration_stats is not None:
                    engine.computed_tokens += iteration_stats.prompt_token_stats.computed

            def log_engine_initialized(self) -> None: ...

        config = HostConfig(
            model=str(model),
            max_model_len=2048,
            max_num_seqs=32,
            kv_cache_bytes=1 << 30,
            max_num_batched_tokens=2048,
            prefix_caching=True,
            cores=(min(os.sched_getaffinity(0)),),
            seed=0,
            num_blocks=num_blocks,
        )
        prepare_process(config)
        self.llm = AsyncLLM.from_engine_args(engine_arguments(config), stat_loggers=[Counter])


def sampling() -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=GENERATED_TOKENS,
        min_tokens=GENERATED_TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def stretches(rng: random.Random) -> list[list[int]]:
    """What each turn adds to a trajectory's prompt."""
    lengths = [FIRST_TOKENS] + [NEW_TOKENS] * (TURNS - 1)
    return [[rng.randrange(3, 400) for _ in range(length)] for length in lengths]


async def cached(engine: Engine, name: str, new: list[list[int]]) -> None:
    """A request a turn."""
    prompt: list[int] = []
    for turn, stretch in enumerate(new):
        prompt += stretch
        generated: list[int] = []
        async for output in engine.llm.generate({"prompt_token_ids": prompt}, sampling(), f"{name}|{turn}"):
            generated += output.outputs[0].token_ids
        prompt += generated
        await asyncio.sleep(WAIT_S)


async def pinned(engine: Engine, name: str, new: list[list[int]], release: asyncio.Event | None = None) -> None:
    """One request, which is given a stretch a turn; its last token is not computed yet and comes with the next."""
    from vllm.engine.protocol import StreamingInput

    stream: asyncio.Queue[list[int] | None] = asyncio.Queue()

    async def source() -> AsyncIterator[Any]:
        while (stretch := await stream.get()) is not None:
            yield StreamingInput(prompt={"prompt_token_ids": stretch}, sampling_params=sampling())

    left = list(new)
    stream.put_nowait(left.pop(0))
    generated: list[int] = []
    async for output in engine.llm.generate(source(), sampling(), name):
        generated += output.outputs[0].token_ids
        if len(generated) == GENERATED_TOKENS:
            await asyncio.sleep(WAIT_S)
            if release is not None:
                await release.wait()
            stream.put_nowait([generated[-1], *left.pop(0)] if left else None)
            generated = []


async def run(engine: Engine, way: Way, one: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    batch = [stretches(rng) for _ in range(TRAJECTORIES)]
    await engine.llm.reset_prefix_cache()
    computed, began_s = engine.computed_tokens, time.monotonic()
    await asyncio.gather(*(one(engine, f"{one.__name__}-{seed}-{n}", new) for n, new in enumerate(batch)))
    way.seconds.append(time.monotonic() - began_s)
    way.computed_tokens.append(engine.computed_tokens - computed)


async def compare(engine: Engine, blocks: int, *, all_at_once: bool) -> Part:
    part = Part(blocks=blocks, cached=Way(), pinned=Way() if all_at_once else None)
    for number in range(ROUNDS):
        await run(engine, part.cached, cached, number)
        if part.pinned is not None:
            await run(engine, part.pinned, pinned, number)
    return part


async def stuck(engine: Engine) -> tuple[bool, float]:
    """Fill the pool with waiting turns, then ask for one more turn: whether it had to wait until they were released,
    and how long it took after that."""
    rng, release = random.Random(0), asyncio.Event()
    waiting = [asyncio.create_task(pinned(engine, f"held-{n}", stretches(rng)[:1], release)) for n in range(HOLDERS)]
    await asyncio.sleep(8.0)
    other = asyncio.create_task(cached(engine, "other", stretches(rng)[:1]))
    done, _ = await asyncio.wait([other], timeout=STUCK_S)
    released_s = time.monotonic()
    release.set()
    await asyncio.gather(other, *waiting)
    return not done, time.monotonic() - released_s


def describe(part: Part) -> str:
    text = f"{part.blocks} blocks: cached {statistics.median(part.cached.seconds):.1f} s, "
    text += f"{statistics.median(part.cached.computed_tokens):,.0f} prompt tokens computed"
    if part.pinned is not None:
        ratios = [a / b for a, b in zip(part.pinned.seconds, part.cached.seconds, strict=True)]
        text += f"; pinned {statistics.median(part.pinned.seconds):.1f} s; time ratio {statistics.median(ratios):.2f}"
        text += f" ({min(ratios):.2f} to {max(ratios):.2f})"
    return text


async def measure(model: Path, blocks: int, *, all_at_once: bool) -> tuple[Part, tuple[bool, float] | None]:
    engine = Engine(model, blocks)
    try:
        await run(engine, Way(), cached, -1)  # warm up
        part = await compare(engine, blocks, all_at_once=all_at_once)
        return part, None if all_at_once else await stuck(engine)
    finally:
        engine.llm.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures")
    options = parser.parse_args()
    model = resolve("embedded")
    ample, _ = asyncio.run(measure(model, AMPLE_BLOCKS, all_at_once=True))
    scarce, held = asyncio.run(measure(model, SCARCE_BLOCKS, all_at_once=False))
    assert held is not None
    print(describe(ample), describe(scarce), sep="\n", file=sys.stderr)
    says = f"had to wait for their release, and then took {held[1]:.1f} s" if held[0] else "was served beside them"
    print(f"a turn beside {HOLDERS} waiting ones on {SCARCE_BLOCKS} blocks {says}", file=sys.stderr)
    if options.json is not None:
        document = {"ample": ample, "scarce": scarce, "stuck": held[0]}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
