"""The report as a reader meets it: in a real browser, with few rows and with very many, by keyboard and in the dark."""

from __future__ import annotations

import pytest

from makespan.rollout.telemetry.report import read_run, reported, write_report
from tests.rollout.telemetry import batches
from tests.rollout.telemetry.report.browser import opened


def written(tmp_path, runs):
    write_report(tmp_path / "report.html", runs)
    return tmp_path / "report.html"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Ten trajectories that decode, act and wait for each other's slots; one of them failed."""
    log = batches.simulated(
        tmp_path_factory.mktemp("small") / "engine.jsonl", "swe", 10, "--group-size", "2", "--replicas", "2"
    )
    events = []
    for role, event in log.events:
        if event.kind == "ended" and event.trajectory_id == "prompt-2#0":
            event.data.update(state="failed", reward=None, failure={"kind": "timeout", "message": ""})
        events.append((role, event))
    return reported(log, name="small")


def test_rows_are_drawn_and_nothing_is_complained_of_or_fetched(tmp_path, small):
    path = written(tmp_path, [small])
    with opened(path) as report:
        report.keep("10")
        assert report.complaints == []
        assert [url for url in report.requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
        assert report.shown() == "10 trajectories"
        # Ten rows of 16 pixels; environment and decode are most of them, and nothing was computed twice.
        assert report.pixels("--phase-7") > 20_000
        assert report.pixels("--phase-4") > 2_000
        assert report.pixels("--phase-3") == 0
        assert report.page.locator(".chart canvas").count() == 6
        assert report.page.locator(".u-legend").first.is_visible()


def test_filters_and_orders_change_the_rows(tmp_path, small):
    with opened(written(tmp_path, [small])) as report:
        page = report.page
        all_of_it = report.pixels("--phase-7")
        page.fill("input[type=search]", "prompt-0")
        assert report.shown() == "2 of 10 trajectories"
        assert 0 < report.pixels("--phase-7") < all_of_it / 2
        page.fill("input[type=search]", "nobody")
        assert report.shown() == "0 of 10 trajectories"
        assert report.pixels("--phase-7") == 0
        page.fill("input[type=search]", "")
        page.get_by_label("state").select_option("failed")
        assert report.shown() == "1 of 10 trajectories"
        page.get_by_label("state").select_option("")
        assert report.pixels("--phase-7") == all_of_it

        def first_of_table():
            return page.locator("details.trajectories tbody tr").first.text_content()

        page.locator("details.trajectories summary").click()
        last = max(small.timeline, key=lambda row: row.end_s)
        assert first_of_table().startswith(last.trajectory_id)
        page.get_by_label("order").select_option("turns")
        most = max(small.timeline, key=lambda row: row.turns)
        assert f"{most.turns}" in first_of_table()
        page.get_by_label("order").select_option("submitted")
        assert first_of_table().startswith("prompt-0#0")
        assert report.complaints == []


def test_the_timeline_is_used_by_keyboard_alone(tmp_path, small):
    last_first = sorted(small.timeline, key=lambda row: -row.end_s)
    with opened(written(tmp_path, [small])) as report:
        page = report.page
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.className") == "viewport":
                break
        else:
            pytest.fail("the timeline is not reached with the Tab key")
        page.keyboard.press("ArrowDown")
        chosen = page.locator(".chosen")
        assert chosen.text_content().startswith(last_first[0].trajectory_id)
        assert "Why late: " in chosen.text_content()
        page.keyboard.press("ArrowDown")
        assert chosen.text_content().startswith(last_first[1].trajectory_id)
        page.keyboard.press("End")
        assert chosen.text_content().startswith(last_first[-1].trajectory_id)
        page.keyboard.press("+")
        zoomed = report.shown()
        assert "332.8 s to 998.4 s" in zoomed  # the middle half of 1,331.2 s
        page.keyboard.press("ArrowRight")
        assert report.shown() != zoomed
        page.keyboard.press("0")
        assert report.shown() == "10 trajectories"
        assert report.complaints == []


def test_a_tooltip_says_what_is_under_the_pointer(tmp_path, small):
    with opened(written(tmp_path, [small])) as report:
        box = report.page.locator(".viewport").bounding_box()
        report.page.mouse.move(box["x"] + 175, box["y"] + 22 + 8)
        text = report.page.text_content(".tooltip")
        first = max(small.timeline, key=lambda row: row.end_s)
        assert text.startswith(f"{first.trajectory_id}, {first.state}")
        assert "0.00 s to" in text


def test_it_is_dark_where_the_reader_wants_it_dark(tmp_path, small):
    def brightness(report):
        colour = report.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))

    path = written(tmp_path, [small])
    with opened(path, color_scheme="dark") as report:
        report.keep("10-dark")
        assert brightness(report) < 120
        assert report.pixels("--phase-7") > 20_000
        report.page.emulate_media(color_scheme="light")
        assert brightness(report) > 700
        assert report.pixels("--phase-7") > 20_000
        assert report.complaints == []


def test_runs_are_side_by_side_on_one_scale(tmp_path, small):
    other = reported(batches.simulated(tmp_path / "other.jsonl", "bfcl", 24, "--slots", "3"), name="other")
    with opened(written(tmp_path, [small, other])) as report:
        report.keep("two-runs")
        assert report.page.locator(".viewport").count() == 2
        boxes = [report.page.locator(".viewport").nth(k).bounding_box() for k in (0, 1)]
        assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
        ends = report.page.evaluate("TIMELINES.map((timeline) => timeline.to)")
        assert ends == [pytest.approx(small.analysis.makespan_s)] * 2
        assert report.complaints == []


def test_without_script_the_tables_are_there(tmp_path, small):
    with opened(written(tmp_path, [small]), java_script_enabled=False) as report:
        assert report.page.locator("#figures table").is_visible()
        assert report.page.locator("tr[data-figure='makespan_s'] td").first.text_content() == "1,331.2 s"


def test_ten_thousand_trajectories_open_in_time(tmp_path):
    options = ["--replicas", "16", "--slots", "200", "--kv-tokens", "4000000"]
    batches.simulated(tmp_path / "engine.jsonl", "bfcl", 10_000, *options)
    path = written(tmp_path, [read_run(tmp_path / "engine.jsonl")])
    assert path.stat().st_size < 30e6
    with opened(path) as report:
        report.keep("10000")
        assert report.seconds < 5.0
        assert report.complaints == []
        assert report.shown().startswith("10,000 trajectories, ")
        drawn = sum(report.pixels(f"--phase-{phase}") for phase in range(10))
        assert drawn > 50_000
        report.page.focus(".viewport")
        report.page.keyboard.press("End")
        assert report.page.evaluate("TIMELINES[0].chosen") == 9_999
        assert report.page.evaluate("document.querySelector('.viewport').scrollTop") > 25_000
        report.page.get_by_label("row height").select_option("0")
        assert "one row in 18 is drawn" in report.shown()
        redraw_ms = report.page.evaluate(
            "(() => { const from = performance.now(); TIMELINES[0].draw(); return performance.now() - from; })()"
        )
        assert redraw_ms < 500
        report.keep("10000-all-rows")


def test_a_page_that_fails_is_noticed(tmp_path, small):
    path = written(tmp_path, [small])
    path.write_text(path.read_text().replace("DecompressionStream(", "NoSuchStream(", 1))
    with opened(path) as report:
        assert any("NoSuchStream" in complaint for complaint in report.complaints)
