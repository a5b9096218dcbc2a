"""Makespan tracking in Weights & Biases.

`attach` joins the run that exists (a trainer's) or starts one. Each batch becomes one row under `makespan/`, with an
axis of its own (`makespan/step`), a table of its slowest trajectories with the reason, and the report as an HTML panel.

**Rows of a run that belongs to a trainer.** W&B has one step counter a run. Whoever advances it (`run.log` without a
step does) makes it refuse the trainer's next explicit step as out of order. So our figures are laid into the row that
is open (`commit=False`) and are written when the trainer goes on. A row takes one batch: a further one waits in this
process until the step has moved on, and at the latest for `close`, when nobody's step can be disturbed any more. Call
`close` before the run is finished.

**Failures.** Tracking is never worth a rollout: whatever W&B raises is logged once a kind and swallowed, and without
the package nothing is tracked.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

from makespan.rollout.telemetry.report import ReportedRun, render
from makespan.rollout.telemetry.slowest import slowest
from makespan.rollout.telemetry.timeline import Phase

logger = logging.getLogger("makespan.wandb")

PREFIX = "makespan/"
AXIS = "makespan/step"
"""The step axis of everything under `makespan/`."""
TABLE = "makespan/slowest_trajectories"
PANEL = "makespan/timeline"

SLOWEST = 20
"""Rows of the table: more than anyone reads, few enough to log at every step."""

Mode = Literal["online", "offline", "disabled"]


def attach(
    run: Any = None,
    *,
    project: str = "makespan",
    name: str | None = None,
    mode: Mode | None = None,
    directory: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Tracker:
    """Track in `run`, or in the process's current W&B run, or, where there is none, in a new one.

    A new run is made with the other arguments (`mode=None` is W&B's own choice: `WANDB_MODE`, else online). Never
    raises: where W&B is missing or fails, the tracker does nothing.
    """
    owned = False
    try:
        import wandb

        run = run or wandb.run
        if run is None:
            run = wandb.init(project=project, name=name, mode=mode, dir=directory, config=dict(config or {}))
            owned = True
    except Exception as error:  # whatever it is, a rollout does not end for it
        logger.warning("W&B is not available, makespan is not tracked there: %s: %s", type(error).__name__, error)
        run = None
    return Tracker(run, owned=owned)


def attach_existing() -> Tracker:
    """Track in the process's current W&B run if there is one; imports nothing and starts nothing."""
    module = sys.modules.get("wandb")
    return Tracker(getattr(module, "run", None), owned=False)


class Tracker:
    """Writes batches into one W&B run; `run=None` writes nothing.

    `owned`: the run was started for us, nobody else logs into it, and `close` finishes it.
    """

    def __init__(self, run: Any, *, owned: bool) -> None:
        self._run = run
        self._owned = owned
        self._waiting: list[dict[str, Any]] = []
        self._filled_step: int | None = None  # the run's step whose row has figures of ours
        self._complained: set[str] = set()
        self._attempt(self._define_axis)

    def log(self, reported: ReportedRun, step: int, *, panel: bool = True) -> None:
        """Log a batch as the row of `step`; `panel=False` leaves the HTML report out (some MB for a large batch)."""
        self._attempt(self._log_batch, reported, step, panel)

    def log_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        """Log a table of slowest trajectories beside figures that the trainer logs itself.

        It has no place on the axis (a column should say its step): the open row may be that of the trainer's last step,
        whose figures have theirs.
        """
        self._attempt(self._log_table, columns, rows)

    def close(self) -> None:
        """Write what waits, and finish the run if it is ours. Nothing can be logged afterwards."""
        self._attempt(self._write_all)
        if self._owned:
            self._attempt(self._finish)
        self._run = None

    def _attempt(self, act: Callable[..., None], *arguments: Any) -> None:
        if self._run is None:
            return
        try:
            act(*arguments)
        except Exception as error:  # tracking never stops a rollout
            kind = f"{type(error).__name__}: {error}"
            if kind not in self._complained:
                self._complained.add(kind)
                logger.warning("W&B failed, makespan figures are missing there: %s", kind)

    def _finish(self) -> None:
        self._run.finish()

    def _define_axis(self) -> None:
        self._run.define_metric(AXIS, hidden=True)
        self._run.define_metric(f"{PREFIX}*", step_metric=AXIS)

    def _log_batch(self, reported: ReportedRun, step: int, panel: bool) -> None:
        import wandb

        row: dict[str, Any] = {
            f"{PREFIX}{name}": value for name, value in reported.figures.items() if value is not None
        }
        columns, rows = slowest_table(reported)
        row[TABLE] = wandb.Table(columns=columns, data=rows)
        if panel:
            row[PANEL] = wandb.Html(render([reported]), inject=False)
        self._log_row({**row, AXIS: step})

    def _log_table(self, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        self._log_row({TABLE: wandb.Table(columns=columns, data=rows)})

    def _log_row(self, row: dict[str, Any]) -> None:
        if self._owned:
            self._run.log(row)
            return
        self._waiting.append(row)
        step = self._run.step
        if step != self._filled_step:
            self._run.log(self._waiting[0], commit=False)
            self._filled_step = step
            del self._waiting[0]

    def _write_all(self) -> None:
        while self._waiting:
            step = self._run.step
            if step == self._filled_step:
                self._run.log({}, commit=True)  # nobody else logs any more: close the row that we filled
            self._run.log(self._waiting[0], commit=False)
            self._filled_step = self._run.step
            del self._waiting[0]


def slowest_table(reported: ReportedRun) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the trajectories that ended last, the last one first; None: not measured."""
    columns = ["trajectory", "group", "state", "end_s", "turns", "reward", "why_late"]
    columns += [f"{phase.name.lower()}_s" for phase in Phase]
    columns += ["generated_tokens", "cached_tokens", "recomputed_tokens"]
    rows = []
    for slow in slowest(reported.timeline, SLOWEST):
        row = slow.row
        facts: list[Any] = [row.trajectory_id, row.group, row.state, row.end_s, row.turns, row.reward, slow.reason]
        facts += [slow.seconds[phase] for phase in Phase]
        rows.append([*facts, row.generated_tokens, row.cached_tokens, row.recomputed_tokens])
    return columns, rows
