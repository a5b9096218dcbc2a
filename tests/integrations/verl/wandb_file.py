"""Reads the history of a `.wandb` file, which no public API of wandb does any more.

The file is a 7-byte header and LevelDB log records: blocks of 32 KiB, each record with a 7-byte header (checksum,
length, type). Type 1 is a whole message, 2 to 4 its first, middle and last part. A message is a protobuf `Record`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024


def history(path: Path) -> list[dict[str, Any]]:
    """The rows that were logged, in order; nested keys are joined with `.`."""
    rows = []
    for message in _messages(path.read_bytes()):
        record = Record()
        record.ParseFromString(message)
        if record.HasField("history"):
            rows.append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows


def _messages(data: bytes) -> list[bytes]:
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
        if kind == 0:
            break
        part += data[start:position]
        if kind in (1, 4):
            messages.append(part)
            part = b""
    return messages
