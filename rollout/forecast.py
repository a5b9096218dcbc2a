"""How much work is left in a chain, from what has been observed.

A *chain* is a trajectory seen as a sequence of steps; its length is `X` steps. The forecast is a probability mass
function of `X` for each group of siblings, and three numbers that follow from it for a chain that has made `k` steps:

    S(k) = P(X > k)        B(k) = E[(X - k)+]        B(k) / S(k) = the mean residual life, in steps

It is made in two moves. *All chains*: the Kaplan-Meier estimate over earlier steps and the chains of this batch, where
one that still runs is censored at `k` and a turn cap takes all the mass beyond it (E. Kaplan and P. Meier, J. Am. Stat.
Assoc. 53:457-481, 1958). *One group*: log lengths of siblings are correlated, so a Gaussian posterior on the group's
mean log length reweights that function. A finished sibling counts as one observation, one that still runs as `F(k)` of
one with the value `log(k + mean residual life)`.

Everything here is a pure function of arrays. Lengths are whole steps, `1 <= X <= support`; row `g` of a table belongs
to group `g`; column `k` to a chain that has made `k` steps.
"""

from __future__ import annotations

import functools
import math

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PRIOR_MEDIAN_TURNS = 10.0
PRIOR_DEVIATION = 1.0
"""The cold start: lengths are lognormal around ten turns, give or take a factor of 2.7, until something is seen."""
PRIOR_WEIGHT = 2.0
"""The cold start counts as so many chains; beside a step of some hundred chains it only keeps the tail open."""
PRIOR_CORRELATION = 0.5
"""Of siblings' log lengths, until a step has measured it."""

_ROWS = 128
"""Rows that are worked on at a time: so many fit into a core's cache, which makes large tables several times faster."""

NEVER = 1e-9
"""A survival below this says nothing of what follows: a chain that got there has one more step."""


class GroupModel(msgspec.Struct, frozen=True):
    """How siblings resemble each other: log lengths are normal around the mean, and correlate within a group."""

    mean: float
    deviation: float
    correlation: float


@functools.lru_cache(maxsize=16)
def prior_mass(support: int) -> Floats:
    """The cold start's mass function over lengths 1 … `support`, shape (support,); the last entry has the tail."""
    edges = np.log(np.arange(1, support) + 0.5)
    scaled = (edges - math.log(PRIOR_MEDIAN_TURNS)) / PRIOR_DEVIATION
    below = np.array([0.5 * (1.0 + math.erf(z / math.sqrt(2.0))) for z in scaled])
    mass: Floats = np.diff(np.concatenate([[0.0], below, [1.0]]))
    mass.flags.writeable = False  # everyone gets the same one
    return mass


def kaplan_meier(ended: Floats, censored: Floats, prior_weight: float = PRIOR_WEIGHT) -> Floats:
    """The mass function of the length, shape (support,), entry `x - 1` for length `x`.

    Args:
        ended: weight of the chains that ended with length `x`, at entry `x - 1`; shape (support,).
        censored: weight of the chains that have made `k` steps and go on, at entry `k`; shape (support + 1,).
        prior_weight: chains that the cold start counts as.

    What outlives the support ends with its last length: that is where a turn cap's mass belongs.
    """
    support = len(ended)
    ended = ended + prior_weight * prior_mass(support)
    # At risk of ending with length x: whoever ended at x or later, and whoever goes on after x or more steps.
    at_risk = np.cumsum(ended[::-1])[::-1] + np.cumsum(censored[::-1])[::-1][1:]
    hazard = np.divide(ended, at_risk, out=np.zeros(support), where=at_risk > 0)
    hazard[-1] = 1.0
    survival = np.cumprod(1.0 - hazard)
    return np.diff(np.concatenate([[1.0], survival])) * -1.0


def group_model(mass: Floats, correlation: float) -> GroupModel:
    """Mean and deviation of the log length under a mass function of shape (support,)."""
    logs = np.log(np.arange(1, len(mass) + 1))
    mean = float(mass @ logs)
    deviation = math.sqrt(max(float(mass @ (logs - mean) ** 2), 1e-2))
    return GroupModel(mean, deviation, min(max(correlation, 0.0), 0.95))


def reweighted(mass: Floats, model: GroupModel, weight: Floats, total: Floats) -> Floats:
    """The mass function of each group, shape (groups, support).

    Args:
        mass: of all chains, shape (support,).
        weight: how many observations each group has, shape (groups,).
        total: the sum of those observations' log lengths, shape (groups,).

    The group's own mean is `m + u` with `u ~ N(0, r v)`, its chains scatter around it with `(1 - r) v`; given `n`
    observations of mean `y`, a further chain is normal with mean `m + n r (y - m) / (1 - r + n r)` and variance
    `(1 - r) v + r v (1 - r) / (1 - r + n r)`. The mass function is multiplied by the ratio of that density to the
    density without observations, and scaled to 1.
    """
    variance, r = model.deviation**2, model.correlation
    shrink = 1.0 - r + weight * r
    mean = model.mean + r * (total - weight * model.mean) / shrink
    spread = (1.0 - r) * variance + r * (1.0 - r) * variance / shrink
    # The log of the ratio is a polynomial in the log length; its constant goes with the scaling.
    logs = np.log(np.arange(1, len(mass) + 1))
    linear = mean / spread - model.mean / variance
    square = 0.5 / variance - 0.5 / spread
    possible = mass > 0
    rows = np.zeros((len(weight), len(mass)))
    for begin in range(0, len(weight), _ROWS):
        part = slice(begin, begin + _ROWS)
        exponent = np.outer(linear[part], logs[possible]) + np.outer(square[part], logs[possible] ** 2)
        # With the largest exponent at 0 a row neither overflows nor vanishes, however far its group is from the others.
        exponent -= exponent.max(axis=1, keepdims=True)
        chance = np.exp(exponent, out=exponent)
        chance *= mass[possible]
        chance /= chance.sum(axis=1, keepdims=True)
        rows[part, possible] = chance
    return rows


