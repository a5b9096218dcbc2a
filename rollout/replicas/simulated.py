"""A replica that computes nothing and takes as long as if it did.

It steps like vLLM's scheduler, on the running loop's clock: prompts are prefilled in chunks beside the decoding
sequences (`InferenceCost`), and the step that completes a prompt gives its first token. While nobody prefills, all
steps up to the next event are one timer; an arrival cuts that run at the end of the step in progress. An event costs
O(log n), whatever the number of tokens.

Memory holds `kv_tokens`. A sequence holds its context while it runs. When its turn is over, its cache stays: whole
blocks and one state, less than it held. What was given back first is overwritten first, and a cache that has lost a
part is lost: without its recurrent state a hybrid model's prefix is of no use. As in vLLM what nobody can find again is
overwritten in its turn, too: the rest of such a cache, the checkpoint of the turn before last, whole blocks of what a
hybrid's turn generated. A checkpoint is given back when its prompt was computed, the prompt when the turn is over.
Requests start in the order of priority and arrival, when the next chunk has room for some of their prompt and the
memory for all of it: until then they hold nothing, as in vLLM, and what is urgent need not wait for a long prompt that
has not begun. When the running ones outgrow the memory and no waiting cache is left to overwrite, the newest loses its
place: it starts again later, and computes everything anew. What a trajectory has left behind on this replica stays
until it is overwritten, as the replica cannot know that it will not come back.

Prefixes that different trajectories share are computed by each, as in the study of the regimes, unless
`shared_prompts` is set: then the first prompt of a group (what stands before the `#` of its trajectories' ids) is found
by those who start after one of them has computed it, for as long as the replica lives.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict, deque
from typing import NamedTuple

import msgspec

from makespan.rollout.errors import ConfigError, ReplicaFailure
from makespan.rollout.memory import Kept
from makespan.rollout.replicas.base import Completion, ReplicaLoad, Request
from makespan.rollout.simulation.cost import InferenceCost
from makespan.rollout.simulation.tokens import CountedTokens


class ReplicaHardware(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated replica."""

    kv_tokens: int = 840_000
    """Tokens of context that fit into its memory."""
    block_tokens: int = 1
    """Granularity of the cache: a hit is a multiple of it, and each running sequence wastes half a block on average."""
    state_tokens: int = 0
    """Memory of one sequence's recurrent state while it runs, in tokens of context."""
    checkpoint_tokens: int = 0
    """Memory of the state that a cache keeps between turns."""
    max_sequences: int = 1024
    """Sequences that run at once."""
    shared_prompts: bool = False
    """Whether trajectories of a group find each other's first prompt."""
    keeps_generated: bool = True
    """Whether a turn finds what the one before generated, too. vLLM keeps the states of a hybrid model at the ends of
    prompts only, by default: there it finds the prompt before, and computes what was generated again."""
    cost: InferenceCost = InferenceCost()

    # Its memory, as `ReplicaMemory` asks for it

    @property
    def capacity(self) -> int:
        return self.kv_tokens

    def held(self, context_tokens: int) -> int:
        return context_tokens + (self.block_tokens - 1) // 2 + self.state_tokens

    def kept(self, prompt_tokens: int, context_tokens: int) -> Kept:
        found = context_tokens if self.keeps_generated else prompt_tokens
        whole = found - found % self.block_tokens
        return Kept(whole, whole + self.checkpoint_tokens if whole else 0)


