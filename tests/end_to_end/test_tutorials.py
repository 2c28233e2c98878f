"""Tutorials do what they say: their files make a run, their messages and pictures exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from llamarl.observability.page import findings
from tests.architecture.repository import PACKAGE, ROOT, python_files, tree
from tests.end_to_end.tiny import llamarl, make_model

DOCS = ROOT / "docs"


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_your_task_runs_as_it_stands(tmp_path: Path) -> None:
    """Data, reward and settings from the page, then the commands that it shows."""
    (data,), (reward,), (settings,), (commands,) = (
        blocks("your_task.md", language) for language in ("json", "python", "toml", "bash")
    )
    make_model(tmp_path / "model")
    for name, text in (("train.jsonl", data), ("my_reward.py", reward), ("mine.toml", settings)):
        (tmp_path / name).write_text(text)
    for command in commands.splitlines():
        words = command.removeprefix("llamarl ").split()
        if words[0] == "train":  # processes of their own take ten times as long, and are tested elsewhere
            words += ["--cluster.kind", "inline", "--screen.kind", "lines"]
        done = llamarl(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    page = (tmp_path / "runs" / "mine" / "report.html").read_text(encoding="utf-8")
    assert "Repeat the word" in page
    assert "does not say it" in page


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
    known = set(re.findall(r'^  \["([\w-]+)", ', (PACKAGE / "observability/page/curves.js").read_text(), re.MULTILINE))
    assert [chart for chart in charts & known if f"`{chart}`" not in text and chart != "busy"] == []


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_pictures_are_there(page: Path) -> None:
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / name).exists(), name
