"""The correction of parking's limit: what the caches lose moves it, slowly."""

from __future__ import annotations

import pytest

from makespan.rollout.parking import CacheCorrection


def observed(
    correction: CacheCorrection, lost: float, rounds: int, kept_out: bool = True, preemptions: int = 0
) -> float:
    for _ in range(rounds * 20):
        correction.observe(1000, int(1000 * (1 - lost)), preemptions, active=20, kept_out=kept_out)
    return correction.share


def test_the_limit_follows_what_the_caches_lose():
    assert observed(CacheCorrection(1.0), 0.3, 1) == pytest.approx(1 - 0.5 * (0.3 - 0.1))
    assert observed(CacheCorrection(1.0), 0.9, 1) == pytest.approx(0.9)  # never more than a tenth at once
    assert observed(CacheCorrection(1.0), 0.0, 2) == pytest.approx(1.02**2)
    assert observed(CacheCorrection(1.0), 0.08, 5) == 1.0  # little enough, and not so little that more would fit
    assert observed(CacheCorrection(1.0), 0.0, 5, kept_out=False) == 1.0  # nobody would come
    assert observed(CacheCorrection(1.0), 0.0, 1, preemptions=1) == pytest.approx(0.9)
    assert observed(CacheCorrection(1.0), 1.0, 50) == CacheCorrection.LOWEST
    assert observed(CacheCorrection(1.0), 0.0, 50) == CacheCorrection.HIGHEST


def test_the_limit_moves_once_a_round():
    correction = CacheCorrection(1.0)
    for turn in range(19):
        correction.observe(1000, 0, 0, active=20, kept_out=True)
        assert correction.share == 1.0, turn
    correction.observe(1000, 0, 0, active=20, kept_out=True)
    assert correction.share < 1.0
