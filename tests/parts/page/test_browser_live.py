"""The live page in headless Chromium: what is new is drawn soon, and nobody is asked for more than is looked at."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from llamarl.parts.page.live import Watched, build_app
from tests.parts.page.browser import in_a_browser
from tests.parts.page.runs import add_step, make_run, rollout_row, step_row, write_rows

LIVE_S = 20.0
"""Pages ask every 1.2 s; on an idle machine a step is drawn within two."""

pytestmark = in_a_browser


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = make_run(tmp_path / "live", end=None)
    app, opened = build_app([Watched(folder, str)], "secret"), socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    yield f"http://127.0.0.1:{opened.getsockname()[1]}/secret/", folder
    server.should_exit = True
    thread.join(240)
    opened.close()


def test_a_new_step_is_drawn_soon(served: tuple[str, Path], visit: Any) -> None:
    """On two pages; the best of three steps counts, as others share the machine."""
    url, folder = served
    pages = [visit(url), visit(url, width=390)]
    taken_s = list[float]()
    for step in (21, 22, 23):
        start_s = time.monotonic()
        add_step(folder, step)
        for one in pages:
            one.until(f"document.querySelector('[data-key=steps] .value').textContent.startsWith('{step} of')")
            assert one.page.evaluate("runs[0].series.step.at(-1)") == step
        taken_s.append(time.monotonic() - start_s)
    assert min(taken_s) < LIVE_S, taken_s
    write_rows(folder / "rollouts.jsonl", [rollout_row(24, 400, 0, prompt="the newest one")])
    pages[0].page.fill("[name=prompt]", "newest")
    pages[0].page.keyboard.press("Enter")
    pages[0].until("document.querySelectorAll('#list tbody tr').length === 1")
    pages[0].page.fill("#step", "7")
    pages[0].page.keyboard.press("Enter")
    pages[0].until("document.querySelector('#flow-text').textContent.startsWith('Step 7')")
    newest = pages[1].page.locator("#list tbody tr").first
    assert newest.locator("td").first.inner_text().endswith("20") and newest.locator(".square").count() == 2
    assert "group 41" in pages[1].page.inner_text("#one .head"), "the first that is shown is the newest group"
    for one in pages:
        assert [address for address in one.asked if not address.startswith((url, "data:"))] == []


def test_a_page_that_is_there_before_its_run(served: tuple[str, Path], visit: Any) -> None:
    """Its first rollouts are listed without being asked for, as they come; also those of a run that begins anew."""
    url, folder = served
    one = visit(url)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    make_run(folder, steps=0, end=None, rate=0.25)
    one.until("document.querySelectorAll('#list tbody tr').length === 0")
    assert "0.25" in one.page.inner_text("#table")
    write_rows(folder / "metrics.jsonl", [step_row(1)])
    one.until("runs[0].steps === 1")
    add_step(folder, 2)
    one.until("document.querySelectorAll('#list .square').length === 4")
    one.page.fill("[name=step]", "7")
    one.page.keyboard.press("Enter")
    one.until("document.querySelectorAll('#list tbody tr').length === 0")
    num_asked = sum("rollouts" in address for address in one.asked)
    add_step(folder, 3)
    one.until("runs[0].steps === 3")
    assert sum("rollouts" in address for address in one.asked) == num_asked, "nothing fits, and nobody asks again"


def test_a_page_that_nobody_looks_at_asks_nothing(served: tuple[str, Path], visit: Any) -> None:
    one = visit(served[0])

    def asked_by(is_hidden: str) -> int:
        before = len(one.asked)
        one.page.evaluate(
            f"""() => {{
            Object.defineProperty(document, "hidden", {{ configurable: true, get: () => {is_hidden} }});
            return follow();
        }}"""
        )
        return len(one.asked) - before

    assert asked_by("false") > 0
    assert asked_by("true") == 0
