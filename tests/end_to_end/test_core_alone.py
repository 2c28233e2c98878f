"""Without `llamarl/parts/` the core trains, evaluates, saves and resumes; what a part would do says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.tiny import ROOT, environment, make_model, rows
from tests.nightly import nightly

HIDES = """
import os, sys

class Hides:
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(os.environ.get("HIDDEN", "llamarl.parts") + "."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hides())
"""
INLINE = ("--cluster.kind", "inline", "--checkpoint.every_steps", 2)


COMMANDS = """
import json, os, sys, traceback
import llamarl.executors.generator, llamarl.executors.trainer, llamarl.run.train
from llamarl.cli.main import script
for line in sys.stdin:
    given = json.loads(line)
    if not (pid := os.fork()):
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(given[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ["HIDDEN"] = given["hidden"]
        sys.argv[:], sys.stdin = ["llamarl", *given["arguments"]], open(os.devnull)
        script()
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
"""Runs commands one after another, each in a process of its own that has torch already."""


class Alone:
    """Commands in processes that find no part, or all but one."""

    def __init__(self, folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(HIDES)
        self._folder = folder
        hidden = environment() | {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMANDS],
            cwd=ROOT,
            env=hidden,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: object, hidden: str = "llamarl.parts") -> subprocess.CompletedProcess[str]:
        given = [*map(str, arguments)]
        out, err = self._folder / "out.txt", self._folder / "err.txt"
        assert self.process.stdin and self.process.stdout
        asked = {"arguments": given, "out": str(out), "err": str(err), "hidden": hidden}
        print(json.dumps(asked), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        return subprocess.CompletedProcess(given, code, out.read_text(), err.read_text())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    made = Alone(tmp_path_factory.mktemp("hidden"))
    yield made
    made.process.communicate(timeout=240)  # there is no more to do, so it ends


@nightly("three commands; test_resume.py saves and resumes by day, import-linter finds what the core imports of a part")
def test_the_core_trains_evaluates_saves_and_resumes(tmp_path: Path, toml: Path, run: Alone) -> None:
    done = run("train", toml, "--output", tmp_path / "runs", *INLINE, "--screen.kind", "auto")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "tiny"
    assert (folder / "checkpoints" / "step-00000004").is_dir()
    done = run("train", toml, "--output", tmp_path / "runs", *INLINE, "--steps", 6, "--resume")
    assert done.returncode == 0, done.stderr
    steps = [row["step"] for row in rows(folder / "metrics.jsonl") if row["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert {row["step"] for row in rows(folder / "metrics.jsonl") if row["kind"] == "eval"} >= {0, 6}
    done = run("export", folder, tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    assert "accuracy" in run("train", toml, "--output", tmp_path / "runs", *INLINE, "--overwrite").stdout


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
        ("cuda", ("--cluster.kind", "monarch", "--weight_sync.transport", "nixl")),
        ("sft", ("--model.path", "no/model", "--model.warm_start", f"{ROOT}/configs/demo_sft.toml")),
        ("copies", ("--checkpoint.copy_to", "/")),
        ("copies", ("--cluster.kind", "monarch", "--checkpoint.mirror", "true")),
        ("hub", ("--model.path", "no/model")),
        ("hub", ("--data.train.name", "hub")),
        ("episodes", ("--reward.parts", "['code']")),
    ],
)
def test_what_a_part_does_is_refused_in_a_sentence(
    tmp_path: Path, toml: Path, run: Alone, part: str, arguments: tuple[str, ...]
) -> None:
    own = () if "--cluster.kind" in arguments else INLINE
    done = run("train", toml, "--output", tmp_path / "runs", *own, *arguments)
    assert done.returncode == 2, done.stderr
    assert f"lacks the part `{part}`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_on_processors_misses_nothing_of_a_gpus_part(tmp_path: Path, toml: Path, run: Alone) -> None:
    arguments = ("train", toml, "--output", tmp_path / "runs", *INLINE, "--steps", 2)
    done = run(*arguments, hidden="llamarl.parts.cuda")
    assert done.returncode == 0, done.stderr
    steps = [row["step"] for row in rows(tmp_path / "runs" / "tiny" / "metrics.jsonl") if row["kind"] == "step"]
    assert steps == [1, 2]


def test_without_the_part_of_the_hub_names_of_it_are_refused_and_folders_are_read(
    tmp_path: Path, toml: Path, run: Alone
) -> None:
    hidden, own = "llamarl.parts.hub", ("train", toml, "--output", tmp_path / "runs", *INLINE, "--steps", 1)
    done = run(*own, "--model.path", "no/model", hidden=hidden)
    lacks = "this installation lacks the part `hub`; install all of llamarl"
    assert (done.returncode, done.stderr) == (2, f"llamarl train: model.path = 'no/model': {lacks}\n")
    done = run(*own, "--data.train.name", "hub", hidden=hidden)
    assert done.returncode == 2
    assert f"`data.train = 'hub'`: {lacks}" in done.stderr
    done = run(*own, hidden=hidden)
    assert done.returncode == 0, done.stderr
    done = run("export", tmp_path / "runs" / "tiny", "--push", "me/tiny", hidden=hidden)
    assert (done.returncode, done.stderr) == (
        2,
        f"llamarl export: --push me/tiny: {lacks} (it is written to {tmp_path / 'runs' / 'tiny' / 'export'})\n",
    )


def test_without_the_part_of_the_hub_models_that_are_built_in_are_planned_by_their_names(run: Alone) -> None:
    hidden = "llamarl.parts.hub"
    done = run("plan", "--model", "Qwen/Qwen3-8B", "--gpus", 8, hidden=hidden)
    assert done.returncode == 0, done.stderr
    assert "Qwen/Qwen3-8B: 8.19B parameters" in done.stdout
    done = run("plan", "--model", "no/model", "--gpus", 8, hidden=hidden)
    assert done.returncode == 2 and "lacks the part `hub`" in done.stderr


def test_commands_of_parts_say_so_and_a_dry_run_prints_the_settings(toml: Path, run: Alone) -> None:
    for command, part in (("plan", "forecast"), ("eval", "answers"), ("generate", "answers")):
        done = run(command, "no/model")
        lacks = f"this installation lacks the part `{part}`; install all of llamarl"
        assert (done.returncode, done.stderr) == (2, f"llamarl {command}: {lacks}\n")
    done = run("train", toml, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert re.match(r"forecast:\n  unknown: .*lacks the part `forecast`.*\nfirst prompt:\n", done.stdout)
    assert "tiny: 4 steps" in done.stdout
    assert run("--help").returncode == 0


def test_whoever_asks_a_model_by_another_way_is_told_too(tmp_path: Path, run: Alone) -> None:
    done = run("serve", make_model(tmp_path / "model"), hidden="llamarl.parts.answers")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("llamarl serve: this installation lacks the part `answers`")


@nightly("a command for each part; import-linter finds by day what the core imports of a part")
@pytest.mark.parametrize("part", sorted(path.parent.name for path in (ROOT / "llamarl" / "parts").glob("*/joint.py")))
def test_each_part_can_be_left_out(toml: Path, run: Alone, part: str) -> None:
    """The core and the other parts do without it: commands of others are there, its own say what is missing."""
    hidden = f"llamarl.parts.{part}"
    done = run("train", toml, "--dry-run", *INLINE, hidden=hidden)
    assert done.returncode == 0, done.stderr
    assert ("lacks the part `forecast`" in done.stdout) == (part == "forecast")
    assert "tiny: 4 steps" in done.stdout
    commands = {path.stem: path.parts[-3] for path in (ROOT / "llamarl" / "parts").glob("*/cli/[a-z]*.py")}
    assert len(commands) > 8
    for command, owner in commands.items():
        done = run(command, "--help", hidden=hidden)
        assert (done.returncode == 0) == (owner != part), f"{command}: {done.stderr}"
        assert (f"lacks the part `{part}`" in done.stderr) == (owner == part), done.stderr
