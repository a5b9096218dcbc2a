"""Parking: taking back what was admitted, when contexts grow out of the memory.

A limit on the number of trajectories looks at their mean context. Contexts grow while they run, and where they grow
together a number that fitted at the start does not fit later; admission alone cannot undo what it has admitted. So a
trajectory asks again before every inference (`reach`). While the contexts of the active ones exceed the memory of all
replicas, the newest-admitted active one is *paused*: it may finish what it is doing, and waits at its next inference.
It goes on, before anybody new starts, once all fit into `RESUME_SHARE` of the memory. The oldest is never paused, so
that the batch always goes on.

The newest give way because what they lose is least: a short context is cheap to compute again, and the old ones are
nearer to their end, which is when their memory comes back.
"""

from __future__ import annotations

import heapq

from makespan.rollout.admission import AdmissionStatistics
from makespan.rollout.order import AdmissionOrder, ArrivalOrder

RESUME_SHARE = 0.95


class Parking:
    RESUME = RESUME_SHARE
    PARK = 1.0
    WHO = "newest"

    def __init__(self, total: int, concurrency: int | None, order: AdmissionOrder | None = None, held=lambda n: n) -> None:
        self._total = total
        self._held_of = held
        self._concurrency = concurrency
        self._waiting = ArrivalOrder() if order is None else order
        self._number: dict[str, int] = {}
        self._numbers = 0
        self._held: dict[str, int] = {}
        self._active: list[tuple[int, str]] = []
        self._is_active: dict[str, bool] = {}
        self._paused: list[tuple[int, str]] = []
        self._parked: set[str] = set()
        self._sum = 0
        self._nactive = 0
        self.pauses = 0

    def submit(self, t):
        self._waiting.submit(t)

    def start(self):
        go = []
        while self._paused:
            number, t = self._paused[0]
            if self._number.get(t) != number or self._is_active[t]:
                heapq.heappop(self._paused)
                continue
            if self._nactive and self._sum + self._held[t] > self.RESUME * self._total:
                return go
            heapq.heappop(self._paused)
            self._activate(t)
            if t in self._parked:
                self._parked.remove(t)
                go.append(t)
        while len(self._waiting) and (self._concurrency is None or len(self._number) < self._concurrency) and self._sum <= self.RESUME * self._total:
            t = self._waiting.next()
            self._numbers += 1
            self._number[t] = self._numbers
            self._held[t] = 0
            self._activate(t)
            go.append(t)
        return go

    def _activate(self, t):
        self._is_active[t] = True
        self._nactive += 1
        self._sum += self._held[t]
        heapq.heappush(self._active, (-self._number[t], t))

    def _deactivate(self, t):
        self._is_active[t] = False
        self._nactive -= 1
        self._sum -= self._held[t]

    def grew(self, t, context_tokens):
        held = self._held_of(context_tokens)
        if self._is_active[t]:
            self._sum += held - self._held[t]
        self._held[t] = held
        while self._sum > self.PARK * self._total and self._nactive > 1:
            number, newest = self._active[0]
            if self._number.get(newest) != -number or not self._is_active[newest]:
                heapq.heappop(self._active)
                continue
            heapq.heappop(self._active)
            self._deactivate(newest)
            self.pauses += 1
            heapq.heappush(self._paused, (-number, newest))

    def reach(self, t, context_tokens) -> bool:
        """Whether it may go on now; else it is named by a later `start`."""
        self.grew(t, context_tokens)
        if self._is_active[t]:
            return True
        self._parked.add(t)
        return False

    def finish(self, t):
        self._waiting.withdraw(t)
        if t in self._number:
            if self._is_active[t]:
                self._deactivate(t)
            del self._number[t], self._is_active[t], self._held[t]
            self._parked.discard(t)

    def statistics(self):
        return AdmissionStatistics(len(self._number), len(self._waiting), self._concurrency)
