"""Workload regimes: seeded generators of the kinds of batches that agent training makes.

A regime draws, for each prompt (a *group* of sibling chains), how hard and how slow it is, and for each chain its
number of turns and each turn's tokens and environment time. Siblings resemble each other with the correlation `rho` of
their log lengths. What a regime says of a workload is its shape: how heavy the tail of the lengths is, and what cuts it
off (a turn cap, a token cap), since that decides which order of service is right.

The coding regimes draw from recorded sessions instead (their lengths, gaps and prompts), which are not shipped: they
take the path of a file of sessions (`makespan.rollout.replay.sessions`).
"""

from __future__ import annotations

import math
import random

import msgspec

from makespan.rollout.replay.trace import Trace, TraceHeader, TraceTrajectory, TraceTurn

CHAINS = 256
GROUP_SIZE = 8
RHO = 0.5
"""Correlation of siblings' log lengths: assumed, measured nowhere yet."""
MAX_CONTEXT_TOKENS = 120_000
"""Contexts are cut to their last 120k tokens."""


class Lognormal(msgspec.Struct, frozen=True):
    """`median * exp(sigma * z)`, clipped."""

    median: float
    sigma: float
    low: float
    high: float

    def draw(self, rng: random.Random, scale: float = 1.0) -> float:
        return min(self.high, max(self.low, self.median * math.exp(self.sigma * rng.gauss()) * scale))


