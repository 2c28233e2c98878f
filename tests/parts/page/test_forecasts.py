"""Plans and simulations on the page: the forecast part writes files, and the page shows what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamarl.parts.forecast.cli import plan, simulate
from llamarl.parts.page.cli import report
from tests.parts.page.browser import in_a_browser
from tests.parts.page.runs import make_run
from tests.parts.page.test_page import content

RUN = """
steps = 24
name = "small"
model = {{path = "no/such/model"}}
data = {{train = {{name = "jsonl", path = "no_such_file.jsonl"}}}}
output = {output!r}
rollout = {{prompts_per_step = 4, group_size = 2}}
"""
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans") / "small"
    words = ["--model", "llama3-8b", "--gpus", "16", "--rollout.prompts_per_step", "32", "--folder", str(folder)]
    assert plan.main(words) == 0
    return folder


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    (runs / "run.toml").write_text(RUN.format(output=str(runs)))
    assert simulate.main([str(runs / "run.toml"), "--gpus", "64"]) == 0
    return runs / "small-simulation"


def shown(*folders: Path) -> list[dict[str, Any]]:
    """Content of the report of these folders."""
    report.main([*map(str, folders), "--output", str(folders[0] / "report.html")])
    return content((folders[0] / "report.html").read_text())["runs"]


def test_a_plan(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = shown(planned)
    (claim,) = one["claims"]
    assert (one["state"], claim["chart"]) == ("planned", "forecast")
    assert claim["text"].startswith("Use the") and not claim["text"].endswith(".")
    assert "step time, s" in one["forecast"]["text"] and claim["text"] in one["forecast"]["text"]
    split, staleness = one["forecast"]["charts"]
    assert split["names"] == ["share", "step", "trainer", "generators"]
    assert all(step * (1 + 1e-12) >= max(phases) > 0 for _, step, *phases in split["rows"])
    assert [bound for bound, _ in staleness["rows"]] == [1, 2, 3, 4]
    assert capsys.readouterr().err == "", "nobody misses a tokenizer"


def test_a_simulation(simulated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = shown(simulated)
    verdict = json.loads((simulated / "summary.json").read_text())["verdict"]
    assert (one["state"], one["steps"]) == ("finished", 24)
    assert [claim["text"] for claim in one["claims"]] == [verdict], "its rewards and log-probabilities are made up"
    assert "proved bound" in one["forecast"]["text"]
    whole, middle = one["work"]
    assert {"trainer", "reward", "generator-0"} <= whole["rows"].keys()
    assert whole["from"] <= middle["from"] < middle["to"] <= whole["to"], "a part of it is there in full detail"
    assert abs(one["series"]["wall_s"][-1] - whole["to"] / 1000) < 0.2 * one["series"]["wall_s"][-1]
    assert capsys.readouterr().err == "", "nobody misses a tokenizer"


def test_a_simulation_that_failed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(output=str(tmp_path)))
    words = [str(tmp_path / "run.toml"), "--gpus", "64", "--faults", "die=0@3", "--cluster.on_failure", "stop"]
    assert simulate.main(words) == 1
    (one,) = shown(tmp_path / "small-simulation")
    assert one["state"] == "failed"
    assert "generator-0" in one["claims"][0]["text"]


class TestInABrowser:
    pytestmark = in_a_browser

    @pytest.mark.parametrize("width", WIDTHS)
    def test_a_plan_is_drawn_alone(self, visit: Any, planned: Path, width: int) -> None:
        shown(planned)
        one = visit((planned / "report.html").as_uri(), width=width, ready="#forecast canvas")
        assert one.page.evaluate("document.documentElement.scrollWidth") <= width
        assert one.ink("#forecast .chart:first-child canvas") > 300
        assert not one.page.locator("#timeline").is_visible(), "nothing has worked yet"
        one.page.hover("#forecast .chart:first-child .u-over")
        assert " at 0." in one.page.inner_text("#forecast .chart:first-child .key")

    @pytest.mark.parametrize("width", WIDTHS)
    def test_a_simulation_is_drawn_beside_a_run(self, visit: Any, simulated: Path, tmp_path: Path, width: int) -> None:
        shown(simulated, make_run(tmp_path / "made", 24))
        one = visit((simulated / "report.html").as_uri(), width=width, ready="#forecast pre")
        assert one.page.evaluate("document.documentElement.scrollWidth") <= width
        assert one.ink("#work") > 1000 and one.ink("#duration canvas") > 300
        keys = one.page.inner_text("#reward .key"), one.page.inner_text("#duration .key")
        assert "simulation" not in keys[0] and "simulation" in keys[1]
        one.page.click("#theme")
        assert one.page.locator("#forecast pre").count() == 1
