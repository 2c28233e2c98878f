"""What editors and shells know of settings and options: the schema of a run file, completion, types in help texts."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from llamarl.cli.main import COMMANDS
from llamarl.config.load import PACKAGED
from tests.end_to_end.tiny import llamarl_here

FILES = sorted(PACKAGED.glob("*.toml"))


@pytest.mark.parametrize("kind", ["run", "sft"])
def test_the_schema_is_shipped(kind: str) -> None:
    """`llamarl schema KIND > configs/KIND.schema.json` writes it anew."""
    done = llamarl_here("schema", kind)
    assert done.returncode == 0 and done.stdout == (PACKAGED / f"{kind}.schema.json").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_packaged_file_names_its_schema_and_fits_it(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    text = path.read_text()
    named = text.partition("\n")[0].removeprefix("#:schema ")
    schema = json.loads((PACKAGED / named).read_text())
    assert [*jsonschema.Draft202012Validator(schema).iter_errors(tomllib.loads(text))] == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("trainer", "learning_rat", 1e-5), ("trainer", "learning_rate", "fast"), ("cluster", "kind", "slurm")],
)
def test_an_editor_sees_a_mistake(section: str, key: str, value: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    table = tomllib.loads((PACKAGED / "demo.toml").read_text())
    table.setdefault(section, {})[key] = value
    schema = json.loads(llamarl_here("schema").stdout)
    assert [*jsonschema.Draft202012Validator(schema).iter_errors(table)] != []


def test_bash_completes_commands_options_settings_and_names(tmp_path: Path) -> None:
    done = llamarl_here("completion", "bash")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "llamarl.bash"
    script.write_text(done.stdout)

    def offered(*words: str) -> list[str]:
        given = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        text = f'source {script}; {given}; _llamarl; echo "${{COMPREPLY[@]}}"'
        ran = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True)
        return ran.stdout.split()

    assert offered("llamarl", "trai") == ["train"]
    assert offered("llamarl", "train", "--trainer.learning_r") == ["--trainer.learning_rate"]
    assert offered("llamarl", "train", "--overw") == ["--overwrite"]
    assert offered("llamarl", "train", "demo_m") == ["demo_moe"]
    assert offered("llamarl", "sft", "demo_sf") == ["demo_sft"]
    assert offered("llamarl", "launch", "sl") == ["slurm"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_the_same(shell: str, tmp_path: Path) -> None:
    done = llamarl_here("completion", shell)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert command in done.stdout
    assert "trainer.learning_rate" in done.stdout and "demo_moe" in done.stdout
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(done.stdout)
        assert subprocess.run([shell, "--no-execute", str(script)]).returncode == 0


def test_a_help_text_shows_types() -> None:
    said = llamarl_here("eval", "--help").stdout
    assert "VALUE" not in said
    for one in ("--eval.samples INT", "--eval.temperature FLOAT", "--reward.parts LIST", "bfloat16"):
        assert one in said, one
