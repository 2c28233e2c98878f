"""What a page about a run holds, and that it holds no more than it may."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from llamarl.parts.page.cli import report
from llamarl.parts.page.document import document, embedded, whole
from llamarl.parts.page.findings import findings
from llamarl.parts.page.live import Watched, build_app
from llamarl.parts.page.rollouts import Rollouts, bounds, sample
from tests.end_to_end.tiny import llamarl_here
from tests.nightly import nightly
from tests.parts.page.runs import (
    BEGAN_S,
    CONFIG,
    NASTY,
    add_step,
    eval_row,
    flow_row,
    make_run,
    read,
    rollout_row,
    span_rows,
    step_row,
    write_rows,
)

PAGE = Path(report.__file__).parents[1]
MAX_PAGE_LINES = 1300


def page_of(*folders: Path) -> str:
    return document([whole(read(folder), None, len(folders)) for folder in folders])


def content(page: str) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


class TestStates:
    @pytest.mark.parametrize("end", ["finished", "failed", "interrupted"])
    def test_how_it_ended(self, tmp_path: Path, end: str) -> None:
        data = read(make_run(tmp_path / "made", end=end))
        assert data.state() == (end, "" if end == "finished" else "trainer died")
        assert (end == "finished") != any("trainer died" in claim["text"] for claim in findings(data))

    def test_one_that_is_under_way_and_one_that_is_silent(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = read(make_run(tmp_path / "made", end=None))
        assert data.state()[0] == "running"
        monkeypatch.setattr("llamarl.parts.page.run_data.time.time", lambda: 2e12)
        state, reason = data.state()
        assert state == "silent"
        assert "dead" in reason

    def test_one_that_goes_on_after_its_end(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", end="interrupted")
        (folder / "summary.json").write_text('{"end": "interrupted", "end_reason": "ended by SIGINT"}')
        data = read(folder)
        assert data.state() == ("interrupted", "trainer died")
        write_rows(folder / "events.jsonl", [{"kind": "start", "at_s": BEGAN_S + 200, "resumed": True}])
        data.read_all()
        assert data.state() == ("running", "")
        assert data.began_s == BEGAN_S
        kind, at_s, text = data.texts[-1]
        assert (kind, at_s) == ("phase", BEGAN_S + 99), "the pause of 101 s is no time of the run"
        assert "resumed" in text and "1m 41s" in text

    def test_a_step_that_is_done_again_counts_once(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made")
        write_rows(folder / "metrics.jsonl", [step_row(20, reward_mean=9.0), step_row(21)])
        data = read(folder)
        assert list(data.columns["step"]) == list(range(1, 22))
        assert max(data.columns["reward_mean"]) < 1

    def test_a_run_that_never_began_gives_a_page_that_says_so(self, tmp_path: Path) -> None:
        """Its settings alone are there, for longer than a start takes; before, it is under way."""
        (tmp_path / "config.toml").write_text(CONFIG.format(steps=4, rate=1e-4))
        assert read(tmp_path).state()[0] == "running"
        os.utime(tmp_path / "config.toml", (BEGAN_S, BEGAN_S))
        (run,) = content(page_of(tmp_path))["runs"]
        assert run["state"] == "empty"
        assert "never started" in run["claims"][0]["text"]

    def test_torn_and_damaged_files(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made")
        for name in ("metrics", "rollouts", "events"):
            with (folder / f"{name}.jsonl").open("a") as file:
                file.write('{"kind": "step"}\n{"step": "x", "kind": "spans", "at_s": 1}\nnothing\n{"kind": "st')
        (folder / "config.toml").write_text("= 3")
        (folder / "summary.json").write_text("{")
        (run,) = content(page_of(folder))["runs"]
        assert run["damaged"] == 4
        assert run["steps"] == 20
        assert any("damaged" in claim["text"] for claim in run["claims"])


class TestFolders:
    @pytest.mark.parametrize("command", ["report", "watch"])
    @pytest.mark.parametrize("kind", ["model", "empty", "missing", "runs"])
    def test_what_is_no_run_is_refused_and_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: str
    ) -> None:
        monkeypatch.setattr("llamarl.run.web.listening", lambda *_: pytest.fail("it is served"))
        run, other = make_run(tmp_path / "runs" / "made"), tmp_path / kind
        if kind != "missing":
            other.mkdir(exist_ok=True)
        if kind == "model":
            (other / "config.json").write_text("{}")
        before = sorted(tmp_path.rglob("*"))
        done = llamarl_here(command, run, other)
        (said,) = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, "") and str(other) in said
        assert ("config.toml" in said) == (kind != "missing") and (f"`{run}`" in said) == (kind == "runs")
        assert sorted(tmp_path.rglob("*")) == before

    def test_runs_and_one_that_has_just_begun_are_shown(self, tmp_path: Path) -> None:
        begun = tmp_path / "begun"
        begun.mkdir()
        (begun / "config.toml").write_text(CONFIG.format(steps=4, rate=1e-4))
        done = llamarl_here("report", begun, make_run(tmp_path / "made"))
        assert done.returncode == 0, done.stderr
        shown = content((begun / "report.html").read_text())["runs"]
        assert [(run["state"], run["steps"]) for run in shown] == [("running", 0), ("finished", 20)]


class TestPage:
    def test_what_a_model_wrote_is_data(self, tmp_path: Path) -> None:
        page = page_of(make_run(tmp_path / "made"))
        assert page.count("<script") == 2
        assert page.count("</script>") == 2
        assert "onerror" in page, "it is there"
        assert "<img" not in page
        assert content(page)["runs"][0]["rollouts"]["rows"][0]["response"] == NASTY
        assert json.loads(embedded({"a": "</script>&<!--"})) == {"a": "</script>&<!--"}

    def test_nothing_is_loaded_from_elsewhere(self, tmp_path: Path) -> None:
        page = page_of(make_run(tmp_path / "made"))
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
        assert policy
        assert "default-src 'none'" in policy[1]
        assert "connect-src 'none'" in policy[1]
        assert "unsafe-inline" not in policy[1].partition("script-src")[2].partition(";")[0]
        assert not re.search(r'(src|href)="(?!#|data:)', page)

    @nightly("a long run; by day any value of any column fits the page")
    def test_a_thousand_steps_are_small(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", steps=0)
        many = {f"extra.metric_{index}": 0.123456789 * index for index in range(50)}
        write_rows(folder / "metrics.jsonl", [step_row(step, **many) for step in range(1, 1001)])
        long = {"token_ids": list(range(500)), "behavior_logprobs": [-0.123456] * 500, "policy_versions": [[1, 500]]}
        write_rows(folder / "rollouts.jsonl", [rollout_row(step, step, 0, **long) for step in range(1, 1001)])
        page = page_of(folder)
        assert len(page) < 3_000_000
        run = content(page)["runs"][0]
        assert run["series"]["step"][-1] == 1000
        steps = {row["step"] for row in run["rollouts"]["rows"]}
        assert {1, 1000} <= steps
        assert len(steps) > 50
        assert "1,000 rollouts" in run["rollouts"]["said"]

    @nightly("by day any value of any column fits the page")
    def test_ten_thousand_steps_are_averaged(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", steps=0)
        rows = [step_row(step, importance_ratio_max=11.0 if step == 3 else 2.0) for step in range(1, 10_001)]
        write_rows(folder / "metrics.jsonl", rows)
        run = content(page_of(folder))["runs"][0]
        assert len(run["series"]["step"]) <= 1200
        assert run["every"] == 9
        assert run["series"]["step"][0] == 5
        assert run["series"]["importance_ratio_max"][0] == 11, "a mean of maxima is none"

    @pytest.mark.parametrize(
        "value", ["NaN", "Infinity", "1e999", "1e308", "-1e155", "null", '"x"', "{}", "[1]", "9" * 400]
    )
    def test_any_value_of_any_column(self, tmp_path: Path, value: str) -> None:
        """Of a step, an evaluation, a rollout and an event: by hand, by another program, by a bit that fell over."""
        folder = make_run(tmp_path / "made")
        kinds = {
            "metrics.jsonl": (step_row(21), eval_row(21, 0.5) | {"mean_response_tokens": 3.0, "num_invalid": 1}),
            "rollouts.jsonl": (rollout_row(21, 99, 0),),
            "events.jsonl": (span_rows(21), flow_row(21), {"kind": "start", "at_s": BEGAN_S, "machine": {"cores": 2}}),
        }
        for name, rows in kinds.items():
            with (folder / name).open("a") as file:
                for row, key in ((one, key) for one in rows for key in one):
                    file.write(json.dumps(row | {key: "HERE"}).replace('"HERE"', value) + "\n")
        for step in range(22, 42):  # and of each metric often enough to make claims of
            with (folder / "metrics.jsonl").open("a") as file:
                row = step_row(step)
                metrics = {key: "HERE" for key in row if key not in ("kind", "step")}
                file.write(json.dumps(row | metrics).replace('"HERE"', value) + "\n")
        page = page_of(folder)
        assert not re.search(r"\b(NaN|Infinity)\b", page.partition('id="data">')[2].partition("</script>")[0])
        client = TestClient(build_app([Watched(folder, None)], "secret"))
        for path in ("news?change=-1&run=0", "rollouts?run=0", "work?run=0&from=0&to=9", "flow?run=0&step=21"):
            answer = client.get(f"/secret/{path}")
            assert answer.status_code == 200, path
            json.loads(answer.text, parse_constant=pytest.fail)

    def test_settings_that_differ(self, tmp_path: Path) -> None:
        runs = content(page_of(make_run(tmp_path / "one"), make_run(tmp_path / "other", rate=3e-4)))["runs"]
        settings = [{name: (value, is_default) for name, value, is_default in run["settings"]} for run in runs]
        assert [one["trainer.learning_rate"][0] for one in settings] == [1e-5, 3e-4]
        assert settings[0]["rollout.temperature"][1], "as it is by default"
        assert not settings[1]["trainer.learning_rate"][1]

    def test_the_flow_of_a_step(self, tmp_path: Path) -> None:
        run = content(page_of(make_run(tmp_path / "made")))["runs"][0]
        assert run["flows"]["20"]["groups"][0] == [40, 37.0, 38.0, 38.1, 39.0]
        assert run["flows"]["20"]["adopted_s"] == 40.2
        fine = run["work"][1]
        assert fine["to"] - fine["from"] == pytest.approx(1.1 * 3200, abs=1), "with a margin"
        assert set(fine["waits"]) == {"generator-0", "reward", "trainer"}

    def test_the_page_is_small(self) -> None:
        own = [path for path in PAGE.iterdir() if path.suffix in (".js", ".css", ".html") and path.stem != "uplot"]
        lines = [line.strip() for path in own for line in path.read_text(encoding="utf-8").splitlines()]
        assert 0 < sum(bool(line) and not line.startswith("//") for line in lines) < MAX_PAGE_LINES


class TestLive:
    def test_only_what_is_new_is_read(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", end=None)
        data = read(folder)
        assert not data.refresh()
        add_step(folder, 21)
        assert data.refresh()
        assert data.series(after_step=20)["step"] == [21.0]

    def test_steps_that_are_taken_back(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", end=None)
        data = read(folder)
        rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").unlink()
        (folder / "metrics.jsonl").write_text("".join(rows[:11]))
        data.read_all()
        assert data.num_steps == 10

    def test_memory_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in (("MAX_SPANS", 10), ("MAX_FLOWS", 5), ("MAX_EXECUTORS", 2)):
            monkeypatch.setattr(f"llamarl.parts.page.run_data.{name}", value)
        data = read(make_run(tmp_path / "made", steps=100))
        assert len(data.spans) == 2
        assert all(len(table) <= 13 for table in data.spans.values())
        assert list(data.flows) == [96, 97, 98, 99, 100]


class TestRollouts:
    def test_a_sample_is_of_whole_groups(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made")
        rows = sample(folder, None, 8000)["rows"]
        assert {row["step"] for row in rows} >= {1, 20}
        for step, group_id in {(row["step"], row["group_id"]) for row in rows if row["step"] > 1}:
            assert [row["index"] for row in rows if (row["step"], row["group_id"]) == (step, group_id)] == [0, 1]

    def test_finding(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made")
        found = Rollouts(folder)
        while found.refresh():
            pass
        assert len(found) == 81
        rows = found.find({"step": "3..5", "reward": "1"}, str)["rows"]
        assert [(row["step"], row["reward"]) for row in rows] == [(step, 1.0) for step in (3, 3, 4, 4, 5, 5)]
        assert len(found.find({"prompt": "QUESTION 8?"}, None)["rows"]) == 2
        assert found.find({"right": "not judged"}, None)["rows"] == []
        assert [row["reward"] for row in found.find({"right": "wrong", "step": "3"}, None)["rows"]] == [0.0, 0.0]
        assert found.find({"step": "1"}, str)["words"] == {"5": "5", "6": "6", "7": "7", "8": "8"}
        write_rows(folder / "rollouts.jsonl", [rollout_row(21, 99, 0, prompt="new")])
        found.refresh()
        assert [row["step"] for row in found.find({"prompt": "new"}, None)["rows"]] == [21]

    def test_the_question_of_a_chat_is_shown_in_place_of_its_header(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", steps=2)
        chat = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
        write_rows(folder / "rollouts.jsonl", [rollout_row(3, 9, 0, prompt=chat)])
        rows = {row["group_id"]: row for row in sample(folder, None, 1 << 20)["rows"]}
        assert (rows[9]["question"], rows[9]["prompt"]) == ("How many?", chat)
        assert "question" not in rows[5], "a prompt that is the question is not there twice"

    def test_the_newest_are_found_and_no_more_than_can_be_shown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llamarl.parts.page.rollouts.NUM_FOUND", 6)
        found = Rollouts(make_run(tmp_path / "made"))
        found.refresh()
        assert [row["step"] for row in found.find({}, None)["rows"]] == [19, 19, 20, 20, 20, 20]
        looked = found.find({"reward": "1"}, None)
        assert [row["step"] for row in looked["rows"]] == [18, 18, 19, 19, 20, 20]
        assert all(number in looked["said"] for number in (" 6 ", "11 of 81"))
        assert [row["step"] for row in found.find({"prompt": "question 2"}, None)["rows"]] == [13, 13, 14, 14, 14, 14]

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("3", (3, 3)), ("3..7", (3, 7)), ("..7", (-float("inf"), 7)), ("3..", (3, float("inf")))],
    )
    def test_bounds(self, text: str, expected: tuple[float, float]) -> None:
        assert bounds(text) == expected


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "made")
    assert report.main([str(folder)]) == 0
    assert "open it in a browser" in capsys.readouterr().out
    assert content((folder / "report.html").read_text())["runs"][0]["began_s"] == BEGAN_S
    assert report.main([str(folder), str(folder), "--output", str(tmp_path / "both.html")]) == 0
    assert len(content((tmp_path / "both.html").read_text())["runs"]) == 2
