"""Opening a stranger's run folder executes nothing that it names, and writes nowhere else."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import llamarl
from tests.end_to_end.tiny import ROOT, SOMETIME_S, environment, make_model, write_toml
from tests.nightly import nightly
from tests.run.opened import CHANGES

Settings = dict[str, Any]
Vector = Callable[[Settings, Path], None]


class Evil:
    """A pickle of it writes a file as it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, ("touch victim/pickled",)


def _recipe(settings: Settings, run: Path) -> None:
    settings["recipe"] = "evil:recipe"


def _reward(settings: Settings, run: Path) -> None:
    settings["reward"] = {"parts": [{"name": "evil:Reward"}]}


def _source(settings: Settings, run: Path) -> None:
    settings["data"]["train"] = {"name": "evil:Source", "path": "owner/name"}


def _loss(settings: Settings, run: Path) -> None:
    settings["trainer"]["loss"] = {"name": "evil:Loss"}
    settings["trainer"]["advantage"] = {"name": "evil:Advantage"}


def _tool(settings: Settings, run: Path) -> None:
    settings["rollout"]["environment"] = {"name": "tools", "functions": ["evil:tool"]}


def _agent(settings: Settings, run: Path) -> None:
    settings["rollout"]["agent"] = {"name": "evil:run"}


def _sink(settings: Settings, run: Path) -> None:
    settings["metrics"]["sinks"] = ["evil"]


def _warm_start(settings: Settings, run: Path) -> None:
    settings["model"] = {"path": "made/by/evil", "warm_start": "evil_sft.toml"}


def _vllm(settings: Settings, run: Path) -> None:
    settings["cluster"]["kind"] = "monarch"
    settings["generator"] |= {"backend": "vllm", "vllm": {"python": str(Path("evil_python").absolute())}}


def _pickle(settings: Settings, run: Path) -> None:
    Path("runs/.given").mkdir(exist_ok=True)
    Path("runs/.given/evil.pickle").write_bytes(pickle.dumps(Evil()))
    settings["reward"] = {"parts": [{"name": "function", "file": "runs/.given/evil.pickle"}]}


def _links(_: Settings, run: Path) -> None:
    for name in ("report.html", "rollouts.jsonl", ".export.lock"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(Path("victim/precious").absolute())


VECTORS = (_recipe, _reward, _source, _loss, _tool, _agent, _sink, _warm_start, _vllm, _pickle, _links)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What opening did, by vector: one process has opened a folder with each of them, and one with none."""
    work = tmp_path_factory.mktemp("stranger")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        toml = write_toml(work, make_model(work / "model"))
        llamarl.train(toml, cluster={"kind": "inline"}, steps=1)
        Path("evil.py").write_text("import os\nos.system('touch victim/imported')\n")
        Path("evil_sft.toml").write_text('source = {name = "evil:Source"}\n')
        Path("evil_python").write_text("#!/bin/sh\ntouch victim/started\n")
        Path("evil_python").chmod(0o755)
        Path("victim").mkdir()
        Path("victim/precious").write_text("precious")
        settings = Path("runs/tiny/config.toml").read_text()
        for vector in VECTORS:
            shutil.copytree("runs/tiny", run := Path("runs", vector.__name__))
            vector(changed := tomllib.loads(settings), run)
            (run / "config.toml").write_text(tomli_w.dumps(changed))
        runs = [f"runs/{vector.__name__}" for vector in VECTORS]
        command = [sys.executable, "-m", "tests.run.opened", str(work / "evil_python"), "runs/tiny", *runs]
        own = environment() | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=own, timeout=SOMETIME_S)
        assert done.returncode == 0, done.stderr[-3000:]
        assert [one.name for one in Path("victim").iterdir()] == ["precious"], done.stderr
        assert Path("victim/precious").read_text() == "precious"
    return {"work": str(work)} | json.loads(done.stdout.splitlines()[-1])


@nightly("a command for each way to read; test_trust.py opens a stranger's folder by day")
@pytest.mark.parametrize("vector", VECTORS)
def test_nothing_runs_that_a_folder_names(found: dict[str, Any], vector: Vector) -> None:
    run = f"runs/{vector.__name__}"
    seen = found[run]["seen"]
    assert not [one for one in seen if one[0] not in ("write", *CHANGES)]
    own = f"{found['work']}/{run}"
    assert not [one for _, one in seen if not f"{one}/".startswith(f"{own}/") and os.path.basename(one) != "null"]
    others = {"_sink": {"explain"}, "_warm_start": {"export"}, "_links": {"export"}}
    refused = {name for name, code in found[run]["codes"].items() if code}
    assert refused == others.get(vector.__name__, set()), "what cannot be done is refused, and all else is shown"


@nightly("a run that is read in each way; by day test_trust.py opens a stranger's folder")
def test_a_folder_without_any_is_opened_as_well(found: dict[str, Any]) -> None:
    assert set(found["runs/tiny"]["codes"].values()) == {0}
