"""Where cached tokens start to fall, and where throughput turns over: predicted against measured on a real vLLM.

For several sizes of the block pool and two shapes of workload, trajectories run on one engine at growing concurrency,
with real inference and waits in place of environments. The same batches are predicted twice: by the block pool's model
(`rollout/resources/pool.py`), and by vLLM's own scheduler on a model that computes nothing. The reference concurrency
is printed beside them; it uses neither.

    python benchmarks/resource_model.py --json resource_model.json

The model is a hybrid with random weights; the pool is made scarce by overriding the number of blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from makespan.integrations.models import resolve
from makespan.rollout.replicas.base import Request, Sampling
from makespan.rollout.replicas.vllm import VllmReplica
from makespan.rollout.replicas.wire import HostConfig
from makespan.rollout.resources import calibration, pool
from makespan.rollout.resources.footprint import CacheSettings, ModelFootprint, footprint, reference_concurrency
from makespan.rollout.resources.profile import ProfileTurn, Turns, WorkloadProfile, contexts, from_numbers
from makespan.rollout.resources.vllm_wire import Play, Question, ServedTurn, ask
from makespan.rollout.simulation.cost import InferenceCost

POOLS = (60, 90, 120)
CHUNK_TOKENS = 2048


def growing(count: int, seed: int) -> tuple[Turns, ...]:
    """Alike trajectories whose contexts grow much: 5 turns from 300 to 2,860 tokens."""
    rng = random.Random(seed)
    return tuple(
        tuple(
            ProfileTurn(
                new_tokens=600 if turn else 300,
                generated_tokens=32,
                environment_s=rng.uniform(0.75, 2.25) if turn < 4 else 0.0,
            )
            for turn in range(5)
        )
        for _ in range(count)
    )


def spread(count: int, seed: int) -> tuple[Turns, ...]:
    """Unlike trajectories with long first prompts and small steps."""
    return from_numbers(
        prompt_tokens=1_200,
        turns=6,
        generated_tokens=24,
        observation_tokens=150,
        environment_s=1.0,
        spread=0.35,
        sample=count,
        seed=seed,
    ).trajectories


SHAPES = {"growing": growing, "spread": spread}


class Point(msgspec.Struct, kw_only=True):
    """One concurrency of one pool and shape."""

    concurrency: int
    measured_share: float
    pool_share: float
    scheduler_share: float
    measured_tokens_per_s: float
    pool_tokens_per_s: float
    scheduler_tokens_per_s: float
    preemptions: int


class Row(msgspec.Struct, kw_only=True):
    """One pool and shape."""

    shape: str
    num_blocks: int
    reference_concurrency: int
    fits_at_the_end: int
    points: list[Point]

    def knee(self, name: str) -> int:
        """The last concurrency before the share first falls."""
        last = 0
        for point in self.points:
            if getattr(point, f"{name}_share") < pool.FALLEN:
                return last
            last = point.concurrency
        return last

    def best(self, name: str) -> int:
        """The concurrency with the most generated tokens a second."""
        return max(self.points, key=lambda point: float(getattr(point, f"{name}_tokens_per_s"))).concurrency


class Measurement:
    """One batch on the engine."""

    def __init__(self, replica: VllmReplica, found: ModelFootprint) -> None:
        self.replica = replica
        self.footprint = found
        self.cached = self.reusable = self.generated = self.preemptions = 0

    async def trajectory(self, name: str, turns: Turns, rng: random.Random) -> None:
        ids: list[int] = []
        known = hit = 0
        for number, turn in enumerate(turns):
            ids += [rng.randrange(3, 400) for _ in range(turn.new_tokens)]
            tokens = turn.generated_tokens
            answer = await self.replica.generate(
                Request(
                    request_id=f"{name}-{number}-{rng.getrandbits(48):x}",
                    trajectory_id=name,
                    turn=number,
                    prompt_ids=ids,
                    sampling=Sampling(max_tokens=tokens, min_tokens=tokens, temperature=0.0),
                )
            )
            found = answer.cached_tokens or 0
            self.cached += found
            self.reusable += hit
            self.generated += tokens
            self.preemptions += answer.preemptions or 0
            hit = self.footprint.next_hit_tokens(len(ids), tokens, found_tokens=found, known_tokens=known)
            known = len(ids) + tokens - 1
            ids = ids + list(answer.token_ids)
            await asyncio.sleep(turn.environment_s)

    async def run(self, trajectories: tuple[Turns, ...], concurrency: int) -> float:
        """Seconds that the batch took."""
        await self.replica.reset_prefix_cache()
        waiting = list(enumerate(trajectories))[::-1]

        async def slot() -> None:
            while waiting:
                number, turns = waiting.pop()
                await self.trajectory(f"t{number}", turns, random.Random(f"{concurrency}/{number}"))

        began_s = time.monotonic()
        await asyncio.gather(*(slot() for _ in range(concurrency)))
        return time.monotonic() - began_s


async def measure(model: Path, found: ModelFootprint, num_blocks: int, rows: list[Row], logs: Path) -> None:
    """Fill in what the engine does at every point of the rows of one pool."""
    config = HostConfig(
        model=str(model),
        max_model_len=16_384,
        max_num_seqs=64,
        kv_cache_bytes=2**29,
        max_num_batched_tokens=CHUNK_TOKENS,
        prefix_caching=True,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        seed=0,
        num_blocks=num_blocks,
    )
    replica = await VllmReplica.start("measured", config, logs / f"{num_blocks}.log", 600.0)
    try:
        assert replica.ready.num_blocks == num_blocks
        assert replica.ready.block_tokens == found.block_tokens
        for row in rows:
            for point in row.points:
                batch = SHAPES[row.shape](2 * point.concurrency, point.concurrency)
                measurement = Measurement(replica, found)
                seconds = await measurement.run(batch, point.concurrency)
                point.measured_share = measurement.cached / measurement.reusable
                point.measured_tokens_per_s = measurement.generated / seconds
                point.preemptions = measurement.preemptions
                print(f"{row.shape} {num_blocks} blocks: {msgspec.json.encode(point).decode()}", flush=True)
    finally:
        await replica.close()


def predicted(found: ModelFootprint, model: Path, pools: list[int], cost: InferenceCost, reach: int) -> list[Row]:
    """Rows with both predictions, at concurrencies around the reference."""
    rows, plays = [], []
    for num_blocks in pools:
        for shape, make in SHAPES.items():
            sample = WorkloadProfile(source=shape, trajectories=make(64, 0))
            reference = reference_concurrency(found, num_blocks, sample.contexts_tokens)
            longest = sum(contexts(turns)[-1] for turns in sample.trajectories) / len(sample.trajectories)
            fits = found.sequences_that_fit(num_blocks, round(longest))
            points = []
            for concurrency in range(max(1, min(reference, fits) - 1), reference + reach + 1):
                batch = make(2 * concurrency, concurrency)
                told = pool.play(found, num_blocks, batch, concurrency, cost)
                points.append(
                    Point(
                        concurrency=concurrency,
                        measured_share=0.0,
                        pool_share=told.cached_share,
                        scheduler_share=0.0,
                        measured_tokens_per_s=0.0,
                        pool_tokens_per_s=told.tokens_per_s,
                        scheduler_tokens_per_s=0.0,
                        preemptions=0,
                    )
                )
                plays.append(
                    Play(
                        settings=found.settings,
                        num_blocks=num_blocks,
                        trajectories=batch,
                        concurrency=concurrency,
                        max_num_seqs=64,
                        cost=cost,
                        limit_s=60.0,
                    )
                )
            rows.append(
                Row(
                    shape=shape,
                    num_blocks=num_blocks,
                    reference_concurrency=reference,
                    fits_at_the_end=fits,
                    points=points,
                )
            )
    question = Question(
        model=str(model),
        tensor_parallel=1,
        platform="cpu",
        settings=(found.settings,),
        max_model_len=16_384,
        max_num_batched_tokens=CHUNK_TOKENS,
        plays=tuple(plays),
    )
    answer = ask(question, 1200.0)
    for point, played in zip([point for row in rows for point in row.points], answer.played, strict=True):
        point.scheduler_share = share(found, played.turns)
        generated = sum(turn.generated_tokens for turn in played.turns)
        point.scheduler_tokens_per_s = generated / played.simulated_s
    return rows


def share(found: ModelFootprint, turns: Sequence[ServedTurn]) -> float:
    """Of what could have been found, what the scheduler found."""
    cached = reusable = 0
    last: dict[int, tuple[int, int]] = {}
    for turn in turns:
        hit, known = last.get(turn.trajectory, (0, 0))
        cached, reusable = cached + turn.cached_tokens, reusable + hit
        hit = found.next_hit_tokens(
            turn.prompt_tokens, turn.generated_tokens, found_tokens=turn.cached_tokens, known_tokens=known
        )
        last[turn.trajectory] = (hit, turn.prompt_tokens + turn.generated_tokens - 1)
    return cached / reusable if reusable else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=int, nargs="+", default=list(POOLS), help="sizes of the block pool")
    parser.add_argument("--reach", type=int, default=3, help="concurrencies beyond the reference")
    parser.add_argument("--calibration", type=Path, help="costs of inference, from makespan calibrate embedded")
    parser.add_argument("--json", type=Path, help="write all figures")
    parser.add_argument("--predict-only", action="store_true", help="no engine")
    options = parser.parse_args()
    cost = InferenceCost(step_s=0.006, sequence_s=0.0, context_s=0.0, prefill_s=210e-6, chunk_tokens=CHUNK_TOKENS)
    if options.calibration is not None:
        cost = calibration.read(options.calibration).cost
    model = resolve("embedded")
    found = footprint(model, platform="cpu", settings=CacheSettings())
    rows = predicted(found, model, options.pools, cost, options.reach)
    if not options.predict_only:
        with tempfile.TemporaryDirectory(prefix="makespan-") as logs:
            for num_blocks in options.pools:
                of_pool = [row for row in rows if row.num_blocks == num_blocks]
                asyncio.run(measure(model, found, num_blocks, of_pool, Path(logs)))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    print(
        "shape     blocks  reference  fits at end | knee: measured  pool  scheduler | best: measured  pool  scheduler"
    )
    for row in rows:
        knees = [row.knee(name) for name in ("measured", "pool", "scheduler")]
        bests = [row.best(name) for name in ("measured", "pool", "scheduler")]
        print(
            f"{row.shape:9} {row.num_blocks:6} {row.reference_concurrency:10} {row.fits_at_the_end:12} |"
            f"{knees[0]:15} {knees[1]:5} {knees[2]:10} |{bests[0]:15} {bests[1]:5} {bests[2]:10}"
        )
        for point in row.points:
            print(
                f"    {point.concurrency:3}  share {point.measured_share:.2f} {point.pool_share:.2f} "
                f"{point.scheduler_share:.2f}  tokens/s {point.measured_tokens_per_s:6.1f} "
                f"{point.pool_tokens_per_s:6.1f} {point.scheduler_tokens_per_s:6.1f}  preemptions {point.preemptions}"
            )


if __name__ == "__main__":
    main()
