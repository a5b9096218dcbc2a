"""`Coordinator`: the one place that knows the whole batch.

It is told what happens to every trajectory (`join`, `started`, `inferred`, `acted`, `end`), keeps the few numbers that
a forecast needs, and answers: with the key of an action (`key`), with new keys for all that wait (`rekeys`), with what
a new chain is expected to take (`expected_s`, for `order.py`). It owns no task, socket or clock. In a run it lives in
the engine's process; under verl in an actor of its own, which all agent-loop workers report to.

**The `caas` key.** A chain that has made `k` steps, with `c` seconds a step, is expected to outlast a share `g` of the
*horizon* `h` by

    tardiness = c E[(X - k - g h / c)+ | X > k],        h = unfinished chains' expected actions x mean action / slots

where `h` is how long the slots still have work for (the slowest class), and `g` says how early a chain counts as a
threat. The most tardy goes first (its key is the smallest); the keys of chains that threaten nothing are next to 0. A
token budget ends chains, too: `X` is cut where the context will have grown to the limit.

**A pass** renews the forecast and the keys of all that wait in one vectorised sweep. It is due after
`rerank_dispatches` actions or the end of a chain, and not sooner than `rerank_interval_s` after the last one. Keys
stand until the next pass, and for ever if the coordinator falls silent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from makespan.rollout.chains import ChainState, ChainTable
from makespan.rollout.forecast import Floats, Ints, Tails, group_model, kaplan_meier, reweighted
from makespan.rollout.history import PROMPT_SIBLINGS, ChainRecord, History
from makespan.rollout.trajectory import Progress

RERANK_DISPATCHES = 16
RERANK_INTERVAL_S = 0.05
PASS_SHARE = 0.05
"""A pass takes milliseconds for hundreds of chains and a good part of a second for tens of thousands, in the process
that also runs them."""

HORIZON_SHARE = 0.7
"""`g`: a chain counts as a threat from 70% of the horizon on. At 1, threats are seen too late."""
GROUP_WEIGHT = 10.0
"""A chain's own step cost is shrunk to its group's as if that had been seen on ten steps."""
MEAN_WEIGHT = 5.0
"""A group's step cost, and a chain's tokens a turn, are shrunk to the mean as if that had been seen on five steps."""
PRIOR_TURN_S = 1.0
"""Seconds a step before any was seen. It scales all keys alike, and so decides nothing by itself."""
MAX_SUPPORT = 4096
"""Longest length that the forecast tells apart, in steps."""
MIN_SUPPORT = 64
LONGEST_SHARE = 0.25
ALIKE = 0.15
"""Lengths are alike if the chains that reach the upper quartile of the lengths go on for less than this share of a new
chain's expected steps: it is 0 where a turn cap ends a quarter of the chains, 0.10 to 0.13 where a token budget ends
most, 0.5 for a lognormal of deviation 0.5, and above 1 for a long tail without a cap."""
GROWTH = 4
"""Without a turn cap the forecast reaches to so many times the longest chain that was seen."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """Why a chain has its key."""

    key: float
    turns: int
    remaining_turns: float
    """Expected, given what was seen."""
    remaining_s: float
    horizon_s: float
    """How long the slots still have work for."""
    turn_s: float
    """Expected cost of one of the chain's steps."""

    @property
    def slack_s(self) -> float:
        """Between the chain's expected end and the horizon; negative: it ends after it."""
        return self.horizon_s - self.remaining_s


