"""A page in a real, headless Chromium, with everything that it complains about or asks the network for."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api

SCREENSHOTS = Path(__file__).parents[4] / "outputs" / "report"
"""Kept to be looked at; not under version control."""

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class OpenedPage:
    """A report in a browser."""

    def __init__(self, page: Any, seconds: float, complaints: list[str], requests: list[str]) -> None:
        self.page = page
        self.seconds = seconds
        """From the navigation to the drawn page."""
        self.complaints = complaints
        self.requests = requests

    def pixels(self, colour: str) -> int:
        """How many pixels of the timeline have a phase's plain colour (a CSS variable's name)."""
        return int(
            self.page.evaluate(
                """(name) => {
                    const canvas = document.querySelector(".viewport canvas");
                    const copy = element("canvas", { width: canvas.width, height: canvas.height });
                    const pen = copy.getContext("2d", { willReadFrequently: true });
                    pen.drawImage(canvas, 0, 0);
                    const data = pen.getImageData(0, 0, copy.width, copy.height).data;
                    const hex = style(name), wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
                    let count = 0;
                    for (let k = 0; k < data.length; k += 4) {
                      if (data[k] === wanted[0] && data[k + 1] === wanted[1] && data[k + 2] === wanted[2]) count++;
                    }
                    return count;
                }""",
                colour,
            )
        )

    def shown(self) -> str:
        """The line under the toolbar."""
        return str(self.page.text_content(".shown"))

    def keep(self, name: str) -> None:
        """Keep a screenshot."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@contextlib.contextmanager
def opened(path: Path, **settings: Any) -> Iterator[OpenedPage]:
    """The file in a browser. Where there is none the test is skipped, or fails if `BROWSER_TESTS=required`, as in CI:
    what is always skipped cannot fail."""
    executable = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if executable is None:
        missing = pytest.fail if os.environ.get("BROWSER_TESTS") == "required" else pytest.skip
        missing("needs Chromium (apt-get install chromium)")
    complaints: list[str] = []
    requests: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            page = browser.new_context(viewport={"width": 1400, "height": 1000}, **settings).new_page()
            page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: requests.append(request.url))
            start_s = time.monotonic()
            page.goto(path.resolve().as_uri())
            if settings.get("java_script_enabled", True):
                with contextlib.suppress(sync_api.TimeoutError):
                    page.wait_for_selector("html[data-ready]", timeout=30_000 if not complaints else 2_000)
            yield OpenedPage(page, time.monotonic() - start_s, complaints, requests)
        finally:
            browser.close()