class Tails:
    """`S` and `B` of several mass functions, ready to be looked up.

    Args:
        mass: shape (rows, support).
    """

    def __init__(self, mass: Floats) -> None:
        rows, support = mass.shape
        self.support = support
        self.survival = np.zeros((rows, support + 2))
        self.excess = np.zeros((rows, support + 2))
        for begin in range(0, rows, _ROWS):
            part = slice(begin, begin + _ROWS)
            survival, excess = self.survival[part, :support], self.excess[part, :support]
            below = np.cumsum(mass[part], axis=1)
            np.subtract(below[:, -1:], below[:, :-1], out=survival[:, 1:])
            survival[:, 0] = below[:, -1]
            lived = np.cumsum(survival, axis=1, out=below)
            np.subtract(lived[:, -1:], lived[:, :-1], out=excess[:, 1:])
            excess[:, 0] = lived[:, -1]

    def remaining(self, row: Ints, k: Ints) -> Floats:
        """Mean residual life in steps of chains that have made `k`: E[X - k | X > k]; one step beyond the support."""
        k = np.minimum(k, self.support)
        survival = self.survival[row, k]
        steps: Floats = np.where(survival > NEVER, self.excess[row, k] / np.maximum(survival, NEVER), 1.0)
        return steps

    def tardiness(self, row: Ints, k: Ints, due: Floats, cut: Floats) -> Floats:
        """E[(min(X, cut) - due)+ | X > k] in steps: how far chains that have made `k` steps are to outlast `due`.

        Args:
            row, k, due, cut: of one chain each, shape (chains,). `due` and `cut` are steps, fractions allowed; `cut` is
                where another limit will end the chain.
        """
        survival = self.survival[row, np.minimum(k, self.support)]
        beyond = self._excess_at(row, due) - self._excess_at(row, cut)
        certain = np.maximum(np.minimum(k + 1.0, cut) - due, 0.0)  # outlived the support: one more step
        late = np.where(survival > NEVER, beyond / np.maximum(survival, NEVER), certain)
        found: Floats = np.where(cut > due, late, 0.0)
        return found

    def _excess_at(self, row: Ints, t: Floats) -> Floats:
        """`B(t)`, which is linear between whole steps because lengths are whole."""
        t = np.clip(t, 0.0, self.support)
        low = t.astype(np.int64)
        at, after = self.excess[row, low], self.excess[row, low + 1]
        found: Floats = at + (t - low) * (after - at)
        return found

    def tardiness_of_one(self, row: int, k: int, due: float, cut: float) -> float:
        """The same for one chain, without the cost of making arrays."""
        if cut <= due:
            return 0.0
        survival = self.survival[row, min(k, self.support)]
        if survival <= NEVER:
            return max(min(k + 1.0, cut) - due, 0.0)
        return float((self._excess_of_one(row, due) - self._excess_of_one(row, cut)) / survival)

    def remaining_of_one(self, row: int, k: int) -> float:
        """`remaining` for one chain."""
        k = min(k, self.support)
        survival = self.survival[row, k]
        return float(self.excess[row, k] / survival) if survival > NEVER else 1.0

    def _excess_of_one(self, row: int, t: float) -> float:
        t = min(max(t, 0.0), float(self.support))
        low = int(t)
        at = self.excess[row, low]
        return float(at + (t - low) * (self.excess[row, low + 1] - at))


def sibling_correlation(groups: Ints, logs: Floats) -> float:
    """Correlation of siblings' log lengths (one-way analysis of variance), in 0 … 0.95.

    Args:
        groups: group of each chain, whole numbers from 0, shape (chains,).
        logs: log length of each chain, shape (chains,).

    `PRIOR_CORRELATION` where no group has two chains, or no length differs.
    """
    counts = np.bincount(groups)
    counts = counts[counts > 0]
    chains, kinds = len(groups), len(counts)
    if kinds < 2 or chains <= kinds:
        return PRIOR_CORRELATION
    _, own = np.unique(groups, return_inverse=True)
    means = np.bincount(own, weights=logs) / counts
    between = float(counts @ (means - logs.mean()) ** 2) / (kinds - 1)
    within = float(((logs - means[own]) ** 2).sum()) / (chains - kinds)
    size = (chains - float((counts**2).sum()) / chains) / (kinds - 1)
    scale = between + (size - 1.0) * within
    if scale <= 0:
        return PRIOR_CORRELATION
    return min(max((between - within) / scale, 0.0), 0.95)


def rank_correlation(one: Floats, other: Floats) -> float:
    """Spearman's rank correlation with mean ranks for ties; 0 where it is not defined. Shapes (n,)."""

    def ranks(values: Floats) -> Floats:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        last = np.cumsum(counts)
        mean_rank: Floats = (last - (counts - 1) / 2.0)[inverse]
        return mean_rank

    if len(one) < 2:
        return 0.0
    a, b = ranks(one), ranks(other)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else 0.0
