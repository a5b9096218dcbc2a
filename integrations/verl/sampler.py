"""verl's sampler plug-in: the place where a step waits for its batch, and so the place to measure and to bound it.

`sample()` returns a batch when enough groups (the `n` trajectories of a prompt) are over. To that these classes add:

* **figures**: the step's makespan and what its trajectories report of themselves, in verl's own log;
* **a deadline**: stock verl waits for ever for a group whose agent-loop worker died or whose environment hangs. A group
  that is older than `deadline_s` counts as failed instead: what it produced so far is used, the rest is dropped
  whenever it arrives;
* **no training on failures**: a trajectory that failed (the environment died, a deadline passed) has no reward. Left in
  the batch it would be masked, but its 0 would still move the baseline of its group. It is taken out, together
  with its group when fewer than two remain (GRPO scores a lone trajectory without a baseline).

Take `MakespanReplayBuffer` for the trainer mode `sync` and `MakespanReplayBufferAsync` for the others.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import transfer_queue as tq  # type: ignore[import-untyped]
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from makespan.integrations.verl.figures import EXTRA_FIELD, TrajectoryFigures, slowest_table, step_metrics
from makespan.integrations.verl.settings import SamplerSettings, parse
from makespan.integrations.wandb import AXIS, Tracker, attach_existing
from makespan.rollout.errors import ConfigError, MakespanError

logger = logging.getLogger(__name__)


class NothingToTrainOn(MakespanError):
    """A step whose trajectories all failed, or never came."""


class _MeasuredSampling(ReplayBuffer):  # type: ignore[misc]
    """What both samplers share. In the asynchronous one, verl's `ReplayBufferAsync` comes between this and its base."""

    trainer_modes: tuple[str, ...]
    waiting_metric: str
    """The name of the time that `sample` took. In `sync` mode a step's generation starts and ends with it."""

    def __init__(self, *args: Any, trainer_mode: str, sampler_kwargs: Any, **kwargs: Any) -> None:
        if trainer_mode not in self.trainer_modes:
            raise ConfigError(
                f"trainer.v1.sampler.custom_sampler.name: {type(self).__name__} is for the trainer modes "
                f"{', '.join(self.trainer_modes)}, not {trainer_mode!r}: take "
                f"{'MakespanReplayBuffer' if trainer_mode == 'sync' else 'MakespanReplayBufferAsync'}"
            )
        self._settings = parse(SamplerSettings, dict(sampler_kwargs or {}), "trainer.v1.sampler.sampler_kwargs")
        self._first_seen_s: dict[tuple[str, str], float] = {}
        self._given_up: list[str] = []  # groups abandoned in the present call of `sample`
        self._tracker: Tracker | None = None  # joined with the first step: verl starts its W&B run after this object
        self._abandoned: dict[str, set[str]] = {}  # groups of earlier calls -> their rows that the trainer was given
        super().__init__(
            *args,
            trainer_mode=trainer_mode,
            sampler_kwargs=sampler_kwargs,
            poll_interval=self._settings.poll_interval_s,
            **kwargs,
        )

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's `sample`, with the step's figures among the metrics and without failed trajectories.

        Raises `NothingToTrainOn` when no trajectory of a training batch is left.
        """
        started_s = time.monotonic()
        self._given_up = []
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        waited_s = time.monotonic() - started_s
        for group in self._given_up:
            self._abandoned[group] = {key for key in batch.keys if _group(key) == group}

        figures = self._figures_of(batch)
        if partition_id == "train":
            self._track(batch, figures, global_steps)
            metrics = {**metrics, AXIS: global_steps}
        dropped = self._untrainable(batch, figures) if partition_id == "train" else set()
        if dropped:
            batch = self._without(batch, dropped)
        metrics = {
            **metrics,
            self.waiting_metric: waited_s,
            **step_metrics([f for f in figures if f is not None]),
            "makespan/groups/abandoned": len(self._given_up),
            "makespan/trajectories/dropped": len(dropped),
        }
        return batch, metrics

    def _track(self, batch: KVBatchMeta, figures: list[TrajectoryFigures | None], step: int) -> None:
        """Give verl's W&B run, if it has one, makespan's step axis and a table; the figures are in verl's own log."""
        if self._tracker is None:
            self._tracker = attach_existing()
        known = [(key, figure) for key, figure in zip(batch.keys, figures, strict=True) if figure is not None]
        if known:
            keys, trajectories = zip(*known, strict=True)
            self._tracker.log_table(*slowest_table(keys, trajectories, step))

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """verl calls this while a batch is incomplete; also where groups are given up."""
        now = time.monotonic()
        waiting = self.pending_keys[partition_id] | self.running_keys[partition_id]
        seen = self._first_seen_s
        for group in waiting:
            seen.setdefault((partition_id, group), now)
        for partition, group in [*seen]:
            if partition == partition_id and group not in waiting:
                del seen[partition, group]
        deadline_s = self._settings.deadline_s
        self._abandon(partition_id, [group for group in waiting if now - seen[partition_id, group] > deadline_s])
        return float(super()._wait_for_next_poll(partition_id, last_debug_time))

    def _abandon(self, partition_id: str, groups: Iterable[str]) -> None:
        for group in groups:
            logger.error(
                "makespan: group %s is not finished after %.0f s (sampler_kwargs.deadline_s) and counts as failed. "
                "Its agent-loop worker may have died; its environment or replica may not answer.",
                group,
                self._settings.deadline_s,
            )
            tq.kv_put(key=group, partition_id=partition_id, tag={"status": "failure"})
            self._given_up.append(group)

    def _sync_metadata_from_transfer_queue(self) -> None:
        """verl reads the queue's state; rows of abandoned groups that came too late are removed here."""
        super()._sync_metadata_from_transfer_queue()
        if not self._abandoned:
            return
        for partition_id, rows in self.partitions.items():
            late = [
                key
                for key in rows
                if (handed_out := self._abandoned.get(_group(key))) is not None and key not in handed_out
            ]
            if late:
                tq.kv_clear(keys=late, partition_id=partition_id)
                for key in late:
                    del rows[key]

    def _figures_of(self, batch: KVBatchMeta) -> list[TrajectoryFigures | None]:
        """Each row's figures; None for rows of agent loops that are not makespan's."""
        if not batch.keys:
            return []
        rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        extra_fields = [getattr(row, "data", row) for row in rows["extra_fields"]]
        return [
            msgspec.convert(fields[EXTRA_FIELD], TrajectoryFigures) if EXTRA_FIELD in fields else None
            for fields in extra_fields
        ]

    def _untrainable(self, batch: KVBatchMeta, figures: list[TrajectoryFigures | None]) -> set[str]:
        """The rows to leave out: failed ones, and one that is alone because the rest of its group failed or is lost."""
        failed = {k for k, f in zip(batch.keys, figures, strict=True) if f is not None and f.state == "failed"}
        incomplete = {_group(key) for key in failed} | self.failure_keys[batch.partition_id]
        left = Counter(_group(key) for key in batch.keys if key not in failed)
        alone = {key for key in batch.keys if left[_group(key)] == 1 and _group(key) in incomplete}
        if not failed | alone:
            return set()
        if len(failed | alone) == len(batch.keys):
            kinds = Counter(f.failure for f in figures if f is not None and f.failure)
            raise NothingToTrainOn(
                f"none of the step's {len(batch.keys)} trajectories can be trained on: {len(failed)} failed "
                f"({', '.join(f'{kind}: {count}' for kind, count in kinds.most_common())}). Look at the environment "
                "server (`makespan env status`) and at the agent-loop workers' log."
            )
        return failed | alone

    @staticmethod
    def _without(batch: KVBatchMeta, dropped: set[str]) -> KVBatchMeta:
        tq.kv_clear(keys=sorted(dropped), partition_id=batch.partition_id)
        kept = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if key not in dropped]
        return KVBatchMeta(
            partition_id=batch.partition_id, keys=[key for key, _ in kept], tags=[tag for _, tag in kept]
        )


class MakespanReplayBuffer(_MeasuredSampling):
    """For the trainer mode `sync`."""

    trainer_modes = ("sync",)
    waiting_metric = "makespan/makespan_s"


class MakespanReplayBufferAsync(_MeasuredSampling, ReplayBufferAsync):  # type: ignore[misc]
    """For the trainer modes `colocate_async` and `separate_async`."""

    trainer_modes = ("colocate_async", "separate_async")
    waiting_metric = "makespan/wait_s"


def _group(key: str) -> str:
    """The prompt's id in a queue key: `{group}` for a prompt, `{group}_{session}_{index}` for a trajectory."""
    return key.split("_")[0]
