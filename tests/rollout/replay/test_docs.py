"""The trace that the documentation shows is one."""

import re
from pathlib import Path

import msgspec

from makespan.rollout.replay.trace import TraceHeader, TraceTrajectory, check

PAGE = Path(__file__).parents[3] / "docs" / "traces.md"


def test_the_examples_of_the_format_are_valid():
    header, trajectory = re.findall(r"```json\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert msgspec.json.decode(header, type=TraceHeader).version == 1
    check(msgspec.json.decode(trajectory, type=TraceTrajectory))