class _Sequence:
    """One request on the replica."""

    __slots__ = (
        "aborted",
        "answer",
        "arrived_s",
        "cached_tokens",
        "checkpoint",
        "context",
        "decode_from_s",
        "finish_step",
        "found_checkpoint",
        "generated",
        "order",
        "preemptions",
        "prefill_from_s",
        "prefill_left",
        "request",
        "settled",
        "target",
    )  # fmt: skip

    def __init__(self, request: Request, order: int, now_s: float, answer: asyncio.Future[Completion]) -> None:
        self.request = request
        self.order = order
        self.arrived_s = now_s
        self.answer = answer
        self.context = len(request.prompt_ids)
        """Tokens of its context; while it decodes: at `finish_step`."""
        self.target = request.sampling.max_tokens
        """Tokens that it still has to generate."""
        self.generated = 0
        self.prefill_left = 0
        self.cached_tokens: int | None = None
        self.prefill_from_s: float | None = None
        self.decode_from_s: float | None = None
        self.finish_step = -1
        self.found_checkpoint = False
        """Whether it began at a checkpoint that it does not leave behind again."""
        self.checkpoint: _GivenBack | None = None
        """Its own, once it is given back; None where the prompt is too short for one."""
        self.settled = False
        """Whether it holds no checkpoint any more."""
        self.preemptions = 0
        self.aborted = False

    def __lt__(self, other: _Sequence) -> bool:
        return self.order < other.order


class _GivenBack:
    """Memory that may be overwritten."""

    __slots__ = ("tokens", "trajectory_id")

    def __init__(self, tokens: int, trajectory_id: str | None) -> None:
        self.tokens = tokens
        self.trajectory_id = trajectory_id
        """Whose cache it is a part of; None: nobody finds it again."""


class _Cache(NamedTuple):
    """What a trajectory finds again."""

    end: int
    """Position up to which it reaches."""
    parts: tuple[_GivenBack, ...]


