"""The gallery: each folder says how to run it in one screen, and its run files run."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from examples.code import make_data
from examples.judge import stand_in
from examples.repair import make_data as make_repositories
from examples.tools.calculator import Calculator
from llamarl.data.sources.list_functions import ListFunctions
from llamarl.parts.episodes.environments import Task, Turn
from llamarl.parts.episodes.environments.calculator import Calculator as Packaged
from llamarl.rewards.judge import PROMPT
from tests.architecture.repository import ROOT
from tests.end_to_end.tiny import llamarl_here, make_model
from tests.nightly import nightly
from tests.parts.episodes.machines.here import PROBLEM

EXAMPLES = ROOT / "examples"
FOLDERS = ("code", "judge", "own_reward", "real", "repair", "sft_then_rl", "tools")
WITHOUT_CURVE = ("repair",)
MAX_LINES = 60
"""One screen."""
SMALL = (
    *(
        "--steps",
        2,
        "--cluster.kind",
        "inline",
        "--model.warm_start=",
        "--eval.max_prompts",
        4,
        "--screen.kind",
        "lines",
    ),
    *(
        "--rollout.prompts_per_step",
        2,
        "--rollout.group_size",
        3,
        "--rollout.window",
        2,
        "--rollout.max_new_tokens",
        24,
    ),
)


def test_the_gallery_has_these_folders() -> None:
    assert sorted(path.parent.name for path in EXAMPLES.glob("*/README.md")) == sorted(FOLDERS)
    page = (ROOT / "docs" / "your_task.md").read_text(encoding="utf-8")
    assert all(f"(../examples/{name}/README.md)" in page for name in FOLDERS)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_readme_has_commands_files_a_curve_and_what_to_change(name: str) -> None:
    folder, text = EXAMPLES / name, (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    files = {path.name for path in folder.iterdir() if path.suffix not in (".md", ".LICENSE") and path.is_file()}
    rows = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    assert files == set(re.findall(r"`([\w.]+)`", rows)) & files, "every file has its row"
    assert any(file.endswith(".toml") for file in files)
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(pictures) == (name not in WITHOUT_CURVE) and all((folder / picture).is_file() for picture in pictures)
    assert "reward" in text and "**Make it yours.**" in text


def test_the_tool_answers_as_the_packaged_one() -> None:
    """Whose curve it shows."""
    task = Task(prompt="", answer="", metadata={})
    for response in ("a:17+58?", "a:17+58?=", "17+58", "?", "7+?", "1+2+3?", "x"):
        turns = [Turn(response=response)]
        assert Calculator().reply(task, turns) == Packaged().reply(task, turns)


@pytest.mark.parametrize(
    ("answer", "points"),
    [("a:16+9=25 b:25+3=28\n#### 28", 10), ("a:16+9=25 b:25+3=29\n#### 29", 1), ("28", 0), ("", 0)],
)
def test_the_stand_in_grades_what_the_judge_is_asked(answer: str, points: int) -> None:
    asked = PROMPT.replace("{prompt}", "Eva has 16 cards").replace("{answer}", "28").replace("{response}", answer)
    assert stand_in.grade(asked) == points


@pytest.fixture
def judge() -> Iterator[str]:
    """The address of a judge."""
    server = uvicorn.Server(uvicorn.Config(stand_in.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    (port,) = (one.getsockname()[1] for one in server.servers[0].sockets[:1])
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gallery") / "model", context=2048)


@nightly("runs of the gallery, in small")
@pytest.mark.parametrize("name", FOLDERS)
def test_it_runs(name: str, model: Path, judge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    own: dict[str, list[object]] = {
        "judge": ["--reward.parts", f"[{{name = 'judge', base_url = '{judge}', model = 'stand-in'}}]"],
        "code": [
            *("--data.train", f"{{name = 'file', path = '{tmp_path}/train.jsonl'}}"),
            *("--data.eval", f"{{name = 'file', path = '{tmp_path}/test.jsonl'}}"),
        ],
        "repair": [
            *("--data.train", f"{{name = 'file', path = '{tmp_path}/train.jsonl'}}"),
            *("--data.eval", f"{{name = 'file', path = '{tmp_path}/test.jsonl'}}"),
        ],
        "real": ["--data.template", "{question}\n", "--data.system=", "--data.examples", "[]"],
    }
    if name == "repair":
        if PROBLEM:
            pytest.skip(PROBLEM)
        monkeypatch.setattr(make_repositories, "FOLDER", tmp_path)
        monkeypatch.setattr(make_repositories, "ROWS", {"train": 20, "test": 8})
        make_repositories.main()
    if name == "code":
        monkeypatch.setattr(make_data, "FOLDER", tmp_path)
        monkeypatch.setattr(make_data, "PARTS", {one: ListFunctions(count=20) for one in ("train", "test")})
        make_data.main()
    toml = EXAMPLES / name / ("svamp.toml" if name == "real" else "run.toml")
    done = llamarl_here("train", toml, *SMALL, "--model.path", model, "--output", tmp_path, *own.get(name, []))
    assert done.returncode == 0, done.stderr
    (run,) = (path.parent for path in tmp_path.glob("*/metrics.jsonl"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "step"] == [1, 2]
    assert all(not row.get("invalid") for row in rows), "every response was judged"


def test_repositories_are_repaired_by_the_command_of_their_solution() -> None:
    """Each test fails before, and only one operator repairs it."""
    rows = list(make_repositories.rows("train", 50))
    assert rows == list(make_repositories.rows("train", 50)) and len({row["question"] for row in rows}) > 40
    for row in rows:
        (path,) = row["answer_files"]
        expression = row["files"][path].partition("return")[2].strip()
        calls, repaired = row["check"]["calls"], list[str]()
        for operator in make_repositories.OPERATORS:
            new = re.sub(" . b", f" {operator} b", expression)
            if all(eval(new, {"a": a, "b": b}) == value for _, (a, b), value in calls):
                repaired.append(operator)
        assert len(repaired) == 1 and make_repositories.command(row, repaired[0]).endswith(path)


@nightly("a warm start, in small")
def test_the_supervised_half_runs(tmp_path: Path) -> None:
    toml = EXAMPLES / "sft_then_rl" / "base_sft.toml"
    done = llamarl_here("sft", toml, "--steps", 2, "--output", tmp_path / "base", "--source.count", 300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "base" / "model.safetensors").exists()
