"""What `docs/coming_from.md` tells people of other frameworks to write works."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from llamarl.config import load_config
from tests.architecture.repository import ROOT
from tests.end_to_end.tiny import make_model
from tests.nightly import nightly

PAGE = (ROOT / "docs/coming_from.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def test_the_file_is_one_that_loads() -> None:
    config = load_config(tomllib.loads(block("toml")))
    assert (config.recipe, config.trainer.loss.name, config.reward.parts[0].name) == (
        "grpo",
        "grpo",
        "my_module:reward",
    )


@nightly("runs of their own; architecture/test_docs.py reads the page by day")
def test_the_call_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    written = block("python").replace("Qwen/Qwen2.5-0.5B-Instruct", str(model)).replace("steps=100", "steps=1, **SMALL")
    small = {
        "rollout.prompts_per_step": 2,
        "rollout.group_size": 2,
        "rollout.max_new_tokens": 8,
        "cluster.kind": "inline",
    }
    monkeypatch.chdir(tmp_path)
    names = {"SMALL": small}
    exec(compile(written, "coming_from.md", "exec"), names)
    assert [row["step"] for row in names["run"].metrics()] == [1]
