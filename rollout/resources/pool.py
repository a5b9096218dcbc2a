"""What becomes of caches when so many trajectories share a replica: vLLM's block pool, a turn at a time.

Between turns nothing is reserved. A finished turn leaves three kinds of blocks: those without a hash, which are reused
first; its hashed blocks, which join one queue with everybody's; and, older in that queue, the checkpoints of its
earlier turns, which nobody will ask for again. New blocks are taken from the front of the queue. Of one turn the
attention blocks stand there before the state, the last ones first, and without them the state is of no use: the first
block that a waiting trajectory loses costs it its whole cache.

`play` runs a batch through such a pool in steps of the calibrated cost. It allocates a turn's blocks when the turn
starts, where vLLM hands them out as it computes; `vllm_play.py` runs the same batch through vLLM's own scheduler.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from makespan.rollout.resources.footprint import ModelFootprint
from makespan.rollout.resources.profile import Turns
from makespan.rollout.resources.shape import ResourceError
from makespan.rollout.simulation.cost import InferenceCost


class PoolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch found and computed."""

    concurrency: int
    prompt_tokens: int
    cached_tokens: int
    reusable_tokens: int
    """What would have been found had nothing been overwritten."""
    generated_tokens: int
    seconds: float
    queued_turns: int
    """Turns that had to wait for blocks."""

    @property
    def cached_share(self) -> float:
        """Of what could have been found, the share that was."""
        return self.cached_tokens / self.reusable_tokens if self.reusable_tokens else 1.0

    @property
    def recomputed_tokens(self) -> int:
        """Prompt tokens computed again although they could have been found."""
        return self.reusable_tokens - self.cached_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class _Chain:
    """One trajectory on the replica."""

    __slots__ = ("context", "finish_step", "found", "held", "hit", "kept", "left", "number", "turn", "turns")

    def __init__(self, number: int, turns: Turns) -> None:
        self.number = number
        self.turns = turns
        self.turn = -1
        self.context = 0
        self.hit = 0
        """What its next turn finds if nothing of it is overwritten."""
        self.found = 0
        self.kept = 0
        """Blocks of it in the queue that its next turn can use; 0 once one of them is gone."""
        self.held = 0
        self.left = 0
        """Prompt tokens still to be prefilled."""
        self.finish_step = 0

    def __lt__(self, other: _Chain) -> bool:
        return self.number < other.number


