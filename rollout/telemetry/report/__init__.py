"""The HTML report of one run or several: a single file that needs no network."""

from makespan.rollout.telemetry.report.page import render, write_report
from makespan.rollout.telemetry.report.run import ReportedRun, read_run, reported

__all__ = ["ReportedRun", "read_run", "render", "reported", "write_report"]