class Regime(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of workload. Lengths in turns, times in seconds."""

    name: str
    median_turns: float
    sigma_turns: float
    min_turns: int = 1
    max_turns: int = 600
    max_tokens: int | None = None
    """The chain ends with the turn that passes it."""
    generated: Lognormal
    observation: Lognormal
    environment: Lognormal
    prompt_tokens: int = 1500
    reset_s: float = 5.0
    bimodal: bool = False
    """16% of the chains have 40 turns and the others 6, each times exp(0.25 N)."""
    tests: Lognormal | None = None
    """Some steps and the last one run a test suite."""
    tests_share: float = 0.0


def _regime(
    name: str,
    turns: tuple[float, float],
    max_turns: int,
    generated: float,
    observation: float,
    environment: tuple[float, float, float],
    **more: object,
) -> Regime:
    median_s, sigma_s, cap_s = environment
    document = {
        "name": name,
        "median_turns": turns[0],
        "sigma_turns": turns[1],
        "max_turns": max_turns,
        "generated": Lognormal(generated, 0.7, 8, 4096),
        "observation": Lognormal(observation, 0.9, 10, 8000),
        "environment": Lognormal(median_s, sigma_s, 0.02, cap_s),
        **more,
    }
    return Regime(**document)  # type: ignore[arg-type]


_USUAL = (4.0, 1.2, 120.0)

SYNTHETIC: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        _regime("lognormal-0.5", (15, 0.5), 600, 250, 400, _USUAL),
        _regime("lognormal-0.5-cap25", (15, 0.5), 25, 250, 400, _USUAL),
        _regime("lognormal-1", (15, 1.0), 600, 250, 400, _USUAL),
        _regime("lognormal-1-cap50", (15, 1.0), 50, 250, 400, _USUAL, max_tokens=32_000),
        _regime("lognormal-1.5-cap100", (12, 1.5), 100, 250, 400, _USUAL, max_tokens=64_000),
        _regime("lognormal-1.5", (10, 1.5), 600, 250, 300, _USUAL),
        _regime("bimodal", (6, 0.25), 600, 250, 400, _USUAL, bimodal=True),
        _regime("bfcl", (5, 0.4), 10, 120, 150, (0.3, 1.0, 10), min_turns=2, reset_s=0.0),
        _regime(
            "swe",
            (50, 0.4),
            100,
            220,
            500,
            (2, 0.7, 30),
            min_turns=2,
            max_tokens=60_000,
            prompt_tokens=4000,
            reset_s=40.0,
            tests=Lognormal(50, 0.7, 5, 600),
            tests_share=0.15,
        ),
        _regime("search", (5, 0.6), 20, 200, 900, (1.5, 1.0, 30), reset_s=0.0),
    )
}
"""The synthetic regimes by name."""


class Draw(msgspec.Struct, frozen=True):
    """What is drawn for one chain before its turns."""

    z: float
    """Standard normal, correlated between siblings: how long the chain is."""
    environment_scale: float
    prompt_scale: float
    rng: random.Random
    """For all that follows, of this chain alone."""


def draw_chains(seed: int, chains: int, group_size: int, rho: float, epoch: int = 0) -> list[tuple[str, Draw]]:
    """(group, draw) of each chain, group by group. A chain's draws depend on its seed, group and number only.

    Another `epoch` has the same prompts and other chains.
    """
    drawn = []
    for number in range(math.ceil(chains / group_size)):
        group = f"prompt-{number}"
        rng = random.Random(f"{seed}/{group}")
        u, scale, prompt_scale = rng.gauss(), math.exp(0.4 * rng.gauss()), math.exp(0.4 * rng.gauss())
        for sample in range(min(group_size, chains - number * group_size)):
            own = random.Random(f"{seed}/{group}/{sample + epoch * group_size}")
            z = math.sqrt(rho) * u + math.sqrt(1 - rho) * own.gauss()
            drawn.append((group, Draw(z, scale, prompt_scale, own)))
    return drawn


def chain_turns(regime: Regime, draw: Draw) -> int:
    """The length of a chain in turns, before any token cap."""
    if regime.bimodal:
        length = (6 if draw.z < 0.84 else 40) * math.exp(0.25 * draw.rng.gauss())
    else:
        length = regime.median_turns * math.exp(regime.sigma_turns * draw.z)
    return min(regime.max_turns, max(regime.min_turns, round(length)))


def _chain(regime: Regime, group: str, number: int, draw: Draw) -> TraceTrajectory:
    rng = draw.rng
    length = chain_turns(regime, draw)
    context = max(1, round(regime.prompt_tokens * draw.prompt_scale))
    talkative = math.exp(0.2 * rng.gauss())
    reset_s = regime.reset_s * draw.environment_scale * math.exp(0.3 * rng.gauss())
    turns: list[TraceTurn] = []
    for turn in range(length):
        generated = round(regime.generated.draw(rng, talkative))
        observation = round(regime.observation.draw(rng))
        seconds = _environment_s(regime, draw, last=turn == length - 1)
        full = regime.max_tokens is not None and context + generated + observation > regime.max_tokens
        last = full or turn == length - 1
        if last and regime.tests is None:
            seconds = None
        turns.append(
            TraceTurn(
                prompt_tokens=context,
                generated_tokens=generated,
                observation_tokens=0 if last else observation,
                environment_s=seconds,
            )
        )
        if last:
            break
        context += generated + observation
    return TraceTrajectory(
        trajectory_id=f"{group}#{number}",
        task_id=group,
        group=group,
        turns=tuple(turns),
        reset_s=reset_s,
        max_turns=regime.max_turns,
        max_tokens=regime.max_tokens,
    )


def _environment_s(regime: Regime, draw: Draw, *, last: bool) -> float | None:
    rng = draw.rng
    if regime.tests is not None and (rng.random() < regime.tests_share or last):
        return regime.tests.draw(rng, draw.environment_scale)
    return regime.environment.draw(rng, draw.environment_scale)


def generate(
    regime: Regime,
    seed: int,
    *,
    chains: int = CHAINS,
    group_size: int = GROUP_SIZE,
    rho: float = RHO,
    epoch: int = 0,
) -> Trace:
    """A batch of `chains` chains of a synthetic regime; the same seed and epoch give the same batch, the same seed the
    same prompts."""
    numbers: dict[str, int] = {}
    trajectories = []
    for group, draw in draw_chains(seed, chains, group_size, rho, epoch):
        number = numbers[group] = numbers.get(group, -1) + 1
        trajectories.append(_chain(regime, group, number, draw))
    source = f"regime {regime.name}, seed {seed}, {chains} chains in groups of {group_size}, correlation {rho}"
    return Trace(TraceHeader(source=source), tuple(trajectories))
