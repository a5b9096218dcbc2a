"""Deadlines of many requests, at O(1) each.

Nearly every request is answered long before its deadline, so setting and clearing must cost next to nothing while
expiry may be coarse: items lie in buckets of `granularity_s`, and an item expires up to that much late, never early.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Deadlines(Generic[Item]):
    """The times by which items must be over; it owns no clock."""

    def __init__(self, granularity_s: float = 0.05) -> None:
        self._granularity_s = granularity_s
        self._bucket_of: dict[Item, int] = {}
        self._buckets: dict[int, dict[Item, None]] = {}
        self._order: list[int] = []

    def set(self, item: Item, at_s: float) -> None:
        """Let `item` expire at `at_s`; replaces its earlier deadline."""
        self.clear(item)
        bucket = math.ceil(at_s / self._granularity_s)
        items = self._buckets.get(bucket)
        if items is None:
            items = self._buckets[bucket] = {}
            heapq.heappush(self._order, bucket)
        items[item] = None
        self._bucket_of[item] = bucket

    def clear(self, item: Item) -> None:
        """Forget the item's deadline, if it has one."""
        bucket = self._bucket_of.pop(item, None)
        if bucket is not None:
            del self._buckets[bucket][item]

    def expired(self, now: float) -> list[Item]:
        """The items whose time is over, earliest bucket first; they have no deadline any more."""
        over: list[Item] = []
        while self._order and self._order[0] * self._granularity_s <= now:
            for item in self._buckets.pop(heapq.heappop(self._order)):
                del self._bucket_of[item]
                over.append(item)
        return over

    def __len__(self) -> int:
        return len(self._bucket_of)
