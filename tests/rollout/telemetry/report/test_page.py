"""The page as text: what it says without any script, and the data that it carries."""

import base64
import gzip
import json
import re
import struct
from html.parser import HTMLParser

import pytest

from makespan.rollout.telemetry.report import render, reported
from makespan.rollout.telemetry.report.page import value_text
from tests.rollout.telemetry import batches, logs


class Tables(HTMLParser):
    """Rows of all tables as lists of cell texts."""

    def __init__(self, page):
        super().__init__()
        self.rows, self._in_cell = [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self._in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self.rows[-1][-1] += data


def report(tmp_path, lines, name="run", **settings):
    return reported(batches.merged(tmp_path, lines), name=name, configuration=settings or None)


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="makespan-data">(.*?)</script>', page, re.S)[1])


def unpacked(text, code):
    data = gzip.decompress(base64.b64decode(text))
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


def test_figures_stand_in_a_table_that_needs_no_script(tmp_path):
    rows = {row[0]: row for row in Tables(render([report(tmp_path, batches.one_hundred())])).rows}
    assert rows["tail/after_90_s"][1:3] == ["30.0 s", "lower"]
    assert rows["tail/idle_slot_90_s/env.step"][1] == "37.0 s"
    assert rows["trajectories/finished"][1] == "100"
    assert rows["forecast/turns_error"][1] == "not measured"
    assert rows["concurrency/reference"][1] == "100"


def test_runs_stand_side_by_side_and_differences_are_marked(tmp_path):
    runs = [
        report(tmp_path, logs.two_trajectories(), seed=1, scheduling={"policy": "fifo"}),
        report(tmp_path, batches.one_hundred(), seed=1, scheduling={"policy": "caas"}),
    ]
    rows = {row[0]: row for row in Tables(render(runs)).rows}
    assert rows["figure"][1:3] == ["run", "run (2)"]
    assert rows["makespan_s"][1:3] == ["15.0 s", "120.0 s"]
    assert rows["≠ scheduling.policy"][1:] == ["fifo", "caas"]
    assert rows["seed"][1:] == ["1", "1"]
    assert rows["slots/env.start/wait_max_s"][1:3] == ["0.000 s", "not measured"]


def test_segments_are_packed_without_drift(tmp_path):
    data = data_of(render([report(tmp_path, logs.two_trajectories())]))
    segments = data["runs"][0]["segments"]
    counts, ticks = unpacked(segments["counts"], "I"), unpacked(segments["ticks"], "I")
    phases, turns = unpacked(segments["phases"], "B"), unpacked(segments["turns"], "h")
    sites = unpacked(segments["sites"], "H")
    assert counts == [7, 10]
    # `a`, admitted at once: 1 s of reset; 0.25 s in a queue, 1 of prefill, 0.5 of decode, what remains of 2 s; 1 s in
    # the slots' queue and 2 in the environment.
    assert ticks[:7] == [10_000, 2_500, 10_000, 5_000, 2_500, 10_000, 20_000]
    assert sum(ticks[7:]) == 145_000
    assert [data["phases"][phase]["label"] for phase in phases[7:10]] == ["admission", "environment", "replica queue"]
    assert turns[7:10] == [-1, -1, 0]
    assert segments["places"][sites[9]] == "replica-0"


def test_what_a_log_says_cannot_break_the_page(tmp_path):
    hostile = "</script><script>alert(1)</script>"
    lines = json.loads(json.dumps(logs.two_trajectories()).replace("b#0", hostile))
    page = render([report(tmp_path, lines, name="<b>", note="<i>&")])
    assert "<script>alert" not in page
    assert page.count("</script>") == 2
    assert data_of(page)["runs"][0]["rows"]["id"][1] == hostile
    assert "&lt;b&gt;" in page
    assert "<i>&" not in page


def test_nothing_is_loaded_from_anywhere(tmp_path):
    page = render([report(tmp_path, logs.two_trajectories())])
    assert re.findall(r'(?:src|href)="(?!#)([^"]*)"', page) == ["data:,"]
    assert "@import" not in page
    assert "url(" not in page


def test_a_batch_without_an_end_is_reported_as_far_as_it_goes(tmp_path):
    page = render([report(tmp_path, logs.two_trajectories()[:8])])
    assert "the log ends before the batch did" in page
    assert "no trajectory ended" in page


def test_the_last_chain_is_a_bar_whose_parts_have_letters_and_words(tmp_path):
    page = render([report(tmp_path, logs.two_trajectories())])
    bar = re.search(r'<div class="bar" role="img" aria-label="([^"]*)">(.*?)</div>', page, re.S)
    assert bar[1].startswith("admission 6.0 s, replica queue 0.5 s, prefill 0.8 s, recomputation 0.4 s, decode 1.0 s")
    assert re.findall(r">(\w)</span>", bar[2]) == ["A", "Q", "P", "R", "D", "S", "E", "O"]
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", bar[2])]
    assert sum(widths) == pytest.approx(100 * 14.5 / 15.0, abs=0.01)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("makespan_s", 1234.56, "1,234.6 s"),
        ("slots/a.step/wait_mean_s", 0.0123, "0.012 s"),
        ("phase_sum_s/decode", 3.0, "3.0 s"),
        ("completion_s/p50", 0.5, "0.500 s"),
        ("tokens/cached_share", 0.905, "90.5%"),
        ("slots/a.step/utilisation", 0.5, "50.0%"),
        ("over_lower_bound", 1.5, "1.50 ×"),
        ("tokens/prompt", 1_234_567, "1,234,567"),
        ("turns/mean", 9.25, "9.250"),
        ("reward/mean", 1.0, "1.000"),
        ("forecast/turns_error", 2.5, "2.500"),
    ],
)
def test_figures_are_written_with_their_unit(name, value, text):
    assert value_text(name, value) == text


def test_what_was_not_measured_says_so():
    assert ">not measured<" in value_text("tokens/cached", None)
    assert ">no limit<" in value_text("concurrency/reference", None)
