"""What editors and shells know of settings and options: the schema of a run file, completion, types in help texts."""

from __future__ import annotations

import json
import os
import re
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


OFFERED = {
    ("trai",): {"train"},
    ("train", "--trainer.learning_r"): {"--trainer.learning_rate"},
    ("train", "--overw"): {"--overwrite"},
    ("train", "demo_m"): {"demo_moe"},
    ("sft", "demo_sf"): {"demo_sft"},
    ("launch", "sl"): {"slurm"},
}
"""What a shell offers for the last word."""
BARE_ZSH = """
compadd() { shift; print -l -- ${(M)@:#$PREFIX*} }
_files() { }
compdef() { print -- $1 >&2 }
"""
"""Builtins of zsh that work only while a key is handled, as functions that print what they would offer."""


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"no {shell} here (apt-get install {shell})")


def script_of(shell: str, folder: Path) -> Path:
    done = llamarl_here("completion", shell)
    assert done.returncode == 0, done.stderr
    (script := folder / f"llamarl.{shell}").write_text(done.stdout)
    return script


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_the_same(shell: str, tmp_path: Path) -> None:
    text = script_of(shell, tmp_path).read_text()
    assert all(command in text for command in COMMANDS)
    assert "trainer.learning_rate" in text and "demo_moe" in text


@needs("zsh")
def test_zsh_completes(tmp_path: Path) -> None:
    script = script_of("zsh", tmp_path)
    for words, offered in OFFERED.items():
        given = f"words=(llamarl {' '.join(words)}); CURRENT={len(words) + 1}; PREFIX={words[-1]}"
        text = f"{BARE_ZSH} source {script}; {given}; _llamarl"
        ran = subprocess.run(["zsh", "-f", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert (set(ran.stdout.split()), ran.stderr) == (offered, "_llamarl\n"), words


@needs("zsh")
def test_zsh_takes_the_script_behind_its_own(tmp_path: Path) -> None:
    """As `docs/commands.md` says: `eval` after `compinit`."""
    script = script_of("zsh", tmp_path)
    text = f'autoload -Uz compinit; compinit -u -d dump; eval "$(cat {script})"; print $_comps[llamarl]'
    ran = subprocess.run(["zsh", "-f", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("_llamarl\n", "")


@needs("fish")
def test_fish_completes(tmp_path: Path) -> None:
    script = script_of("fish", tmp_path)
    asked = "".join(f"echo {at}; complete -C 'llamarl {' '.join(words)}'\n" for at, words in enumerate(OFFERED))
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    command = ["fish", "--no-config", "-c", f"source {script}\n{asked}"]
    ran = subprocess.run(command, cwd=tmp_path, env=home, capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    of_each = re.split(r"^\d+\n", ran.stdout, flags=re.MULTILINE)[1:]
    for said, (words, offered) in zip(of_each, OFFERED.items(), strict=True):
        assert {line.partition("\t")[0] for line in said.splitlines()} == offered, words


def test_a_help_text_shows_types() -> None:
    said = llamarl_here("eval", "--help").stdout
    assert "VALUE" not in said
    for one in ("--eval.samples INT", "--eval.temperature FLOAT", "--reward.parts LIST", "bfloat16"):
        assert one in said, one
