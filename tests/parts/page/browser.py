"""Headless Chromium, and what a visit of a page sees."""

from __future__ import annotations

import shutil
import time
from typing import Any

import pytest

from tests.nightly import nightly

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
INK = """canvas => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let num = 0;
  for (let at = 3; at < data.length; at += 4) num += data[at] > 0;
  return num;
}"""
START_S = 240.0
in_a_browser = [
    nightly("a browser takes a second to start"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)"),
]


class Visit:
    """A page that was opened, and what it asked for and complained of."""

    def __init__(
        self, browser: Any, url: str, width: int = 1280, scheme: str = "light", ready: str = "#list tbody tr"
    ) -> None:
        """`ready`: an element that is there once the page is drawn."""
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page, self.asked, self.errors = self.context.new_page(), list[str](), list[str]()
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(url)
        self.page.wait_for_selector(ready)

    def until(self, expression: str) -> None:
        """Waits for it to be true; the page's own rules forbid to have it waited for in there."""
        until_s = time.monotonic() + START_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < until_s, expression
            self.page.wait_for_timeout(50)

    def ink(self, selector: str) -> int:
        """Pixels of a canvas that are not empty."""
        return int(self.page.eval_on_selector(selector, INK))
