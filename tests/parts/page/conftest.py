from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.observability.conftest import info, make_eval, make_metrics, make_view, now_s
from tests.parts.page.browser import CHROMIUM, Visit

__all__ = ["browser", "info", "make_eval", "make_metrics", "make_view", "now_s", "visit"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    opened = list[Visit]()

    def visit(*arguments: Any, **options: Any) -> Visit:
        opened.append(Visit(browser, *arguments, **options))
        return opened[-1]

    yield visit
    for one in opened:
        assert one.errors == []
        one.context.close()