class Coordinator:
    """The state of one batch after another, and what follows from it.

    Args:
        history: what earlier steps taught; `finish` adds this one to it.
        slots: step slots by environment; an environment that is not named has no bound.
        horizon_share: `g` of the key.
        rerank_dispatches, rerank_interval_s: when a pass is due.
        siblings, prompt_history: whether siblings' and earlier epochs' lengths count (for ablations).
    """

    def __init__(
        self,
        history: History | None = None,
        *,
        slots: Mapping[str, int] | None = None,
        horizon_share: float = HORIZON_SHARE,
        rerank_dispatches: int = RERANK_DISPATCHES,
        rerank_interval_s: float = RERANK_INTERVAL_S,
        siblings: bool = True,
        prompt_history: bool = True,
    ) -> None:
        self.history = History() if history is None else history
        self.slots = dict(slots or {})
        self._horizon_share = horizon_share
        self._rerank_dispatches = rerank_dispatches
        self._rerank_interval_s = self._pause_s = rerank_interval_s
        self._siblings = siblings
        self._prompt_history = prompt_history
        self.begin()

    # What happens

    def begin(self, *, max_turns: int | None = None, max_tokens: int | None = None) -> None:
        """A batch starts, with the caps that end its trajectories. What was known of another one's chains is gone."""
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._chains = ChainTable()
        self._dispatches = 0
        self._news = True
        self._passed_s = -math.inf
        self._stale = True
        self._alike: bool | None = None

    def join(self, trajectory_id: str, group: str, environment: str) -> None:
        """The batch has this trajectory, which has not started."""
        self._chains.add(trajectory_id, group, environment)
        self._stale = True

    def started(self, trajectory_id: str) -> None:
        """The trajectory was admitted."""
        chains = self._chains
        chains.running[chains.number[trajectory_id]] = True

    def was_reset(self, trajectory_id: str) -> None:
        """The trajectory begins, or begins again: its environment is ready for the first action."""
        chains, number = self._chains, self._chains.number[trajectory_id]
        chains.waiting[number] = False
        chains.turns[number] = 0
        chains.inference_s[number] = chains.action_s[number] = chains.tokens[number] = 0.0

    def inferred(self, trajectory_id: str, seconds: float, context_tokens: int) -> None:
        """A turn was generated after `seconds`, waiting included; the context has so many tokens with it."""
        chains, number = self._chains, self._chains.number[trajectory_id]
        chains.inference_s[number] += seconds
        if not chains.tokens[number]:
            chains.first_tokens[number] = context_tokens
        chains.tokens[number] = context_tokens

    def key(self, trajectory_id: str, progress: Progress) -> float:
        """An action of this trajectory begins to wait: its `caas` key, by the forecast of the last pass."""
        chains, number = self._chains, self._chains.number[trajectory_id]
        chains.turns[number] = progress.turns
        chains.waiting[number] = True
        return self.key_of(trajectory_id)

    def key_of(self, trajectory_id: str) -> float:
        """The key that an action of this trajectory would have now, by the forecast of the last pass."""
        if self._stale:
            self._renew()
        return -self._tardiness_of(self._chains.number[trajectory_id])

    def acted(self, trajectory_id: str, seconds: float) -> None:
        """The action is over; it ran for `seconds`, waiting excluded."""
        chains, number = self._chains, self._chains.number[trajectory_id]
        chains.waiting[number] = False
        chains.turns[number] += 1
        chains.action_s[number] += seconds
        self._dispatches += 1

    def end(self, trajectory_id: str, *, counts: bool) -> None:
        """The trajectory is over.

        `counts`: it came to its own end or to a cap, so that its length says how long chains are; one that failed was
        only watched for so long.
        """
        chains, number = self._chains, self._chains.number[trajectory_id]
        chains.waiting[number] = chains.running[number] = False
        chains.over[number] = True
        chains.counted[number] = counts and chains.turns[number] > 0
        self._news = True

    def observe(self, state: ChainState) -> None:
        """What another process says of one of its chains, instead of the calls above; the chain joins if it is new."""
        known = state.trajectory_id in self._chains
        if known and self._chains.turns[self._chains.number[state.trajectory_id]] < state.turns:
            self._dispatches += 1
        self._news |= state.over
        self._stale |= not known
        self._chains.put(state)

    def turn_over(self) -> None:
        """Where no one says that a batch ends: learn from the chains that are over, and go on with the others."""
        unfinished = [self._chains.get(int(number)) for number in np.flatnonzero(~self._chains.over)]
        self.finish()
        self.begin(max_turns=self._max_turns, max_tokens=self._max_tokens)
        for state in unfinished:
            self.observe(state)

    def counts(self) -> tuple[int, int]:
        """(chains that are not over, chains that are)."""
        over = int(self._chains.over.sum())
        return len(self._chains) - over, over

    def finish(self) -> History:
        """The batch is over: learn from it."""
        chains = self._chains
        self.history.learn(
            ChainRecord(
                chains.group_names[chains.group[number]],
                int(chains.turns[number]),
                float(chains.inference_s[number]),
                float(chains.action_s[number]),
                int(chains.tokens[number] - chains.first_tokens[number]),
            )
            for number in np.flatnonzero(chains.counted)
        )
        return self.history

    # What follows

    def rekeys(self, now_s: float) -> dict[str, float]:
        """New keys for all actions that wait, if a pass is due; `now_s` is any steady clock."""
        due = self._news or self._dispatches >= self._rerank_dispatches
        if not due or now_s - self._passed_s < self._pause_s:
            return {}
        self._dispatches, self._news, self._passed_s = 0, False, now_s
        self._renew()
        waiting = np.flatnonzero(self._chains.waiting)
        keys, ids = -self._tardiness(waiting), self._chains.ids
        return {ids[number]: key for number, key in zip(waiting, keys.tolist(), strict=True)}

    def pass_took(self, seconds: float) -> None:
        """What the last pass cost: the next one is put off so that passes take at most `PASS_SHARE` of the time."""
        self._pause_s = max(self._rerank_interval_s, seconds / PASS_SHARE)

    def outlook(self, trajectory_id: str) -> Outlook:
        """Why the trajectory's action has its key, by the forecast of the last pass."""
        if self._stale:
            self._renew()
        number = self._chains.number[trajectory_id]
        turns, turn_s = int(self._chains.turns[number]), self._turn_s(number)
        remaining = self._tails.remaining_of_one(self._row(number), turns)
        remaining = min(remaining, max(0.0, self._cut(number) - turns))
        return Outlook(
            key=-self._tardiness_of(number),
            turns=turns,
            remaining_turns=remaining,
            remaining_s=remaining * turn_s,
            horizon_s=self._horizon_s,
            turn_s=turn_s,
        )

    def expected_s(self, groups: Iterable[str]) -> list[float]:
        """How long a new chain of each of these groups is expected to take, in seconds."""
        if self._stale:
            self._renew()
        numbers = [self._chains.groups[group] for group in groups]
        return [self._tails.remaining_of_one(int(self._rows[n]), 0) * float(self._group_turn_s[n]) for n in numbers]

    def group_of(self, trajectory_id: str) -> str:
        """The group that the trajectory joined with."""
        return self._chains.group_of(trajectory_id)

    def predicts(self) -> bool:
        """Whether earlier epochs' records of prompts are used: there are some here, and they predicted well."""
        trusted = self._prompt_history and self.history.predicts()
        return trusted and any(group in self.history.prompts for group in self._chains.groups)

    def predicts_costs(self) -> bool:
        """Whether these records also tell what a turn takes."""
        return self.predicts() and self.history.predicts_costs()

    def lengths_alike(self) -> bool:
        """Whether most chains end at about the same length, by the forecast of the last pass."""
        if self._alike is None:
            self._renew()
        return bool(self._alike)

    # The forecast

    def _renew(self) -> None:
        trusted = self._prompt_history and self.history.predicts()
        groups = self._chains.groups.items() if trusted else ()
        prompts = self.history.prompts
        self._records = [(number, prompts[group]) for group, number in groups if group in prompts]
        self._renew_costs()
        self._renew_lengths()
        self._horizon_s = self._horizon()
        self._stale = False

    def _renew_costs(self) -> None:
        chains, history, groups = self._chains, self.history, len(self._chains.groups)
        spent_s, turns = chains.inference_s + chains.action_s, chains.turns.astype(np.float64)
        self._mean_s = _blend(spent_s, turns, history.turn_s, PRIOR_TURN_S)
        self._mean_action_s = _blend(chains.action_s, turns, history.action_s, self._mean_s)
        self._turn_tokens = _blend(chains.tokens - chains.first_tokens, turns, history.turn_tokens, 0.0)
        total_s = np.bincount(chains.group, weights=spent_s, minlength=groups) + MEAN_WEIGHT * self._mean_s
        total = np.bincount(chains.group, weights=turns, minlength=groups) + MEAN_WEIGHT
        for number, record in self._records:
            weight = record.chains * math.exp(record.log_turns)
            total_s[number] += weight * record.turn_s
            total[number] += weight
        self._group_turn_s: Floats = total_s / total

    def _renew_lengths(self) -> None:
        chains, support = self._chains, self._support()
        ended = np.zeros(support)
        for step in self.history.steps:
            for length, count in step.counts.items():
                ended[min(length, support) - 1] += step.weight * count
        lengths = np.minimum(chains.turns, support)
        ended += np.bincount(lengths[chains.counted] - 1, minlength=support)
        watched = ~chains.counted & (chains.turns > 0)
        mass = kaplan_meier(ended, np.bincount(lengths[watched], minlength=support + 1).astype(np.float64))
        everyone = Tails(mass[None, :])
        self._alike = _alike(everyone)
        weight, total = self._observations(everyone, lengths)
        own = np.flatnonzero(weight > 0)
        self._rows: Ints = np.zeros(len(chains.groups), dtype=np.int64)
        self._rows[own] = np.arange(1, len(own) + 1)
        model = group_model(mass, self.history.correlation)
        self._tails = Tails(np.concatenate([mass[None, :], reweighted(mass, model, weight[own], total[own])]))

    def _support(self) -> int:
        if self._max_turns is not None and self._max_turns <= MAX_SUPPORT:
            return self._max_turns
        longest = max((max(step.counts) for step in self.history.steps), default=0)
        if len(self._chains):
            longest = max(longest, int(self._chains.turns.max()) + 1)
        return min(MAX_SUPPORT, max(MIN_SUPPORT, GROWTH * longest))

    def _observations(self, everyone: Tails, lengths: Ints) -> tuple[Floats, Floats]:
        """Weight and total log length of what each group's chains and records show, shapes (groups,)."""
        chains, groups = self._chains, len(self._chains.groups)
        weight, total = np.zeros(groups), np.zeros(groups)
        if self._siblings:
            over = np.flatnonzero(chains.counted)
            weight += np.bincount(chains.group[over], minlength=groups)
            total += np.bincount(chains.group[over], weights=np.log(lengths[over]), minlength=groups)
            on = np.flatnonzero(chains.running & (chains.turns > 0))
            k = lengths[on]
            share = 1.0 - everyone.survival[0, k]
            value = np.log(k + everyone.remaining(np.zeros(len(k), dtype=np.int64), k))
            weight += np.bincount(chains.group[on], weights=share, minlength=groups)
            total += np.bincount(chains.group[on], weights=share * value, minlength=groups)
        for number, record in self._records:
            count = min(record.chains, PROMPT_SIBLINGS)
            weight[number] += count
            total[number] += count * record.log_turns
        return weight, total

    def _horizon(self) -> float:
        chains = self._chains
        unfinished = np.flatnonzero(~chains.over)
        steps = self._tails.remaining(self._rows[chains.group[unfinished]], chains.turns[unfinished])
        latest_s = 0.0
        for name, number in chains.environments.items():
            slots = self.slots.get(name)
            if slots is not None:
                left = float(steps[chains.environment[unfinished] == number].sum())
                latest_s = max(latest_s, left * self._mean_action_s / slots)
        return latest_s

    # The key, for one chain and for many. Both read the same tables; a test holds them against each other.

    def _row(self, number: int) -> int:
        return int(self._rows[self._chains.group[number]])

    def _turn_s(self, number: int) -> float:
        chains = self._chains
        spent_s = float(chains.inference_s[number] + chains.action_s[number])
        prior_s = float(self._group_turn_s[chains.group[number]])
        return (spent_s + GROUP_WEIGHT * prior_s) / (float(chains.turns[number]) + GROUP_WEIGHT)

    def _cut(self, number: int) -> float:
        """After how many steps the token budget ends the chain."""
        chains = self._chains
        if self._max_tokens is None or not chains.tokens[number]:
            return math.inf
        turns, tokens = float(chains.turns[number]), float(chains.tokens[number])
        grown = tokens - float(chains.first_tokens[number])
        each = (grown + MEAN_WEIGHT * self._turn_tokens) / (turns + MEAN_WEIGHT)
        return turns + 1.0 + (self._max_tokens - tokens) / max(each, 1.0)

    def _tardiness_of(self, number: int) -> float:
        turn_s, turns = self._turn_s(number), int(self._chains.turns[number])
        due = turns + self._horizon_share * self._horizon_s / turn_s
        return turn_s * self._tails.tardiness_of_one(self._row(number), turns, due, self._cut(number))

    def _tardiness(self, numbers: Ints) -> Floats:
        chains = self._chains
        turns = chains.turns[numbers].astype(np.float64)
        spent_s = chains.inference_s[numbers] + chains.action_s[numbers]
        turn_s = (spent_s + GROUP_WEIGHT * self._group_turn_s[chains.group[numbers]]) / (turns + GROUP_WEIGHT)
        due = turns + self._horizon_share * self._horizon_s / turn_s
        cut = np.full(len(numbers), np.inf)
        if self._max_tokens is not None:
            tokens = chains.tokens[numbers]
            grown = tokens - chains.first_tokens[numbers] + MEAN_WEIGHT * self._turn_tokens
            budget = (self._max_tokens - tokens) / np.maximum(grown / (turns + MEAN_WEIGHT), 1.0)
            cut = np.where(tokens > 0, turns + 1.0 + budget, np.inf)
        late = self._tails.tardiness(self._rows[chains.group[numbers]], chains.turns[numbers], due, cut)
        found: Floats = turn_s * late
        return found


def _alike(everyone: Tails) -> bool:
    """Whether the longest quarter is hardly longer than its shortest one; row 0 of `everyone` has all chains."""
    survival, excess = everyone.survival[0], everyone.excess[0]
    quartile = int(np.argmax(survival <= LONGEST_SHARE))
    return bool(excess[quartile] < ALIKE * LONGEST_SHARE * excess[0])


def _blend(spent: Floats, turns: Floats, before: float | None, prior: float) -> float:
    """Mean of `spent` a turn: the last step's, which counts as one turn of each chain, and this batch's so far."""
    seen, weight = float(turns.sum()), 0.0 if before is None else float(len(turns))
    if not seen + weight:
        return prior if before is None else before
    return (float(spent.sum()) + weight * (before or 0.0)) / (seen + weight)
