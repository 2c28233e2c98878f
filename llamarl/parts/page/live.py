"""Serves the page during a run over HTTP. Imports starlette only when the server starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.parts.page.document import NUM_FLOWS, described, document, flows, spread, strict_json, window
from llamarl.parts.page.findings import findings
from llamarl.parts.page.rollouts import Decode, Rollouts
from llamarl.parts.page.run_data import RunData

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

LOOK_S = 0.5
"""Maximum seconds of reading before a request is answered. Later requests read the rest."""
LATE_STEPS = 4
"""Steps by which the times of a step's groups may arrive later than its metrics."""
RARE_S, RARE_SHARE = 2.0, 0.003
"""Minimum seconds between two reads of all spans, and the approximate maximum share of time for them."""


class Watched:
    """One run. A request reads the new part of its files, so that nothing is read without an open page."""

    def __init__(self, folder: Path, decode: Decode | None) -> None:
        self.data, self._rollouts, self._decode = RunData(folder), Rollouts(folder), decode
        self._lock = threading.Lock()
        self._rare: dict[str, Any] = {}
        self._num_rare, self._rare_at_s, self._rare_of = 0, 0.0, (-1, (-1, False))

    def news(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        """Returns all changes since the page's last request, or only `change` if there are none."""
        data = self.data
        with self._lock:
            is_more = _read(data.refresh)
            if not is_more:
                self._look_rarely()
            change = f"{data.generation}.{self._num_rare}.{data.num_changes}.{data.state()[0]}"
            if wanted.get("change") == change:
                return {"change": change}
            generation, _, rest = wanted.get("change", "").partition(".")
            is_whole = generation != str(data.generation)
            after = 0 if is_whole else int(float(wanted.get("after", 0)))
            found = described(data) | {
                "change": change,
                "more": is_more,
                "whole": is_whole,
                "series": data.series(after),
                "flows": flows(data, spread([step for step in data.flows if step > after - LATE_STEPS], NUM_FLOWS)),
            }
            if not is_more:  # complete up to the steps in this answer
                found["claims"] = findings(data)
            if rest.partition(".")[0] != str(self._num_rare):
                found |= self._rare
            return found | ({"settings": data.settings()} if is_whole else {})

    def _look_rarely(self) -> None:
        start_s, data = time.monotonic(), self.data
        now, then = (data.num_changes, (data.generation, bool(data.end))), self._rare_of
        if now[0] != then[0] and (start_s >= self._rare_at_s or now[1] != then[1]):
            self._rare = {"work": window(data, max_spans=900)}
            self._num_rare, self._rare_of = self._num_rare + 1, now
            took_s = time.monotonic() - start_s
            self._rare_at_s = start_s + max(RARE_S, took_s / RARE_SHARE)

    def work(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        """Returns the spans of executors in a window, at the resolution of the screen."""
        begin_s, end_s = (self.data.began_s + float(wanted[name]) / 1000 for name in ("from", "to"))
        with self._lock:
            return window(self.data, begin_s, end_s)

    def flow(self, wanted: Mapping[str, str]) -> dict[int, Any]:
        with self._lock:
            return flows(self.data, [int(wanted["step"])])

    def rollouts(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        """Returns rollouts that match a query. `more` means that some have not been read yet."""
        with self._lock:
            is_more = _read(self._rollouts.refresh)
            return self._rollouts.find(wanted, self._decode) | {"more": is_more}


def _read(refresh: Callable[[], bool]) -> bool:
    """Reads new data for at most `LOOK_S` seconds. Returns whether there may be more."""
    until_s = time.monotonic() + LOOK_S
    while is_more := refresh():
        if time.monotonic() >= until_s:
            break
    return is_more


def build_app(runs: Sequence[Watched], token: str) -> Starlette:
    """Returns the application. It answers only below `/TOKEN/`."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    base = f"/{token}/"
    page = document([{"name": run.data.folder.name, "folder": str(run.data.folder)} for run in runs], live=base)
    headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}

    async def answer(request: Request) -> Response:
        wanted = request.query_params
        try:
            run = dict(enumerate(runs))[int(wanted["run"])]
            call = {"news": run.news, "work": run.work, "flow": run.flow, "rollouts": run.rollouts}
            found = strict_json(call[request.path_params["what"]](wanted))
            return Response(found, headers=headers, media_type="application/json")
        except (KeyError, ValueError, IndexError, OverflowError):
            return JSONResponse({"error": "not found"}, 404, headers=headers)

    def show(_: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    return Starlette(routes=[Route(base, show), Route(base + "{what}", answer)])
