"""Plays a batch through vLLM's own scheduler, with a model that computes nothing.

The scheduler, its block pool and its prefix cache are vLLM's; only the forward pass is replaced, by a step that takes
as long as the cost model says. What is hit, what is lost, and how many blocks are held is therefore what a real engine
would do at the same moments, without weights and faster than it would. Runs in the child process of `vllm_specs.py`.
"""

from __future__ import annotations

import heapq
import itertools
import time
from typing import Any

from makespan.rollout.resources.profile import Turns
from makespan.rollout.resources.vllm_specs import Layout
from makespan.rollout.resources.vllm_wire import Play, Played, ServedTurn


def make_scheduler(layout: Layout, batch: Play) -> tuple[Any, Any]:
    """vLLM's scheduler over `batch.num_blocks` blocks, and the hash function of its requests' blocks."""
    from vllm.config import set_current_vllm_config
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    config = layout.config
    with set_current_vllm_config(config):
        specs = layout.specs(batch.settings)
        cache = config.cache_config
        cache.num_gpu_blocks_override = batch.num_blocks
        groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
        bytes_needed = (batch.num_blocks + 1) * kv_cache_utils._get_kv_cache_bytes_per_block(groups)
        kv_config = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, bytes_needed)
        cache.num_gpu_blocks = kv_config.num_blocks
        cache.block_size = min(group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups)
        block, hash_block = kv_cache_utils.resolve_kv_cache_block_sizes(kv_config, config)
        hasher = None
        if cache.enable_prefix_caching:
            hash_function = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
            kv_cache_utils.init_none_hash(hash_function)
            hasher = kv_cache_utils.get_request_block_hasher(hash_block, hash_function)
        config.scheduler_config.max_num_seqs = batch.max_num_seqs
        scheduler = Scheduler(
            config,
            kv_config,
            StructuredOutputManager(config),
            block_size=block,
            hash_block_size=hash_block,
            log_stats=True,
        )
    return scheduler, hasher


class _Trajectory:
    """Where one trajectory stands."""

    __slots__ = ("number", "request", "tokens", "turn", "turns")

    def __init__(self, number: int, turns: Turns) -> None:
        self.number = number
        self.turns = turns
        self.turn = -1
        self.tokens: list[int] = []
        self.request: Any = None


class _Batch:
    """The batch in progress: a loop over the scheduler's steps and the environments' timers."""

    def __init__(self, layout: Layout, batch: Play) -> None:
        self.batch = batch
        self.scheduler, self.hasher = make_scheduler(layout, batch)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.allocated = 0
        self._hand_out = self.pool.get_new_blocks
        self.pool.get_new_blocks = self._count_blocks
        self.now_s = 0.0
        self.words = itertools.count(3)
        self.waiting = [_Trajectory(n, turns) for n, turns in enumerate(batch.trajectories)][::-1]
        self.timers: list[tuple[float, int, _Trajectory]] = []
        self.active: dict[str, _Trajectory] = {}
        self.cached: dict[str, int] = {}
        self.served: list[ServedTurn] = []
        self.computed = 0
        self.peak = 0
        self.preemptions = 0

    def _count_blocks(self, count: int) -> Any:
        self.allocated += count
        return self._hand_out(count)

    def _new_tokens(self, count: int) -> list[int]:
        """Tokens that occur nowhere else, so that trajectories share nothing."""
        return list(itertools.islice(self.words, count))

    def begin_turn(self, trajectory: _Trajectory) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        trajectory.turn += 1
        turn = trajectory.turns[trajectory.turn]
        trajectory.tokens += self._new_tokens(turn.new_tokens)
        request_id = f"{trajectory.number}|{trajectory.turn}"
        sampling = SamplingParams(max_tokens=turn.generated_tokens, ignore_eos=True, temperature=0.0)
        trajectory.request = Request(
            request_id,
            list(trajectory.tokens),
            sampling,
            None,
            arrival_time=self.now_s,
            block_hasher=self.hasher,
        )
        self.active[request_id] = trajectory
        self.scheduler.add_request(trajectory.request)

    def end_turn(self, request_id: str) -> None:
        trajectory = self.active.pop(request_id)
        turn = trajectory.turns[trajectory.turn]
        self.preemptions += trajectory.request.num_preemptions
        self.served.append(
            ServedTurn(
                trajectory=trajectory.number,
                turn=trajectory.turn,
                prompt_tokens=len(trajectory.tokens),
                generated_tokens=turn.generated_tokens,
                cached_tokens=self.cached.pop(request_id, 0),
            )
        )
        trajectory.tokens = list(trajectory.request._all_token_ids)
        if trajectory.turn + 1 < len(trajectory.turns):
            heapq.heappush(self.timers, (self.now_s + turn.environment_s, trajectory.number, trajectory))
        elif self.waiting:
            self.begin_turn(self.waiting.pop())

    def step(self) -> bool:
        """One step of the engine; False when there is nothing to schedule."""
        from vllm.v1.outputs import ModelRunnerOutput

        schedule = self.scheduler.schedule()
        if schedule.total_num_scheduled_tokens == 0:
            return False
        held = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()
        self.peak = max(self.peak, held)
        ids = list(schedule.num_scheduled_tokens)
        sampled: list[list[int]] = []
        decoding = context = prefilled = 0
        for request_id in ids:
            request, tokens = self.scheduler.requests[request_id], schedule.num_scheduled_tokens[request_id]
            if request.num_computed_tokens < request.num_tokens:
                sampled.append([])
            else:
                sampled.append(self._new_tokens(1))
            if request.num_output_tokens and tokens == 1:
                decoding, context = decoding + 1, context + request.num_tokens
            else:
                prefilled += tokens
        self.computed += schedule.total_num_scheduled_tokens
        self.now_s += self.batch.cost.steps_s(1, decoding, context, len(ids) - decoding, prefilled)
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )
        finished = []
        for outputs in self.scheduler.update_from_output(schedule, output).values():
            for one in outputs.outputs:
                if one.prefill_stats is not None:
                    self.cached.setdefault(one.request_id, one.prefill_stats.num_cached_tokens)
                if one.finished:
                    finished.append(one.request_id)
        for request_id in finished:
            self.end_turn(request_id)
        return True

    def run(self) -> bool:
        """Play it to the end, or until the time is up; True when it came to its end."""
        deadline_s, idle = time.monotonic() + self.batch.limit_s, 0
        while self.waiting and len(self.active) < self.batch.concurrency:
            self.begin_turn(self.waiting.pop())
        while self.active or self.timers:
            if time.monotonic() > deadline_s:
                return False
            while self.timers and self.timers[0][0] <= self.now_s:
                self.begin_turn(heapq.heappop(self.timers)[2])
            if self.step():
                idle = 0
                continue
            # vLLM puts a request off to the next step when the state that it found was made in this one.
            idle += 1
            if idle > 1 and self.timers:
                self.now_s = max(self.now_s, self.timers[0][0])
            elif idle > 2:
                raise RuntimeError(
                    "the scheduler cannot place a request: the pool or max_model_len is too small for it"
                )
        return True


def play(layout: Layout, batch: Play) -> Played:
    """Play one batch from an empty cache."""
    playing = _Batch(layout, batch)
    complete = playing.run()
    return Played(
        turns=tuple(playing.served),
        preemptions=playing.preemptions,
        computed_tokens=playing.computed,
        peak_blocks=playing.peak,
        allocated_blocks=playing.allocated,
        simulated_s=playing.now_s,
        complete=complete,
    )
