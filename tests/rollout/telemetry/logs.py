"""Event logs written by hand, line by line, without the code that writes them in a run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def header(role: str = "engine", boot: str = "boot-a", version: int = 1, writer: str = "") -> dict[str, Any]:
    return {
        "version": version,
        "writer": writer or f"{role}@{boot}",
        "role": role,
        "host": boot,
        "host_boot_id": boot,
        "pid": 1,
        "wall_s": 0.0,
        "monotonic_s": 0.0,
    }


def event(seq: int, at_s: float, kind: str, trajectory: str = "", /, **data: Any) -> dict[str, Any]:
    return {"seq": seq, "monotonic_s": at_s, "kind": kind, "trajectory_id": trajectory, "data": data}


def write(path: Path, lines: Iterable[dict[str, Any]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def generate(seq: int, at_s: float, trajectory: str, start_s: float, **data: Any) -> dict[str, Any]:
    figures = {
        "turn": 0,
        "replica": "replica-0",
        "start_s": start_s,
        "prompt_tokens": 100,
        "generated_tokens": 11,
        "cached_tokens": 0,
        "recomputed_tokens": 0,
        "preemptions": 0,
        "queue_s": 0.0,
        "prefill_s": 0.0,
        "decode_s": 0.0,
    }
    return event(seq, at_s, "generate", trajectory, **(figures | data))


def act(seq: int, at_s: float, trajectory: str, start_s: float, **data: Any) -> dict[str, Any]:
    figures = {"turn": 0, "start_s": start_s, "slot_class": "env.step", "queue_s": 0.0, "service_s": 0.0}
    return event(seq, at_s, "act", trajectory, **(figures | data))


def action(seq: int, number: int, submitted_s: float, released_s: float, **data: Any) -> dict[str, Any]:
    """An environment server's record of an action; `number` is the session's (0: the reset)."""
    data = {"trajectory": "a#0", "granted_s": submitted_s, "slot_class": "env.step", "outcome": "ok", "job": "j"} | data
    trajectory = data.pop("trajectory")
    times = {"submitted_s": submitted_s, "released_s": released_s}
    return event(seq, released_s, "action", trajectory, seq=number, **times, **data)


def reset(seq: int, at_s: float, trajectory: str, start_s: float, **data: Any) -> dict[str, Any]:
    figures = {"turn": 0, "start_s": start_s, "slot_class": "env.start", "queue_s": 0.0, "service_s": 0.0}
    return event(seq, at_s, "reset", trajectory, **(figures | data))


def ended(seq: int, at_s: float, trajectory: str, **data: Any) -> dict[str, Any]:
    figures = {"state": "finished", "reward": 1.0, "turns": 1, "generated_tokens": 11, "failure": None}
    return event(seq, at_s, "ended", trajectory, **(figures | data))


def start(seq: int, at_s: float, **data: Any) -> dict[str, Any]:
    figures = {"trajectories": 2, "replicas": ["replica-0"], "concurrency": None, "source": "model"}
    return event(seq, at_s, "batch_start", **(figures | data))


def two_trajectories() -> list[dict[str, Any]]:
    """`b` waits for `a` (6 s of admission) and ends last. All figures asserted of it are worked out by hand."""
    return [
        header(),
        event(0, 0.5, "environment_server", slots={"env.start": 1, "env.step": 2}, server=None),
        start(1, 10.0),
        event(2, 10.0, "submitted", "a#0", task_id="a", group="a"),
        event(3, 10.0, "submitted", "b#0", task_id="b", group="b"),
        event(4, 10.0, "admitted", "a#0"),
        reset(5, 11.0, "a#0", 10.0, service_s=1.0),
        generate(6, 13.0, "a#0", 11.0, prompt_tokens=1000, queue_s=0.25, prefill_s=1.0, decode_s=0.5),
        act(7, 16.0, "a#0", 13.0, queue_s=1.0, service_s=2.0),
        ended(8, 16.0, "a#0", reward=0.5),
        event(9, 16.0, "admitted", "b#0"),
        reset(10, 17.0, "b#0", 16.0, service_s=1.0),
        generate(
            11,
            20.0,
            "b#0",
            17.0,
            prompt_tokens=400,
            generated_tokens=21,
            queue_s=0.5,
            prefill_s=1.2,
            decode_s=1.0,
            cached_tokens=100,
            recomputed_tokens=100,
            preemptions=1,
        ),
        act(12, 24.0, "b#0", 20.0, queue_s=0.5, service_s=3.0),
        ended(13, 24.5, "b#0", reward=1.0),
        event(14, 25.0, "batch_end", stopped=False),
    ]
