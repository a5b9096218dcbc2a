"""A log that cannot be written ends; what it observes does not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from makespan.rollout.telemetry.events import EventLog

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_log_with_one_line_and_raises_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    with EventLog(FULL, "broker") as event_log:
        for _ in range(1_000):
            event_log.emit("something", "t", data="x" * 100)
        event_log.flush()
    assert [(record.name, record.levelno) for record in caplog.records] == [("makespan.telemetry", logging.ERROR)]
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize("last", ["emit", "flush", "close"])
def test_a_disk_that_fills_up_later_ends_the_log_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, last: str
) -> None:
    event_log = EventLog(tmp_path / "log.jsonl", "broker")
    assert caplog.records == []
    with FULL.open("wb") as full:
        event_log._file = full
        event_log.emit("something", "t", data="x" * (100_000 if last == "emit" else 10))
        if last == "flush":
            event_log.flush()
        event_log.close()
        event_log.emit("later")
    assert len(caplog.records) == 1


def test_a_log_that_can_be_written_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "log.jsonl"
    with EventLog(path, "broker") as event_log:
        event_log.emit("something")
    assert len(path.read_text().splitlines()) == 2  # the header and the event
    assert caplog.records == []


def test_a_path_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        EventLog(tmp_path, "broker")
