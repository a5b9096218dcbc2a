"""A worker extension that loses one weight sync: it takes the weights and does not load them."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from verl_cpu_worker import CpuWeightSync


class LosingWeightSync(CpuWeightSync):
    """The sync number `LOSE_SYNC` (the first, before any step, is number 0) is lost."""

    syncs = 0

    def load_received_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        number, type(self).syncs = type(self).syncs, type(self).syncs + 1
        if number != int(os.environ["LOSE_SYNC"]):
            super().load_received_weights(weights)
