"""A misspelled folder or file: the one that exists is named, and no name of the Hub is asked for in its place."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from llamarl.cli.main import USER_ERROR
from llamarl.config import ConfigError
from llamarl.config.hub import HubName, hub_name, missing_folder
from llamarl.config.section import near_path
from llamarl.run.rollouts import RunRecord
from tests.end_to_end.tiny import llamarl_here


@pytest.fixture
def here(tmp_path: Path, toml: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run, a folder of models, data and a run file."""
    for folder in ("runs/demo", "runs/demo-empty", "models/small"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/demo/config.toml").write_text(toml.read_text())
    (tmp_path / "models/small/config.json").write_text("{}")
    (tmp_path / "models/train.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("llamarl.parts.hub.fetch.Client", None)  # asking is a TypeError
    return tmp_path


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("eval runs/dmo tiny.toml", "`runs/demo`"),
        ("eval models/smal tiny.toml", "`models/small`"),
        ("generate runs/dmo --prompts tiny.toml", "`runs/demo`"),
        ("generate runs/other --prompts tiny.toml", "there is no such folder"),
        ("serve runs/dmo --port 0", "`runs/demo`"),
        ("export runs/dmo", "`runs/demo`"),
        ("export runs", "`runs/demo`"),
        ("report runs/dmo", "`runs/demo`"),
        ("report runs/demo runs/domo", "`runs/demo`"),
        ("watch runs/dmo", "`runs/demo`"),
        ("replay runs/dmo", "`runs/demo`"),
        ("profile runs/dmo", "`runs/demo`"),
        ("explain runs/dmo", "`runs/demo/config.toml`"),
        ("explain runs/demo", "`runs/demo/config.toml`"),
        ("explain runs/dmo/config.toml", "`runs/demo/config.toml`"),
        ("train tinny.toml", "`tiny.toml`"),
        ("train dmeo", "`demo`"),
        ("train tiny.toml --model.path runs/dmo", "`runs/demo`"),
        ("train tiny.toml --model.path models/smal --dry-run", "`models/small`"),
        ("plan --model models/smal --gpus 8", "`models/small`"),
        ("init --model models/smal --gpus 8 --gpu h100-80g --data models/train.jsonl", "`models/small`"),
        ("init --model llama3-8b --gpus 8 --gpu h100-80g --data models/tran.jsonl", "`models/train.jsonl`"),
    ],
)
def test_what_exists_is_named(words: str, named: str, here: Path) -> None:
    done = llamarl_here(*shlex.split(words))
    assert done.returncode == USER_ERROR, done.stderr
    assert named in done.stderr.splitlines()[-1].partition(": ")[2], done.stderr


def test_a_record_in_python(here: Path) -> None:
    with pytest.raises(ConfigError, match="`runs/demo`"):
        RunRecord(Path("runs/dmo"))


def test_a_name_of_the_hub_beside_a_local_folder(here: Path) -> None:
    """A revision says that the Hub is meant."""
    assert hub_name("models/large") is None and hub_name("runs/large") is None
    assert hub_name("models/large@main") == HubName("models/large", "main")
    assert hub_name("elsewhere/large") == HubName("elsewhere/large")
    assert "`models/large@main`" in missing_folder("models/large")
    assert "@main" not in missing_folder("runs/large")


def test_only_what_fits_is_near(here: Path) -> None:
    assert near_path("runs/demo-empt") == "runs/demo-empty"
    assert near_path("runs/demo-empt", ["config.toml"]) == "runs/demo"
    assert near_path("rnus/dmo") == "" and near_path("rnus/demo") == "runs/demo"
    assert near_path("entirely/else") == "" and near_path("a" * 5000) == ""
    (here / "runs").chmod(0)
    assert near_path("runs/dmo") in ("", "runs/demo"), "root may read every folder"
    (here / "runs").chmod(0o755)
