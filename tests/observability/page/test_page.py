"""What a page about a run holds, and that it holds no more than it may."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from llamarl.cli import report
from llamarl.config import ConfigError
from llamarl.observability.page.document import document, embedded, whole
from llamarl.observability.page.findings import ends, findings
from llamarl.observability.page.rollouts import Rollouts, bounds, sample
from llamarl.observability.page.run_data import KINDS, RunData
from tests.observability.page.runs import (
    BEGAN_S,
    NASTY,
    add_step,
    eval_row,
    make_run,
    rollout_row,
    step_row,
    write_rows,
)

PAGE = Path(report.__file__).parents[1] / "observability" / "page"
MAX_PAGE_LINES = 900


def read(folder: Path) -> RunData:
    data = RunData(folder)
    data.read_all()
    return data


def claims(folder: Path) -> dict[str, str]:
    return {claim["text"]: claim["chart"] for claim in findings(read(folder))}


def page_of(*folders: Path) -> str:
    return document([whole(read(folder), None, len(folders)) for folder in folders])


def content(page: str) -> Any:
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


class TestClaims:
    def test_what_was_learnt_with_its_error(self, tmp_path: Path) -> None:
        found = claims(make_run(tmp_path / "made"))
        text = "held-out accuracy rose from 20.0% to 60.0% (+40.0 ± 6.3 points)"
        assert found[text] == "solve", found
        assert any(text.startswith("reward ") and chart == "reward" for text, chart in found.items())
        assert any(chart == "timeline" for chart in found.values()), "what bounds the speed"

    def test_noise_is_no_change(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", end=None)
        write_rows(folder / "metrics.jsonl", [eval_row(20, 0.22)])
        assert any("did not change beyond its error" in text for text in claims(folder))

    @pytest.mark.parametrize(
        ("metric", "first", "last", "chart"),
        [
            ("kl_to_behavior", 0.001, 0.2, "kl"),
            ("extra.entropy_mean", 0.8, 0.01, "entropy"),
            ("truncated_share", 0.01, 0.5, "truncated"),
            ("invalid_share", 0.0, 0.1, "truncated"),
            ("grad_norm", 0.1, 9.0, "grad"),
            ("staleness_max", 1, 3, "staleness"),
        ],
    )
    def test_what_looks_wrong(self, tmp_path: Path, metric: str, first: float, last: float, chart: str) -> None:
        folder = make_run(tmp_path / "made", steps=0, end=None)
        write_rows(folder / "metrics.jsonl", [step_row(step, **{metric: first}) for step in range(1, 21)])
        assert chart not in {claim["chart"] for claim in findings(read(folder)) if claim["level"] == "bad"}
        rows = [step_row(step, **{metric: last + 1e-3 * (step % 2)}) for step in range(21, 41)]
        write_rows(folder / "metrics.jsonl", rows)
        assert chart in {claim["chart"] for claim in findings(read(folder)) if claim["level"] == "bad"}

    def test_the_bound_itself_may_be_reached(self, tmp_path: Path) -> None:
        assert not any(
            "bound" in text and "stale" in text for text in claims(make_run(tmp_path / "a", staleness_max=2))
        )

    def test_who_is_idle(self, tmp_path: Path) -> None:
        """Each generator that works less than half of the time from the first step on, and no other executor."""
        folder = make_run(tmp_path / "made")
        assert not any("idle" in text for text in claims(folder))
        spans = {"generator-1": [["generate", BEGAN_S, BEGAN_S + 19]], "reward": [["score", BEGAN_S, BEGAN_S + 1]]}
        write_rows(folder / "events.jsonl", [{"kind": "spans", "at_s": BEGAN_S + 40, "spans": spans}])
        assert claims(folder)["generator-1 idle more than half of the time"] == "timeline"

    def test_an_evaluation_that_is_damaged_is_left_out(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made")
        write_rows(folder / "metrics.jsonl", [eval_row(21, 0.1) | {"accuracy": None}, {"kind": "eval", "step": 22}])
        assert len(read(folder).evals) == 2
        assert any("60.0%" in text for text in claims(folder))

    def test_speed_counts_from_the_first_step_on(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made")
        before = claims(folder)
        spans = {"trainer": [["start", BEGAN_S - 1000, BEGAN_S - 1]]}
        write_rows(folder / "events.jsonl", [{"kind": "spans", "at_s": BEGAN_S + 41, "spans": spans}])
        assert claims(folder) == before

    def test_every_claim_has_its_picture(self, tmp_path: Path) -> None:
        script, body = (PAGE / "curves.js").read_text(), (PAGE / "page.html").read_text()
        known = set(re.findall(r'^  \["([\w-]+)", ', script, re.MULTILINE)) | set(
            re.findall(r'<section id="(\w+)"', body)
        )
        named = set(re.findall(r'chart="(\w+)"', (PAGE / "findings.py").read_text()))
        assert named <= known, named - known

    def test_too_few_values_say_nothing(self) -> None:
        assert ends([1.0, 2.0, float("nan")]) is None


def recorded(folder: Path, name: str, steps: int | None = None) -> list[dict[str, str]]:
    """The claims about a real run of the demo, whose curves were kept, or about its first steps."""
    curves = json.loads(Path(__file__).with_name("curves.json").read_text())[name]
    evals = curves.pop("evals")
    folder = make_run(folder / name, steps=0, end=None)
    rows = [
        step_row(step, **dict(zip(curves, values, strict=True)))
        for step, values in enumerate(zip(*curves.values(), strict=True), start=1)
    ]
    write_rows(folder / "metrics.jsonl", [eval_row(*one) for one in evals if one[0] <= (steps or len(rows))])
    write_rows(folder / "metrics.jsonl", rows[:steps])
    return findings(read(folder))


class TestRecordedRuns:
    """`curves.json`: made by `benchmarks/pictures.py`."""

    def test_one_that_learns(self, tmp_path: Path) -> None:
        accuracy, reward, *_ = found = recorded(tmp_path, "good")
        assert accuracy["text"] == "held-out accuracy rose from 19.1% to 85.2% (+66.0 ± 3.3 points)"
        assert reward["text"] == "reward rose from 0.416 to 0.818 (+0.402 ± 0.052)"
        assert "bad" not in {claim["level"] for claim in found}

    @pytest.mark.parametrize(
        ("name", "doubt"),
        [("hacked", "held-out accuracy fell"), ("brief", "responses shrank from 40.0 to 15.0 tokens")],
    )
    def test_a_hacked_reward_is_no_success(self, tmp_path: Path, name: str, doubt: str) -> None:
        first, *others = recorded(tmp_path, name)
        assert first["text"].startswith("reward rose from 0.6")
        assert first["text"].endswith(f" while {doubt}: it may be hacked")
        assert first["level"] == "bad"
        assert "good" not in {claim["level"] for claim in others}, "held-out accuracy is judged by the same reward"

    def test_one_that_learnt_before_it_was_hacked(self, tmp_path: Path) -> None:
        texts = [claim["text"] for claim in recorded(tmp_path, "hacked")]
        assert "held-out accuracy fell from its best of 79.7% (step 20) to 21.9%" in texts
        assert recorded(tmp_path / "early", "hacked", 30)[0]["level"] == "good", "until then nothing is wrong"

    def test_a_collapse_within_the_first_steps(self, tmp_path: Path) -> None:
        """The first fifth of the steps, which the end is compared with, is mostly after it."""
        texts = {claim["text"]: claim["level"] for claim in recorded(tmp_path, "too_fast")}
        assert texts["reward fell from its best of 0.367 (step 2) to 0"] == "bad"
        assert texts["held-out accuracy fell from 19.1% to 0.0% (-19.1 ± 2.5 points)"] == "bad"
        assert texts["trainer and generators drift apart: KL up to 1.37 nats per token (step 3)"] == "bad"

    def test_too_old_rollouts(self, tmp_path: Path) -> None:
        texts = {claim["text"]: claim["level"] for claim in recorded(tmp_path, "stale")}
        assert texts["reward fell from its best of 0.5 (step 14) to 0.0702"] == "bad"
        assert texts["trainer and generators drift apart: KL up to 0.413 nats per token (step 26)"] == "bad"

    def test_what_is_partly_lost_rose_all_the_same(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", steps=0, end=None)
        levels = [0.3] * 20 + [0.9] * 40 + [0.7] * 40
        rows = [step_row(step, reward_mean=level + 0.01 * (step % 2)) for step, level in enumerate(levels, start=1)]
        write_rows(folder / "metrics.jsonl", rows)
        (claim,) = (claim for claim in findings(read(folder)) if claim["chart"] == "reward")
        assert re.fullmatch(r"reward rose from .*, below its best of 0\.90\d \(step \d+\)", claim["text"]), claim
        assert claim["level"] == "good"

    @pytest.mark.parametrize("steps", [6, 40, 1000])
    def test_one_that_still_rises_has_lost_nothing(self, tmp_path: Path, steps: int) -> None:
        folder = make_run(tmp_path / "made", steps=0, end=None)
        write_rows(folder / "metrics.jsonl", [step_row(step, reward_mean=0.005 * step) for step in range(1, steps + 1)])
        (claim,) = (claim for claim in findings(read(folder)) if claim["chart"] == "reward")
        assert claim["text"].startswith("reward rose from 0.")
        assert "best" not in claim["text"]

    @pytest.mark.parametrize("seed", range(20))
    def test_noise_has_no_best(self, tmp_path: Path, seed: int) -> None:
        folder, chance = make_run(tmp_path / "made", steps=0, end=None), random.Random(seed)
        rows = [step_row(step, reward_mean=chance.gauss(0.5, 0.1)) for step in range(1, 301)]
        write_rows(folder / "metrics.jsonl", rows)
        assert not any("its best" in claim["text"] for claim in findings(read(folder)))


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
        monkeypatch.setattr("llamarl.observability.page.run_data.time.time", lambda: 2e12)
        state, reason = data.state()
        assert state == "silent"
        assert "may be dead" in reason

    def test_one_that_goes_on_after_its_end(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", end="interrupted")
        (folder / "summary.json").write_text('{"end": "interrupted", "end_reason": "ended by SIGINT"}')
        data = read(folder)
        assert data.state() == ("interrupted", "trainer died")
        write_rows(folder / "events.jsonl", [{"kind": "start", "at_s": BEGAN_S + 200, "resumed": True}])
        data.read_all()
        assert data.state() == ("running", "")
        assert data.began_s == BEGAN_S
        assert data.texts[-1] == ("phase", BEGAN_S + 200, "resumed")

    def test_a_step_that_is_done_again_counts_once(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made")
        write_rows(folder / "metrics.jsonl", [step_row(20, reward_mean=9.0), step_row(21)])
        data = read(folder)
        assert list(data.columns["step"]) == list(range(1, 22))
        assert max(data.columns["reward_mean"]) < 1

    def test_an_empty_folder_gives_a_page_that_says_so(self, tmp_path: Path) -> None:
        (run,) = content(page_of(tmp_path))["runs"]
        assert run["state"] == "empty"
        assert "the run never began" in run["claims"][0]["text"]

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

    def test_a_run_without_events_has_its_trace(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made")
        (folder / "events.jsonl").unlink()
        events = [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "trainer"}},
            {"ph": "X", "name": "train", "ts": 0.0, "dur": 5e5, "pid": 1},
        ]
        (folder / "trace.json").write_text(json.dumps({"traceEvents": events}))
        assert content(page_of(folder))["runs"][0]["work"][0]["rows"] == {
            "trainer": [[KINDS.index("train"), 0.0, 500.0]]
        }

    def test_no_folder_is_the_users_mistake(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no folder"):
            RunData(tmp_path / "missing")


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
        assert "of 1,000 rollouts" in run["rollouts"]["said"]

    def test_ten_thousand_steps_are_averaged(self, tmp_path: Path) -> None:
        folder = make_run(tmp_path / "made", steps=0)
        write_rows(folder / "metrics.jsonl", [step_row(step) for step in range(1, 10_001)])
        run = content(page_of(folder))["runs"][0]
        assert len(run["series"]["step"]) <= 1200
        assert run["every"] == 9
        assert run["series"]["step"][0] == 5

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
            monkeypatch.setattr(f"llamarl.observability.page.run_data.{name}", value)
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
        assert found.find({"outcome": "wrong"}, None)["rows"] == []
        assert found.find({"step": "1"}, str)["words"] == {"5": "5", "6": "6", "7": "7", "8": "8"}
        write_rows(folder / "rollouts.jsonl", [rollout_row(21, 99, 0, prompt="new")])
        found.refresh()
        assert [row["step"] for row in found.find({"prompt": "new"}, None)["rows"]] == [21]

    def test_the_newest_are_found_and_no_more_than_can_be_shown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("llamarl.observability.page.rollouts.NUM_FOUND", 6)
        found = Rollouts(make_run(tmp_path / "made"))
        found.refresh()
        assert [row["step"] for row in found.find({}, None)["rows"]] == [19, 19, 20, 20, 20, 20]
        looked = found.find({"reward": "1"}, None)
        assert [row["step"] for row in looked["rows"]] == [18, 18, 19, 19, 20, 20]
        assert looked["said"] == "the newest 6 that fit, of 11 looked at; there are 81"
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
