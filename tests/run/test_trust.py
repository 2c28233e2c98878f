"""What a run's folder names is executed by `replay` and `--resume` only where nobody else can have written it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

import llamarl
from llamarl.config import ConfigError, load_config, load_recorded, open_own
from llamarl.observability.sinks import RowLog
from llamarl.run import python_inputs
from llamarl.run.python_inputs import reward_settings
from llamarl.run.trust import check_trust, code_of, digests_of, recorded_digests, with_trusted
from tests.end_to_end.tiny import llamarl_here, make_model, write_toml
from tests.nightly import nightly

INLINE: dict[str, Any] = {"cluster": {"kind": "inline"}, "steps": 1}


def reward_by_length(response: str) -> float:
    return len(response) % 2


reward_by_length.__module__ = "__main__"  # as in a script: no other process can import it


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def give_away(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Makes another user the owner of a file."""
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        patch.setattr(os, "getuid", lambda: 12345)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run."""
    made = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        toml = write_toml(made, make_model(made / "model"))
        llamarl.train(toml, reward=reward_by_length, **INLINE)
    return made


@pytest.fixture
def run(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> llamarl.api.RunRecord:
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return llamarl.open_run("runs/tiny")


def test_what_is_executed_is_named() -> None:
    config = load_config({
        "model": {"path": "m"}, "data": {"train": {"name": "a.b:Source"}, "template": "a:b"},
        "trainer": {"loss": "own:Loss"}, "rollout": {"tools": ["own:tool"]},
        "reward": {"parts": ["exact", "own:reward", {"name": "function", "file": "f.pickle", "digest": "1"}]},
    })  # fmt: skip
    found = "; ".join(code_of(config))
    for said in ("a.b:Source", "own:Loss", "own:tool", "own:reward", "reward.parts.2.file = 'f.pickle'"):
        assert said in found
    assert "template" not in found and "exact" not in found
    assert digests_of(config) == {"f.pickle": "1"}
    vllm = {"backend": "vllm", "vllm": {"python": "/x/python"}}
    config = load_config({"model": {"path": "m"}, "data": {"train": "jsonl"}, "generator": vllm})
    assert code_of(config) == ["generator.vllm.python = '/x/python'"]


@nightly("a run of its own; by day what would be executed is named, and what is there is taken")
def test_a_function_is_loaded_as_it_was_written(run: llamarl.api.RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    (part,) = run.config.reward.parts
    file = Path(part.options["file"])
    assert recorded_digests(run.path) == digests_of(run.config) == {str(file): part.options["digest"]}
    assert file.parent.stat().st_mode & 0o077 == 0
    written = file.read_bytes()
    config = "runs/tiny/config.toml"
    resume = ("train", config, "--resume", "--steps=2")
    file.write_bytes(pickle.dumps((Evil(), {})))
    for command in (resume, ("replay", "runs/tiny", "--only", "reward")):
        done = llamarl_here(*command)
        assert done.returncode == 2 and str(file) in done.stderr and "--trust" in done.stderr
    assert not Path("executed").exists()
    llamarl.train("tiny.toml", reward=reward_by_length, resume=True, **INLINE | {"steps": 2})
    assert file.read_bytes() == written, "it is always written"
    give_away(file, monkeypatch)
    done = llamarl_here("replay", "runs/tiny", "--only", "reward")
    assert done.returncode == 2 and str(file) in done.stderr
    assert llamarl_here("replay", "runs/tiny", "--only", "reward", "--trust").returncode == 0


def test_trust_takes_what_is_there(run: llamarl.api.RunRecord) -> None:
    file = Path(run.config.reward.parts[0].options["file"])
    changed = python_inputs.pickled(lambda response: 5.0)
    file.write_bytes(changed)
    done = llamarl_here("train", "runs/tiny/config.toml", "--resume", "--trust", "--steps=2")
    assert done.returncode == 0, done.stderr
    again = load_recorded("runs/tiny/config.toml")
    assert run.metrics()[-1]["reward_mean"] == 5.0
    assert [Path(one).read_bytes() for one in digests_of(again)] == [changed]
    assert with_trusted(again).reward.parts[0].options["content"]
    assert llamarl_here("train", "tiny.toml", "--trust", "--name=other").returncode == 2


def test_other_owners(run: llamarl.api.RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run.config.model_copy(update={"reward": load_config("tiny.toml").reward})
    for name in ("journal", "config.toml"):
        give_away(run.path / name, monkeypatch)
        check_trust(run.path, plain, command="--resume", is_trusted=False)
        with pytest.raises(ConfigError, match=r"12345|user 0.*--trust"):
            check_trust(run.path, run.config, command="--resume", is_trusted=False)
    assert llamarl_here("report", "runs/tiny").returncode == 0
    done = llamarl_here("train", "runs/tiny/config.toml", "--resume", "--steps=2")
    assert done.returncode == 2 and "--trust" in done.stderr
    give_away(Path("runs/.given"), monkeypatch)
    with pytest.raises(ConfigError, match=r"runs/\.given"):
        reward_settings(reward_by_length, Path("runs"))


@nightly("a run of its own; by day what would be executed is named, and what is there is taken")
def test_an_evaluation_of_a_run(run: llamarl.api.RunRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reward is executed, so it asks for trust as a replay does."""
    path = run.path / "config.toml"
    rows = [{"question": "1 + 1 = ?", "answer": "2"}]
    asked: Any = {"data": rows, "rollout": {"max_new_tokens": 2}}
    assert llamarl.evaluate(run.path, **asked).metrics.num_prompts == 1
    give_away(path, monkeypatch)
    with pytest.raises(ConfigError, match="trust=True"):
        llamarl.evaluate(run.path, **asked)
    assert llamarl.evaluate(run.path, reward="exact", **asked).metrics.num_prompts == 1, "nothing of it is executed"
    give_away(Path(run.config.reward.parts[0].options["file"]), monkeypatch)
    assert llamarl.evaluate(run.path, trust=True, **asked).metrics.num_prompts == 1
    Path("rows.jsonl").write_text(json.dumps(rows[0]))
    words = ("eval", run.path, "rows.jsonl", "--rollout.max_new_tokens=2")
    done = llamarl_here(*words)
    assert done.returncode == 2 and "--trust" in done.stderr, done.stderr
    assert llamarl_here(*words, "--trust").returncode == 0


@nightly("a run of its own; by day links are refused in checkpoint and run/test_folder.py")
def test_nothing_is_written_through_links(run: llamarl.api.RunRecord) -> None:
    (victim := Path("victim")).write_text("precious\n")
    for name in ("metrics.jsonl", "journal.jsonl", "output.log", ".lock", "logs/trainer.log"):
        shutil.copytree(run.path, folder := run.path.with_name("linked"))
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim.absolute())
        for trust in ((), ("--trust",)):
            done = llamarl_here("train", "tiny.toml", "--resume", "--name=linked", "--cluster.kind=inline", *trust)
            assert trust or (done.returncode == 2 and name in done.stderr), done.stderr
            assert victim.read_text() == "precious\n"
        shutil.rmtree(folder)


def test_files_of_a_folder_are_opened_as_files(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "pipe"):
        for mode in ("ab", "wb", "a+b", "r+b", "a+"):
            with pytest.raises(OSError, match=r"link|not a regular file|No such device"):
                open_own(tmp_path / name, mode)
        with pytest.raises(OSError, match=r"link|not a regular file|No such device"):
            RowLog(tmp_path / name, lambda failure: None)
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "new").exists()