class _Pool:
    """Blocks held, and the queue of those that may be overwritten, oldest first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.held = 0
        self._queue: OrderedDict[int, tuple[int, _Chain | None]] = OrderedDict()
        self._queued = 0
        self._entries = 0
        self._of: dict[_Chain, int] = {}

    def fits(self, blocks: int) -> bool:
        return self.held + blocks <= self.blocks

    def take(self, blocks: int) -> None:
        """Hold so many more blocks, overwriting the oldest of the queue where no other is free."""
        self.held += blocks
        excess = self.held + self._queued - self.blocks
        while excess > 0 and self._queue:
            entry, (count, chain) = next(iter(self._queue.items()))
            if chain is not None:
                chain.kept = 0
                del self._of[chain]
            gone = min(count, excess)
            if gone == count:
                del self._queue[entry]
            else:
                self._queue[entry] = (count - gone, None)
            self._queued -= gone
            excess -= gone

    def release(self, blocks: int) -> None:
        self.held -= blocks

    def keep(self, blocks: int, chain: _Chain | None) -> None:
        """Queue blocks that hold something, of `chain` if its next turn can use them."""
        if blocks <= 0:
            return
        self._queue[self._entries] = (blocks, chain)
        if chain is not None:
            self._of[chain] = self._entries
            chain.kept = blocks
        self._entries += 1
        self._queued += blocks

    def reclaim(self, chain: _Chain) -> int:
        """Take what the queue still has of a trajectory out of it; the blocks of it."""
        entry = self._of.pop(chain, None)
        if entry is None:
            return 0
        count, _ = self._queue.pop(entry)
        self._queued -= count
        chain.kept = 0
        return count


class _Replica:
    def __init__(
        self,
        footprint: ModelFootprint,
        num_blocks: int,
        trajectories: Sequence[Turns],
        concurrency: int,
        cost: InferenceCost,
        max_num_seqs: int,
    ) -> None:
        self.footprint = footprint
        self.cost = cost
        self.max_num_seqs = max_num_seqs
        self.pool = _Pool(num_blocks - 1)
        self.outside = deque(_Chain(number, turns) for number, turns in enumerate(trajectories))
        self.timers: list[tuple[float, _Chain]] = []
        self.queue: deque[_Chain] = deque()
        self.prefilling: deque[_Chain] = deque()
        self.decoding: list[tuple[int, _Chain]] = []
        self.decoding_context = 0
        self.now_s = 0.0
        self.step = 0
        self.prompt = self.cached = self.reusable = self.generated = self.queued = 0
        for _ in range(min(concurrency, len(self.outside))):
            self.arrive(self.outside.popleft())

    def arrive(self, chain: _Chain) -> None:
        chain.turn += 1
        chain.context += chain.turns[chain.turn].new_tokens
        self.queue.append(chain)

    def need(self, chain: _Chain) -> int:
        return self.footprint.blocks_held(chain.context + chain.turns[chain.turn].generated_tokens - 1)

    def start_waiting(self) -> None:
        while self.queue and len(self.prefilling) + len(self.decoding) < self.max_num_seqs:
            chain = self.queue[0]
            need = self.need(chain)
            if not self.pool.fits(need):
                if need > self.pool.blocks:
                    raise ResourceError(
                        f"a context of {chain.context:,} tokens needs {need} blocks, and there are {self.pool.blocks}; "
                        "more memory, or shorter trajectories"
                    )
                self.queued += 1
                return
            self.queue.popleft()
            whole = bool(chain.kept)
            self.pool.reclaim(chain)
            chain.found = chain.hit if whole else 0
            self.prompt += chain.context
            self.cached += chain.found
            self.reusable += chain.hit
            chain.held = need
            chain.left = chain.context - chain.found
            self.pool.take(need)
            if whole:
                self.pool.keep(self.footprint.states_left, None)  # the checkpoint that it started from
            self.prefilling.append(chain)

    def end_turn(self, chain: _Chain) -> None:
        turn = chain.turns[chain.turn]
        footprint = self.footprint
        self.generated += turn.generated_tokens
        chain.hit = footprint.next_hit_tokens(
            chain.context,
            turn.generated_tokens,
            found_tokens=chain.found,
            known_tokens=max(0, chain.context - turn.new_tokens - 1),
        )
        chain.context += turn.generated_tokens
        self.pool.release(chain.held)
        whole = footprint.attention_groups * ((chain.context - 1) // footprint.block_tokens)
        if footprint.prefix_caching:
            states = footprint.recurrent_groups if chain.hit else 0
            last = chain.turn + 1 == len(chain.turns)
            self.pool.keep(whole + states, None if last else chain)
        if chain.turn + 1 < len(chain.turns):
            heapq.heappush(self.timers, (self.now_s + turn.environment_s, chain))
        elif self.outside:
            self.arrive(self.outside.popleft())

    def advance(self) -> None:
        """Work until something changes."""
        decoding, context = len(self.decoding), self.decoding_context
        head = self.prefilling[0] if self.prefilling else None
        chunk = min(head.left, self.cost.chunk_tokens) if head else 0
        work = (decoding, context, 1 if head else 0, chunk)
        steps = (
            max(1, head.left // self.cost.chunk_tokens) if head else 1 << 40
        )  # a last, smaller chunk comes by itself
        if self.decoding:
            steps = min(steps, self.decoding[0][0] - self.step)
        if self.timers:
            wait_s = max(0.0, self.timers[0][0] - self.now_s)
            steps = min(steps, self.cost.steps_begun(wait_s, *work))
        self.now_s += self.cost.steps_s(steps, *work)
        self.step += steps
        self.decoding_context += decoding * steps
        if head is not None:
            head.left -= chunk * steps
            if head.left <= 0:
                self.prefilling.popleft()
                tokens = head.turns[head.turn].generated_tokens
                head.finish_step = self.step + tokens - 1
                heapq.heappush(self.decoding, (head.finish_step, head))
                self.decoding_context += head.context + 1
        while self.decoding and self.decoding[0][0] <= self.step:
            _, chain = heapq.heappop(self.decoding)
            self.decoding_context -= chain.context + chain.turns[chain.turn].generated_tokens
            self.end_turn(chain)

    def run(self) -> None:
        while True:
            while self.timers and self.timers[0][0] <= self.now_s:
                self.arrive(heapq.heappop(self.timers)[1])
            self.start_waiting()
            if self.prefilling or self.decoding:
                self.advance()
            elif self.timers:
                self.now_s = self.timers[0][0]
            else:
                return


def play(
    footprint: ModelFootprint,
    num_blocks: int,
    trajectories: Sequence[Turns],
    concurrency: int,
    cost: InferenceCost,
    *,
    max_num_seqs: int = 1024,
) -> PoolOutcome:
    """Run a batch on one replica, `concurrency` trajectories at once, from an empty cache.

    Raises `ResourceError` for a context that does not fit at all.
    """
    replica = _Replica(footprint, num_blocks, trajectories, concurrency, cost, max_num_seqs)
    replica.run()
    return PoolOutcome(
        concurrency=concurrency,
        prompt_tokens=replica.prompt,
        cached_tokens=replica.cached,
        reusable_tokens=replica.reusable,
        generated_tokens=replica.generated,
        seconds=replica.now_s,
        queued_turns=replica.queued,
    )


FALLEN = 0.97
"""Below this share of what could have been found, cached tokens have started to fall."""

FARTHEST = 4
"""The search for the knee ends at so many times its guess."""

WAVES = 3
"""Trajectories of a played batch for each one at once: the first start together, later ones do not."""


def knee(
    footprint: ModelFootprint, num_blocks: int, trajectories: Sequence[Turns], cost: InferenceCost, *, guess: int
) -> int:
    """The concurrency up to which nearly nothing is overwritten that a turn could have used; at least 1.

    Trajectories that move in step make the share fall and rise again: what counts is its first fall. Below a third of
    `guess` (`reference_concurrency`) only enough is tried to find one that holds.
    """

    def holds(concurrency: int) -> bool:
        outcome = play(footprint, num_blocks, batch(trajectories, concurrency), concurrency, cost)
        return outcome.cached_share >= FALLEN and not outcome.queued_turns

    known = max(1, guess // 3)
    while known > 1 and not holds(known):
        known //= 2
    while known < FARTHEST * guess and holds(known + 1):
        known += 1
    return known


def batch(trajectories: Sequence[Turns], concurrency: int) -> list[Turns]:
    """`WAVES` trajectories for each one at once."""
    return [trajectories[index % len(trajectories)] for index in range(WAVES * concurrency)]