class SimulatedReplica:
    """See the module's text. A turn generates exactly `sampling.max_tokens` tokens."""

    def __init__(self, replica_id: str, hardware: ReplicaHardware) -> None:
        if hardware.kv_tokens < 1 or hardware.block_tokens < 1 or hardware.max_sequences < 1:
            raise ConfigError(f"a simulated replica needs memory, blocks and sequences of at least 1: {hardware}")
        self._replica_id = replica_id
        self._hardware = hardware
        self._cost = hardware.cost
        self._overhead = hardware.held(0)
        self._orders = 0
        self._preemptions = 0
        self._waiting: list[tuple[int, int, _Sequence]] = []
        self._running: dict[_Sequence, None] = {}  # in the order of their start; the last one is preempted first
        self._prefilling: deque[_Sequence] = deque()
        self._decoding: list[tuple[int, _Sequence]] = []  # heap by the step in which they finish
        self._aborted: list[_Sequence] = []
        self._sequences = 0  # that decode
        self._context = 0  # tokens of the sequences that decode
        self._held = 0  # tokens of memory that running sequences hold
        self._given_back: OrderedDict[_GivenBack, None] = OrderedDict()  # the next to be overwritten first
        self._given_back_tokens = 0
        self._caches: dict[str, _Cache] = {}  # by trajectory
        self._prompts: dict[str, int] = {}  # group: tokens of its first prompt that were computed
        self._step = 0  # steps done
        self._run_from_s = 0.0
        self._run_steps = 0  # of the run in progress
        self._chunks: list[tuple[_Sequence, int]] = []  # what each step of it prefills
        self._prefilled = 0  # tokens of the chunks
        self._timer: asyncio.TimerHandle | None = None

    @property
    def replica_id(self) -> str:
        return self._replica_id

    async def generate(self, request: Request) -> Completion:
        """Serve one turn in simulated time. Raises `ReplicaFailure` for one that cannot fit into memory."""
        tokens = len(request.prompt_ids) + request.sampling.max_tokens + self._overhead
        if tokens > self._hardware.kv_tokens:
            raise ReplicaFailure(
                f"a turn of {tokens} tokens cannot fit into the {self._hardware.kv_tokens} of {self._replica_id}"
            )
        loop = asyncio.get_running_loop()
        sequence = _Sequence(request, self._orders, loop.time(), loop.create_future())
        self._orders += 1
        heapq.heappush(self._waiting, (request.priority, sequence.order, sequence))
        self._interrupt(loop)
        try:
            return await sequence.answer
        except asyncio.CancelledError:
            sequence.aborted = True
            self._aborted.append(sequence)
            self._interrupt(loop)
            raise

    def load(self) -> ReplicaLoad:
        """Where the replica stands; `kv_used_fraction` counts what running sequences hold, as vLLM's does."""
        return ReplicaLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_used_fraction=self._held / self._hardware.kv_tokens,
            preemptions=self._preemptions,
        )

    async def close(self) -> None:
        """Stop; there must be no requests left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Time

    def _interrupt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Something came or went: look at it when the step in progress ends, at once when there is none."""
        if self._timer is None:
            self._timer = loop.call_at(loop.time(), self._boundary)
        elif self._run_steps > 1:
            steps = self._cost.steps_begun(loop.time() - self._run_from_s, *self._work())
            if steps < self._run_steps:
                self._run_steps = steps
                self._timer.cancel()
                end_s = self._run_from_s + self._cost.steps_s(steps, *self._work())
                self._timer = loop.call_at(end_s, self._boundary)

    def _work(self) -> tuple[int, int, int, int]:
        """What each step of the run in progress does, as `InferenceCost` counts it."""
        return self._sequences, self._context, len(self._chunks), self._prefilled

    def _boundary(self) -> None:
        """The run in progress is over: book it, let sequences leave and start, and begin the next run."""
        loop = asyncio.get_running_loop()
        self._timer = None
        now_s = loop.time()
        self._book(now_s)
        if self._aborted:
            self._drop_aborted()
        self._start_waiting(now_s)
        self._plan(loop, now_s)

    def _book(self, now_s: float) -> None:
        """Add what the run's steps have done."""
        steps, self._run_steps = self._run_steps, 0
        self._step += steps
        self._context += steps * self._sequences
        self._held += steps * self._sequences
        while self._decoding and self._decoding[0][0] <= self._step:
            _, sequence = heapq.heappop(self._decoding)
            if sequence.finish_step == self._step:  # else it was preempted or aborted since
                self._stop_decoding(sequence)
                self._complete(sequence, now_s)
        for sequence, tokens in self._chunks:
            sequence.prefill_left -= tokens * steps
            if sequence.prefill_left == 0 and not sequence.aborted:
                self._first_token(sequence, now_s)
        self._chunks, self._prefilled = [], 0

    def _first_token(self, sequence: _Sequence, now_s: float) -> None:
        """The prompt is computed: a token came of it, and the rest is decoded."""
        self._prefilling.remove(sequence)  # it stands at the front, or near it
        if sequence.decode_from_s is None:
            sequence.decode_from_s = now_s
        if self._hardware.shared_prompts and sequence.request.turn == 0:
            group = _group(sequence.request)
            self._prompts[group] = max(self._prompts.get(group, 0), len(sequence.request.prompt_ids))
        if self._hardware.checkpoint_tokens:
            self._leave_checkpoint(sequence)
        self._held += 1
        sequence.generated += 1
        left = sequence.target - sequence.generated
        if left <= 0:
            sequence.context += 1
            self._complete(sequence, now_s)
            return
        self._sequences += 1
        self._context += sequence.context + 1
        sequence.context += 1 + left
        sequence.finish_step = self._step + left
        heapq.heappush(self._decoding, (sequence.finish_step, sequence))

    def _stop_decoding(self, sequence: _Sequence) -> None:
        """Take a sequence out of the decoding ones, its counters as of this step."""
        left = sequence.finish_step - self._step
        sequence.context -= left
        sequence.generated = sequence.target - left
        sequence.finish_step = -1
        self._sequences -= 1
        self._context -= sequence.context

    def _leave_checkpoint(self, sequence: _Sequence) -> None:
        """A running sequence needs the checkpoint that it began at no more, nor its own."""
        tokens = self._hardware.checkpoint_tokens
        self._held -= tokens
        sequence.settled = True
        if sequence.found_checkpoint:
            self._give_back(tokens, None)
        if len(sequence.request.prompt_ids) < self._hardware.block_tokens:
            return
        self._forget(sequence.request.trajectory_id)
        sequence.checkpoint = self._give_back(tokens, sequence.request.trajectory_id)
        self._caches[sequence.request.trajectory_id] = _Cache(0, (sequence.checkpoint,))

    def _leave(self, sequence: _Sequence) -> None:
        """Give back what a running sequence holds."""
        del self._running[sequence]
        self._held -= sequence.context + self._overhead
        if sequence.settled:
            self._held += self._hardware.checkpoint_tokens

    def _complete(self, sequence: _Sequence, now_s: float) -> None:
        self._leave(sequence)
        self._keep(sequence)
        if sequence.answer.done():
            return
        started_s, decoding_s = sequence.prefill_from_s, sequence.decode_from_s
        assert started_s is not None
        assert decoding_s is not None
        completion = Completion(
            token_ids=CountedTokens(sequence.target),
            logprobs=None,
            stop_reason="length",
            cached_tokens=sequence.cached_tokens,
            preemptions=sequence.preemptions,
            queue_s=started_s - sequence.arrived_s,
            prefill_s=decoding_s - started_s,
            decode_s=now_s - decoding_s,
        )
        sequence.answer.set_result(completion)

    def _drop_aborted(self) -> None:
        for sequence in self._aborted:
            if sequence in self._running:
                if sequence.finish_step >= 0:
                    self._stop_decoding(sequence)
                else:
                    self._prefilling.remove(sequence)
                self._leave(sequence)
        self._aborted = []

    # Memory

    def _keep(self, sequence: _Sequence) -> None:
        """A turn is over: its cache stays. The last token was sampled and not yet computed."""
        hardware, trajectory_id = self._hardware, sequence.request.trajectory_id
        prompt_tokens = len(sequence.request.prompt_ids)
        context = prompt_tokens + sequence.target
        kept = hardware.kept(prompt_tokens, context)
        end = _end(sequence.request) - 1
        if hardware.keeps_generated:
            end += sequence.target
        elif beyond := (context - 1) // hardware.block_tokens * hardware.block_tokens - kept.tokens:
            self._give_back(beyond, None)
        if sequence.checkpoint is None:
            self._forget(trajectory_id)
            self._caches[trajectory_id] = _Cache(end, (self._give_back(kept.held, trajectory_id),))
            return
        cache = self._caches.get(trajectory_id)
        if cache is not None and cache.parts == (sequence.checkpoint,):
            parts = (sequence.checkpoint, self._give_back(kept.tokens, trajectory_id))
            self._caches[trajectory_id] = _Cache(end, parts)
        else:  # its checkpoint was overwritten in the meantime
            self._give_back(kept.tokens, None)

    def _give_back(self, tokens: int, trajectory_id: str | None) -> _GivenBack:
        """Memory that is overwritten after all that was given back before."""
        part = _GivenBack(tokens, trajectory_id)
        self._given_back[part] = None
        self._given_back_tokens += tokens
        return part

    def _forget(self, trajectory_id: str) -> int | None:
        """Take a trajectory's cache out; gives the position up to which it reached."""
        cache = self._caches.pop(trajectory_id, None)
        if cache is None:
            return None
        for part in cache.parts:
            del self._given_back[part]
            self._given_back_tokens -= part.tokens
        return cache.end

    def _make_room(self, tokens: int) -> bool:
        """Overwrite what was given back, the oldest first, until `tokens` more fit beside the running sequences."""
        if self._held + tokens > self._hardware.kv_tokens:
            return False
        while self._held + self._given_back_tokens + tokens > self._hardware.kv_tokens:
            part, _ = self._given_back.popitem(last=False)
            self._given_back_tokens -= part.tokens
            if part.trajectory_id is not None:
                for other in self._caches.pop(part.trajectory_id).parts:
                    other.trajectory_id = None
        return True

    def _start_waiting(self, now_s: float) -> None:
        budget = self._cost.chunk_tokens - sum(sequence.prefill_left for sequence in self._prefilling)
        while budget > 0 and self._waiting and len(self._running) < self._hardware.max_sequences:
            sequence = self._waiting[0][2]
            if sequence.aborted:
                heapq.heappop(self._waiting)
                continue
            tokens = sequence.context + self._overhead + 1
            if self._held + tokens > self._hardware.kv_tokens:
                return  # the first in line waits for memory, and nobody overtakes it
            heapq.heappop(self._waiting)
            hit_tokens = self._hit(sequence)
            self._make_room(tokens)
            self._held += tokens - 1
            self._running[sequence] = None
            sequence.prefill_left = sequence.context - hit_tokens
            budget -= sequence.prefill_left
            sequence.checkpoint, sequence.settled = None, False
            whole = sequence.context - sequence.context % self._hardware.block_tokens
            sequence.found_checkpoint = 0 < hit_tokens < whole
            if sequence.cached_tokens is None:
                sequence.cached_tokens = hit_tokens
            if sequence.prefill_from_s is None:
                sequence.prefill_from_s = now_s
            self._prefilling.append(sequence)

    def _hit(self, sequence: _Sequence) -> int:
        """Tokens of the prompt that its trajectory's cache holds; the last one is always computed."""
        cached_end = self._forget(sequence.request.trajectory_id)
        if sequence.generated:
            return 0
        if cached_end is None:
            if not self._hardware.shared_prompts or sequence.request.turn:
                return 0
            cached_end = self._prompts.get(_group(sequence.request), 0)
        start = _end(sequence.request) - len(sequence.request.prompt_ids)
        hit_tokens = min(cached_end - start, sequence.context - 1)
        return max(0, hit_tokens - hit_tokens % self._hardware.block_tokens)

    def _preempt(self) -> None:
        """The newest running sequence gives up its place and all that it computed."""
        sequence = next(reversed(self._running))
        if sequence.finish_step >= 0:
            self._stop_decoding(sequence)
        else:
            self._prefilling.remove(sequence)
        self._leave(sequence)
        self._preemptions += 1
        sequence.preemptions += 1
        heapq.heappush(self._waiting, (sequence.request.priority, sequence.order, sequence))

    # The next run

    def _plan(self, loop: asyncio.AbstractEventLoop, now_s: float) -> None:
        if not self._running:
            return
        while not self._make_room(len(self._running)):  # a step gives each of them a token at most
            self._preempt()
        self._run_from_s = now_s
        steps = self._choose_chunks() if self._prefilling else 0
        if self._sequences:
            until_change = min(self._next_finish() - self._step, self._steps_in_memory())
            steps = min(steps, until_change) if steps else until_change
        self._run_steps = steps
        self._timer = loop.call_at(now_s + self._cost.steps_s(steps, *self._work()), self._boundary)

    def _choose_chunks(self) -> int:
        """Choose what a step prefills, in the order of arrival; gives how many steps in a row can do the same."""
        budget = self._cost.chunk_tokens
        steps = max(1, self._prefilling[0].prefill_left // budget)  # a long prompt fills steps on its own
        for sequence in self._prefilling:
            tokens = min(budget, sequence.prefill_left)
            self._chunks.append((sequence, tokens))
            budget -= tokens
            if not budget:
                break
        self._prefilled = self._cost.chunk_tokens - budget
        return steps

    def _next_finish(self) -> int:
        while True:
            finish_step, sequence = self._decoding[0]
            if sequence.finish_step == finish_step:
                return finish_step
            heapq.heappop(self._decoding)

    def _steps_in_memory(self) -> int:
        """Steps until waiting caches, or running sequences, have to give way."""
        free = self._hardware.kv_tokens - self._held - self._given_back_tokens
        return 1 + (free - len(self._running)) // self._sequences


def _group(request: Request) -> str:
    """The group of the request's trajectory."""
    return request.trajectory_id.rpartition("#")[0]


def _end(request: Request) -> int:
    """Position of the prompt's end among all tokens of its trajectory, those that a limit has cut off included."""
    tokens = request.prompt_ids
    return len(tokens) + (tokens.dropped if isinstance(tokens, CountedTokens) else 0)
