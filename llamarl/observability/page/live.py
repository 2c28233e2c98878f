"""The page while a run goes on, over HTTP: starlette, which is imported here and only when it is opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.config import ConfigError
from llamarl.observability.page.document import described, document, flows, window
from llamarl.observability.page.findings import findings
from llamarl.observability.page.rollouts import Decode, Rollouts
from llamarl.observability.page.run_data import RunData

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOK_S = 0.3
"""Between two looks at the files."""
RARE_S, RARE_SHARE = 2.0, 0.05
"""What looks at all spans is done again after so long, and takes at most about this share of the time."""


class Watched:
    """One run: `look` reads its files in a thread of its own, the rest answers."""

    def __init__(self, folder: Path, decode: Decode | None) -> None:
        """Raises ConfigError: there is no folder."""
        self.data, self._rollouts, self._decode = RunData(folder), Rollouts(folder), decode
        self._lock = threading.Lock()
        self._rare: dict[str, Any] = {}
        self._num_rare, self._rare_at_s, self._rare_changes = 0, 0.0, -1

    def look(self) -> bool:
        """Reads a part of what is new; whether there was anything."""
        with self._lock:
            is_news = self.data.refresh()
        with self._lock:
            return self._rollouts.refresh() or is_news

    def news(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        """All that has changed since a page has asked; `change` alone, when nothing has."""
        data = self.data
        with self._lock:
            self._look_rarely()
            change = f"{data.generation}.{data.num_changes}.{self._num_rare}.{data.state()[0]}"
            if wanted.get("change") == change:
                return {"change": change}
            is_whole = wanted.get("change", "").partition(".")[0] != str(data.generation)
            found = described(data, self._rare["claims"]) | {
                "change": change,
                "whole": is_whole,
                "series": data.series(0 if is_whole else int(float(wanted.get("after", 0)))),
                "work": self._rare["work"],
                "flows": flows(data, list(data.flows)[-1:]),
            }
            return found | ({"settings": data.settings()} if is_whole else {})

    def _look_rarely(self) -> None:
        start_s, data = time.monotonic(), self.data
        if start_s >= self._rare_at_s and data.num_changes != self._rare_changes:
            self._rare = {"claims": findings(data), "work": window(data, max_spans=900)}
            self._num_rare, self._rare_changes = self._num_rare + 1, data.num_changes
            took_s = time.monotonic() - start_s
            self._rare_at_s = start_s + max(RARE_S, took_s / RARE_SHARE)

    def work(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        """Who worked in a window, as finely as it can be drawn."""
        begin_s, end_s = (self.data.began_s + float(wanted[name]) / 1000 for name in ("from", "to"))
        with self._lock:
            return window(self.data, begin_s, end_s)

    def flow(self, wanted: Mapping[str, str]) -> dict[int, Any]:
        with self._lock:
            return flows(self.data, [int(wanted["step"])])

    def rollouts(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        with self._lock:
            return self._rollouts.find(wanted, self._decode)


class Looking(threading.Thread):
    """Follows runs until it is closed."""

    def __init__(self, runs: Sequence[Watched]) -> None:
        super().__init__(name="look", daemon=True)
        self._runs, self._is_over = runs, threading.Event()

    def run(self) -> None:
        while not self._is_over.is_set():
            news = [run.look() for run in self._runs]
            if not any(news):
                self._is_over.wait(LOOK_S)

    def close(self) -> None:
        self._is_over.set()
        self.join()


def build_app(runs: Sequence[Watched], token: str) -> Starlette:
    """Answers below `/TOKEN/` alone. Raises ConfigError: starlette is not installed."""
    try:
        from starlette.applications import Starlette
        from starlette.responses import HTMLResponse, JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError(f"a live page needs starlette and uvicorn ({error}): pip install 'llamarl[serve]'") from None
    base = f"/{token}/"
    page = document([{"name": run.data.folder.name, "folder": str(run.data.folder)} for run in runs], live=base)
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

    def answer(request: Request) -> Response:
        wanted = request.query_params
        try:
            run = runs[int(wanted["run"])]
            call = {"news": run.news, "work": run.work, "flow": run.flow, "rollouts": run.rollouts}
            return JSONResponse(call[request.path_params["what"]](wanted), headers=headers)
        except (KeyError, ValueError, IndexError, OverflowError):
            return JSONResponse({"error": "there is no such thing here"}, 404, headers=headers)

    def show(_: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    return Starlette(routes=[Route(base, show), Route(base + "{what}", answer)])
