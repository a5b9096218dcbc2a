"""Reads the history of a `.wandb` file, which no public API of wandb does any more.

The file is a 7-byte header and LevelDB log records: blocks of 32 KiB, each record with a 7-byte header (checksum,
length, type). Type 1 is a whole message, 2 to 4 its first, middle and last part. A message is a protobuf `Record`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024


def wait_until_written(path: Path, timeout_s: float = 20.0) -> Path:
    """Wait for a finished run's last record: W&B's service may still be writing when `finish` returns."""
    deadline_s = time.monotonic() + timeout_s
    while not any(record.HasField("exit") for record in _records(path)):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} has no exit record after {timeout_s} s")
        time.sleep(0.05)
    return path


def history(path: Path) -> list[dict[str, Any]]:
    """The rows that were logged, in order; nested keys are joined with `.`."""
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in _records(path)
        if record.HasField("history")
    ]


def metrics(path: Path) -> dict[str, dict[str, Any]]:
    """What `define_metric` said, by the metric's name or pattern; of several records for one the last counts."""
    defined = {}
    for record in _records(path):
        if record.HasField("metric"):
            metric = record.metric
            defined[metric.name or metric.glob_name] = {
                "step_metric": metric.step_metric,
                "hidden": metric.options.hidden,
            }
    return defined


def _records(path: Path) -> Iterator[Record]:
    for message in _messages(path.read_bytes()):
        record = Record()
        record.ParseFromString(message)
        yield record


def _messages(data: bytes) -> list[bytes]:
    """Whole messages only: the file may be read while its last one is being written."""
    messages: list[bytes] = []
    part = b""
    position = HEADER_BYTES
    while position + HEADER_BYTES <= len(data):
        left_in_block = BLOCK_BYTES - position % BLOCK_BYTES
        if left_in_block < HEADER_BYTES:
            position += left_in_block
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        start = position + HEADER_BYTES
        position = start + length
        if kind == 0 or position > len(data):
            break
        part += data[start:position]
        if kind in (1, 4):
            messages.append(part)
            part = b""
    return messages
