"""Builds one self-contained HTML file. It loads nothing from elsewhere, and text of a model is data, never markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

from llamarl.observability.metrics import accuracy_error, accuracy_interval
from llamarl.parts.page.findings import findings
from llamarl.parts.page.headline import key_numbers
from llamarl.parts.page.rollouts import Decode, sample
from llamarl.parts.page.run_data import KINDS, RunData
from llamarl.parts.page.waits import waits

SCRIPTS = (
    "uplot.js", "common.js", "curves.js", "summary.js", "forecast.js", "timeline.js", "rollouts.js", "page.js",
)  # fmt: skip
STYLES = ("uplot.css", "page.css")
MAX_POINTS = 1_200
"""Maximum points of a curve in a file. More steps are averaged."""
ROLLOUT_BYTES, NUM_FLOWS, FINE_STEPS = 2_200_000, 120, 12
"""Limits over all runs of a file: bytes of rollouts before they are shortened, steps whose flow is included, and steps
whose spans are included in full detail."""


def described(data: RunData) -> dict[str, Any]:
    """Returns facts of a run that are small and sent as a whole when they change."""
    state, reason = data.state()
    return {
        "name": data.folder.name,
        "folder": str(data.folder),
        "state": state,
        "reason": reason,
        "work_kind": data.work,
        "steps": data.num_steps,
        "planned_steps": data.planned_steps,
        "pauses": [[round(at_s - data.began_s, 3), round(pause_s, 3)] for at_s, pause_s in data.pauses],
        "evals": [one | {"interval": accuracy_interval(one), "error": accuracy_error(one)} for one in data.evals],
        "machine": data.start.get("machine", {}),
        "model": data.start.get("model", ""),
        "began_s": data.began_s,
        "texts": [[kind, round(at_s - data.began_s, 3), text] for kind, at_s, text in data.texts],
        "damaged": data.num_damaged,
        "executors": list(data.spans),
        "forecast": data.content("forecast.json"),
        "keys": key_numbers(data),
    }


def flows(data: RunData, steps: Sequence[int]) -> dict[int, Any]:
    """Returns the times of the groups of these steps, in seconds since the run began."""
    return {step: _shifted(data.flows[step], data.began_s) for step in steps if step in data.flows}


def spread(steps: Sequence[int], about: int) -> list[int]:
    """Returns about `about` of the steps, evenly spaced, and the last one."""
    return [*steps[:: max(1, len(steps) // max(about, 1))], *steps[-1:]]


def _shifted(flow: dict[str, Any], origin_s: float) -> dict[str, Any]:
    ends = {name: round(value - origin_s, 4) for name, value in flow.items() if name.endswith("ed_s")}
    groups = [[group[0], *(round(at_s - origin_s, 4) for at_s in group[1:])] for group in flow["groups"]]
    return ends | {"groups": groups}


def whole(data: RunData, decode: Decode | None, num_runs: int) -> dict[str, Any]:
    """Returns all data of one run for a file with `num_runs` runs."""
    some = spread(list(data.flows), NUM_FLOWS // num_runs)
    fine = list[dict[str, Any]]()
    for step in some[:: max(1, len(some) * num_runs // FINE_STEPS)]:
        flow = data.flows[step]
        begin_s = min((group[1] for group in flow["groups"] if len(group) > 1), default=flow["trained_s"])
        end_s = flow.get("adopted_s", flow["trained_s"])
        margin_s = 0.05 * (end_s - begin_s)  # the page shows a margin around the step
        fine.append(window(data, begin_s - margin_s, end_s + margin_s, 250))
    if not some and len(ends_s := list(data.columns.get("wall_s", ()))[data.num_steps // 2 :][:FINE_STEPS]) > 1:
        fine.append(window(data, data.began_s + ends_s[0], data.began_s + ends_s[-1]))
    return described(data) | {
        "claims": findings(data),
        "settings": data.settings(),
        "series": data.series(max_points=MAX_POINTS),
        "every": -(-data.num_steps // MAX_POINTS),
        "work": [window(data, max_spans=900 // num_runs), *fine],
        "flows": flows(data, some),
        "rollouts": sample(data.folder, decode, ROLLOUT_BYTES // num_runs),
    }


def window(data: RunData, begin_s: float | None = None, end_s: float | None = None, max_spans: int = 1500) -> Any:
    """Returns the spans of executors in a time window, in milliseconds since the run began. No window means the whole
    run."""
    first, last = data.reach
    begin_s, end_s = first if begin_s is None else begin_s, last if end_s is None else end_s
    around = [round(1000 * (one - data.began_s), 1) for one in (begin_s, end_s)]
    found = waits(data.spans, begin_s, end_s)
    return {
        "from": around[0],
        "to": around[1],
        "rows": data.spans_within(begin_s, end_s, max_spans),
        "waits": {
            name: {cause: round(1000 * time_s, 1) for cause, time_s in one.items()} for name, one in found.items()
        },
    }


def document(runs: Sequence[dict[str, Any]], live: str = "") -> str:
    """Returns the page as HTML.

    Args:
        runs: for each run, the result of `whole`.
        live: address of updates. Empty means a page without updates, which may connect to nothing.
    """
    source = files("llamarl.parts.page")
    scripts = "\n".join(source.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    styles = "\n".join(source.joinpath(name).read_text(encoding="utf-8") for name in STYLES)
    digest = base64.b64encode(hashlib.sha256(scripts.encode()).digest()).decode()
    allowed = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {allowed}; base-uri 'none'; form-action 'none'"
    )
    body = source.joinpath("page.html").read_text(encoding="utf-8")
    content = {"runs": runs, "kinds": [*KINDS, "other"], "live": live}
    parts = {"POLICY": policy, "STYLES": styles, "DATA": embedded(content), "SCRIPTS": scripts}
    return re.sub("@(POLICY|STYLES|DATA|SCRIPTS)@", lambda found: parts[found[1]], body)


def strict_json(content: Any) -> str:
    """Returns JSON in which numbers that are not finite are null."""
    with suppress(ValueError):
        return json.dumps(content, allow_nan=False, separators=(",", ":"))
    return json.dumps(json.loads(json.dumps(content), parse_constant=lambda _: None), separators=(",", ":"))


def embedded(content: Any) -> str:
    """Returns JSON for a script element, escaped so that no text can end the element or begin markup."""
    return strict_json(content).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
