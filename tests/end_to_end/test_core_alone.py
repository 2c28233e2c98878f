"""Without `llamarl/parts/` the core trains, evaluates, saves and resumes; what a part would do says so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.tiny import LLAMARL, ROOT, environment, rows

HIDES = """
import sys

class Hides:
    def find_spec(self, name, path=None, target=None):
        if name == "llamarl.parts" or name.startswith("llamarl.parts."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
"""
INLINE = ("--cluster.kind", "inline", "--checkpoint.every_steps", 2)


@pytest.fixture
def hidden(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds no part, and of its children."""
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDES)
    return environment() | {"PYTHONPATH": os.pathsep.join((str(tmp_path / "hidden"), str(ROOT)))}


def run(hidden: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*LLAMARL, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=hidden)


def test_the_core_trains_evaluates_saves_and_resumes(tmp_path: Path, toml: Path, hidden: dict[str, str]) -> None:
    done = run(hidden, "train", toml, "--output", tmp_path / "runs", *INLINE, "--screen.kind", "auto")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "tiny"
    assert (folder / "checkpoints" / "step-00000004").is_dir()
    done = run(hidden, "train", toml, "--output", tmp_path / "runs", *INLINE, "--steps", 6, "--resume")
    assert done.returncode == 0, done.stderr
    steps = [row["step"] for row in rows(folder / "metrics.jsonl") if row["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert {row["step"] for row in rows(folder / "metrics.jsonl") if row["kind"] == "eval"} >= {0, 6}
    done = run(hidden, "export", folder, tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    done = run(hidden, "eval", tmp_path / "exported", "--config", toml, "--max-prompts", 4)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


@pytest.mark.parametrize(
    ("part", "arguments"),
    [
        ("episodes", ("--rollout.environment", "calculator")),
        ("hosts", ("--cluster.kind", "hosts", "--cluster.listen", "127.0.0.1:0")),
        ("page", ("--metrics.sinks", "['jsonl', 'tensorboard']")),
        ("page", ("--watch",)),
        (
            "vllm",
            ("--cluster.kind", "monarch", "--generator.backend", "vllm", "--generator.vllm.python", sys.executable),
        ),
        ("sft", ("--model.path", "no/model", "--model.warm_start", f"{ROOT}/configs/demo_sft.toml")),
    ],
)
def test_what_a_part_does_is_refused_in_a_sentence(
    tmp_path: Path, toml: Path, hidden: dict[str, str], part: str, arguments: tuple[str, ...]
) -> None:
    own = () if "--cluster.kind" in arguments else INLINE
    done = run(hidden, "train", toml, "--output", tmp_path / "runs", *own, *arguments)
    assert done.returncode == 2, done.stderr
    assert f"lacks the part `{part}`" in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_of_parts_say_so_and_a_dry_run_prints_the_settings(toml: Path, hidden: dict[str, str]) -> None:
    done = run(hidden, "plan", "--gpus", 8)
    assert done.returncode == 2
    assert "llamarl plan: this installation lacks the part `forecast`" in done.stderr
    done = run(hidden, "train", toml, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert re.match(r"# .*lacks the part `forecast`.*\n\n", done.stdout)
    assert 'name = "tiny"' in done.stdout
    assert run(hidden, "--help").returncode == 0
