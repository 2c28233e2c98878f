"""Tutorials do what they say: their files make a run, their messages and pictures exist."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from llamarl.config import load_config
from llamarl.parts.page import findings
from llamarl.run.rollouts import rollout_rows
from tests.architecture.repository import PACKAGE, ROOT, python_files, tree
from tests.end_to_end.tiny import LLAMARL, SOMETIME_S, environment, llamarl, make_model
from tests.nightly import nightly

DOCS = ROOT / "docs"


def blocks(page: str, language: str, *, before: str = "") -> list[str]:
    """Code of a page in a language; `before` is a heading at which to stop."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if before:
        text, heading, _ = text.partition(f"\n{before}\n")
        assert heading, f"{page} has no heading {before}"
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@nightly("architecture/test_docs.py checks the commands of all pages")
def test_your_task_runs_as_it_stands(tmp_path: Path) -> None:
    """Data, reward and settings from the page, then the commands that it shows."""
    data, held_out = blocks("your_task.md", "json")
    script, reward, reward_class = blocks("your_task.md", "python")
    (settings,), commands = blocks("your_task.md", "toml"), "".join(blocks("your_task.md", "bash")).splitlines()
    make_model(tmp_path / "model")
    files = {"train.jsonl": data, "test.jsonl": held_out, "my_reward.py": reward + reward_class, "mine.toml": settings}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert load_config(tmp_path / "mine.toml").trainer.learning_rate > 1e-6, "in so few steps that moves nothing"
    for command in commands:
        words = shlex.split(command.removeprefix("llamarl "))
        if words[0] == "train":  # processes of their own take ten times as long, and are tested elsewhere
            words += ["--cluster.kind", "inline", "--screen.kind", "lines", "--watch"]
        done = llamarl(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "prompts are in data.train too" not in done.stderr
        if words[0] == "train" and "--dry-run" not in words:
            assert "llamarl train: watch at http://127.0.0.1:" in done.stderr
    assert "Repeat the word" in (tmp_path / "runs" / "mine" / "report.html").read_text(encoding="utf-8")
    by_class = [row["reason"] for row in rollout_rows(tmp_path / "runs" / "class")]
    assert any("the answer is missing" in reason for reason in by_class)
    check_script(script.replace("steps=40,", "steps=2,\n    cluster={'kind': 'inline'},"), tmp_path)


def check_script(script: str, folder: Path) -> None:
    """Runs the page's Python in the folder that has its model."""
    assert "kind" in script
    (folder / "task.py").write_text(script)
    command = [sys.executable, "task.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment(), timeout=SOMETIME_S)
    assert done.returncode == 0, done.stderr
    assert len([*rollout_rows(folder / "runs" / "run")]) == 2 * 2 * 4


@pytest.mark.timeout(900)
@nightly("a minute or two of training")
def test_the_first_run_goes_as_it_stands(tmp_path: Path) -> None:
    """Every command of the page, in its order; the demo itself with fewer steps, and without installing it."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    if (ROOT / "runs" / "base" / "demo").exists():  # else it is made here
        shutil.copytree(ROOT / "runs" / "base" / "demo", tmp_path / "runs" / "base" / "demo")
    shown = blocks("first_run.md", "bash", before="## A real model")
    commands = [line for block in shown for line in block.splitlines()]
    assert commands[0] == "make demo"
    (venv := tmp_path / "venv").mkdir()
    (venv / ".llamarl-runtime").touch()
    made = subprocess.run(
        ["make", "-s", "-n", "demo", f"VENV={venv}"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert made.stdout.startswith(f"{venv}/bin/llamarl train configs/demo.toml")
    commands[0] = made.stdout.strip().removeprefix(f"{venv}/bin/") + " --steps 4 --eval.max_prompts 32"
    done = set[str]()
    for command in commands:
        program, *words = command.split()
        assert program == "llamarl"
        done.add(words[0])
        if words[0] == "watch":
            assert "first" in watched(words, tmp_path)
            continue
        found = llamarl(*words, cwd=tmp_path, timeout_s=400.0)
        assert found.returncode == 0, f"{command}\n{found.stdout[-2000:]}{found.stderr}"
    assert done == {"train", "watch", "report", "export", "eval"}
    first = tmp_path / "runs" / "first"
    assert json.loads((first / "summary.json").read_text())["steps"] == 40
    named = re.findall(r"`([a-z]+\.(?:jsonl|json|toml|html)|checkpoints/)`", (DOCS / "first_run.md").read_text("utf-8"))
    assert len(named) > 5
    assert [name for name in named if not (first / name).exists()] == []
    assert "accuracy" in found.stdout


def watched(words: Sequence[str], folder: Path) -> str:
    """The page that a command serves until it is ended, as Ctrl-C does."""
    with subprocess.Popen(
        [*LLAMARL, *words], cwd=folder, stdout=subprocess.PIPE, text=True, env=environment()
    ) as command:
        try:
            assert command.stdout is not None
            address = command.stdout.readline().split()[-1]
            with urllib.request.urlopen(address, timeout=240) as answer:
                page: str = answer.read().decode()
            command.send_signal(signal.SIGINT)
            assert command.wait(240) == 130
        finally:
            command.kill()
    return page


def _texts() -> list[str]:
    """What the package says, the places of values as `\0`."""
    found = list[str]()
    for path in python_files("llamarl"):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(one.value if isinstance(one, ast.Constant) else "\0" for one in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@nightly("reads what runs say; by day pages are compared with the code in architecture/test_docs.py")
def test_messages_are_those_of_the_code() -> None:
    said = _texts()
    rows = re.findall(r"^\| `(.+?)` \| [^`|]", (DOCS / "troubleshooting.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 20
    unknown = [
        message
        for message in rows
        if not all(
            any(part.strip("` ") in text for text in said) for part in message.split("…") if part.strip("` ,;:(")
        )
    ]
    assert unknown == []


def test_every_claim_is_explained() -> None:
    text = (DOCS / "reading_a_run.md").read_text(encoding="utf-8")
    charts = set(re.findall(r'chart="([\w-]+)"', Path(findings.__file__).read_text(encoding="utf-8")))
    known = set(re.findall(r'^  \["([\w-]+)", ', (PACKAGE / "parts/page/curves.js").read_text(), re.MULTILINE))
    assert [chart for chart in charts & known if f"`{chart}`" not in text and chart != "busy"] == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_pictures_are_there(page: Path) -> None:
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / name).exists(), name
