"""What a run shows: its progress while it runs, and its figures when it is over.

On a terminal the progress is one live block; elsewhere (a log file, CI) a plain line every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from makespan.rollout.engine import EngineStatus, RolloutEngine
from makespan.rollout.telemetry.summary import Summary

LIVE_INTERVAL_S = 0.5
PLAIN_INTERVAL_S = 10.0

SlotsInUse = Callable[[], Awaitable[str]]
"""Asks the environment server; answers for people, e.g. `3/8 step`."""


def progress_line(status: EngineStatus, elapsed_s: float, slots: str) -> str:
    """One line on where the batch stands. The time left assumes that trajectories go on ending at the same pace."""
    over = status.done + status.failed
    rate = status.generated_tokens / elapsed_s if elapsed_s > 0 else 0.0
    left = f"{(status.total - over) * elapsed_s / over:.0f} s left" if over else "time left unknown"
    failed = f", {status.failed} failed" if status.failed else ""
    return (
        f"{status.done}/{status.total} done{failed}, {status.running} running ({status.acting} in the environment), "
        f"{status.waiting} waiting | {rate:.0f} tokens/s | slots {slots} | {elapsed_s:.0f} s, {left}"
    )


@contextlib.asynccontextmanager
async def progress(console: Console, engine: RolloutEngine, slots_in_use: SlotsInUse) -> AsyncIterator[None]:
    """Show the engine's progress for the time of the block."""
    painter = asyncio.create_task(_paint(console, engine, slots_in_use))
    try:
        yield
    finally:
        painter.cancel()
        await asyncio.gather(painter, return_exceptions=True)


async def _paint(console: Console, engine: RolloutEngine, slots_in_use: SlotsInUse) -> None:
    loop = asyncio.get_running_loop()
    start_s = loop.time()

    async def line() -> str:
        return progress_line(engine.status(), loop.time() - start_s, await slots_in_use())

    if not console.is_terminal:
        while True:
            await asyncio.sleep(PLAIN_INTERVAL_S)
            console.print(await line(), soft_wrap=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            live.update(await line(), refresh=True)
            await asyncio.sleep(LIVE_INTERVAL_S)


def _figure(value: float | None, unit: str = "", digits: int = 1) -> str:
    return "not measured" if value is None else f"{value:,.{digits}f}{unit}"


def _share(part: float | None, whole: float | None) -> str:
    return "" if part is None or not whole else f" ({part / whole:.0%})"


def show_summary(console: Console, summary: Summary) -> None:
    """Print a run's figures."""
    table = Table(title=f"run {summary.name}", show_header=False, title_justify="left")
    for name, value in _rows(summary):
        table.add_row(name, value)
    console.print(table)
    for note in summary.notes:
        console.print(f"note: {note}", soft_wrap=True)


_REWARD_OF = {
    "script": "reward (scripted actions: says nothing of the model)",
    "trace": "reward (the recording's)",
}


def _rows(summary: Summary) -> list[tuple[str, str]]:
    phases, tokens, counts = summary.phases_s, summary.tokens, summary.trajectories
    inference = [phases.prefill, phases.decode]
    inference_s = None if None in inference else sum(value for value in inference if value is not None)
    over = (
        ""
        if not summary.lower_bound_s
        else f" ({summary.makespan_s / summary.lower_bound_s:.2f} times the lower bound)"
    )
    ends = ", ".join(
        f"{name} {count}" for name, count in msgspec.structs.asdict(counts).items() if name != "total" and count
    )
    rows = [
        ("makespan", f"{_figure(summary.makespan_s, ' s')}{over}" + ("" if summary.complete else ", stopped early")),
        ("lower bound", _figure(summary.lower_bound_s, " s")),
        ("trajectories", f"{counts.total}: {ends or 'none ended'}"),
        (
            "completion p50 / p90 / p99",
            " / ".join(_figure(v, " s") for v in msgspec.structs.astuple(summary.completion_s)),
        ),
        ("inferences", f"{summary.inferences:,}"),
        ("prompt tokens", f"{tokens.prompt:,}"),
        ("  cached", f"{_figure(tokens.cached, digits=0)}{_share(tokens.cached, tokens.prompt)}"),
        ("  recomputed", f"{_figure(tokens.recomputed, digits=0)}{_share(tokens.recomputed, tokens.prompt)}"),
        (
            "generated tokens",
            f"{tokens.generated:,} ({tokens.generated / max(summary.makespan_s, 1e-9):,.0f} a second)",
        ),
        ("preemptions", _figure(summary.preemptions, digits=0)),
        (
            "prefill's share of request time",
            "not measured" if not inference_s else f"{(phases.prefill or 0) / inference_s:.0%}",
        ),
    ]
    rows += [
        (f"seconds in {name.replace('_', ' ')}", _figure(value, " s"))
        for name, value in msgspec.structs.asdict(phases).items()
    ]
    rows += [
        (
            f"slots {name}",
            f"{c.slots if c.slots is not None else '?'}, {c.actions} actions, "
            f"used {'not measured' if c.utilisation is None else f'{c.utilisation:.0%}'}",
        )
        for name, c in summary.slot_classes.items()
    ]
    rows.append(
        ("last 10% / last 1% took", " / ".join(_figure(v, " s") for v in msgspec.structs.astuple(summary.tail_s)))
    )
    if (chain := summary.last_chain) is not None:
        parts = {name: value for name, value in msgspec.structs.asdict(chain).items() if isinstance(value, float)}
        longest = sorted((name for name in parts if name not in ("total", "inference")), key=lambda name: -parts[name])
        where = ", ".join(f"{name.replace('_', ' ')} {parts[name]:.1f} s" for name in longest[:3])
        rows.append(("last to end", f"{chain.trajectory_id}: {where}"))
    label = _REWARD_OF.get(summary.reward.source, "reward")
    rows.append((label, _figure(summary.reward.mean, digits=3)))
    if summary.reward.source == "model":
        rows += [(f"  {task}", f"{value:.3f}") for task, value in summary.reward.by_task.items()][:16]
    rows += [(f"failed: {kind}", str(count)) for kind, count in summary.failures.items()]
    return rows
