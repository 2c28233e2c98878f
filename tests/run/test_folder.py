"""A run folder has one owner, is replaced only when it is a run's, and is resumed only by settings that fit it."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from llamarl.checkpoint.folder import MANIFEST
from llamarl.config import ConfigError, RunConfig
from llamarl.observability.metrics import EvalMetrics
from llamarl.observability.sinks import RowLog
from llamarl.run.folder import FolderLost, RunFolder, prepare_run_folder

KINDS: tuple[Literal["all", "resume"], ...] = ("all", "resume")
STEP = '{"kind": "step", "step": 1}\n'


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "one",
            "output": str(tmp_path),
            "steps": 10,
            "model": {"path": "nowhere"},
            "data": {"train": {"name": "running_total", "count": 4}},
        }
    )


def ended(config: RunConfig) -> RunFolder:
    """What a run has left that saved step 8."""
    with prepare_run_folder(config, resume=False, overwrite=False) as folder:
        folder.metrics.write_text(STEP)
        (folder.checkpoints / "step-00000008").mkdir()
        (folder.checkpoints / "step-00000008" / MANIFEST).touch()
    return folder


@pytest.mark.parametrize("way", ["resume", "overwrite"])
def test_a_run_that_is_under_way_is_left_alone(config: RunConfig, way: str) -> None:
    asked = {"resume": way == "resume", "overwrite": way == "overwrite"}
    with prepare_run_folder(config, resume=False, overwrite=False) as folder:
        folder.metrics.write_text(STEP)
        with pytest.raises(ConfigError, match=rf"running run \(pid {os.getpid()}\)"):
            prepare_run_folder(config, **asked)
        assert folder.metrics.read_text() == STEP
        folder.check()
    with prepare_run_folder(config, **asked) as folder:
        assert folder.metrics.exists() == (way == "resume")
        with pytest.raises(ConfigError, match="running run"):
            prepare_run_folder(config, **asked)


def test_the_lock_ends_with_its_process(config: RunConfig) -> None:
    pid = os.fork()
    if not pid:
        folder = prepare_run_folder(config, resume=False, overwrite=False)
        os._exit(folder.path.exists() - 1)
    assert os.waitpid(pid, 0)[1] == 0
    prepare_run_folder(config, resume=True, overwrite=False).__exit__()


@pytest.mark.parametrize("change", [shutil.rmtree, lambda path: path.rename(path.with_name("other"))])
def test_a_folder_that_goes_is_noticed(config: RunConfig, change: Callable[[Path], object]) -> None:
    with prepare_run_folder(config, resume=False, overwrite=False) as folder:
        change(folder.path)
        with pytest.raises(FolderLost, match="one was deleted or replaced during the run"):
            folder.check()
        prepare_run_folder(config, resume=False, overwrite=False).__exit__()
        with pytest.raises(FolderLost):
            folder.check()


@pytest.mark.parametrize("name", ["thesis.tex", ".git", "results"])
def test_overwrite_deletes_what_commands_have_written(config: RunConfig, name: str) -> None:
    folder = ended(config)
    for known in (
        "profile.json",
        ".summary.json.partial",
        ".seen-1234",
        "rollouts-00012.jsonl.gz",
        "metrics-00001.jsonl",
    ):
        (folder.path / known).touch()
    prepare_run_folder(config, resume=False, overwrite=True).__exit__()
    assert not folder.saved_steps() and not [*folder.path.glob("profile.json"), *folder.path.glob("*-0*")]
    (folder.path / name).touch()
    with pytest.raises(ConfigError, match=rf"also holds '{name}'.*--name"):
        prepare_run_folder(config, resume=False, overwrite=True)
    assert folder.config.exists()


def test_overwrite_of_a_link_replaces_what_it_leads_to(config: RunConfig, tmp_path: Path) -> None:
    folder = ended(config)
    folder.path.rename(tmp_path / "elsewhere")
    folder.path.symlink_to(tmp_path / "elsewhere")
    with prepare_run_folder(config, resume=False, overwrite=True):
        assert folder.path.is_symlink() and not folder.saved_steps()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 7}, "the run has done 8 steps and steps = 7; give --steps 8 or more"),
        ({"seed": 1}, "seed was 0 when the run began and is 1 now"),
        ({"trainer": {"advantage": "gae"}}, "trainer.advantage was 'group_mean' when the run began and is 'gae' now"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoints(config: RunConfig, changes: dict[str, object], said: str) -> None:
    folder = ended(config)
    before = folder.config.read_text()
    other = RunConfig.model_validate(config.model_dump() | changes)
    with pytest.raises(ConfigError, match=said) as refused:
        prepare_run_folder(other, resume=True, overwrite=False)
    assert "overwrite" not in str(refused.value)
    assert folder.config.read_text() == before and folder.metrics.read_text() == STEP


@pytest.mark.parametrize("change", ["value", "size", "missing", "more", "reference"])
def test_another_model_under_the_same_name(config: RunConfig, tmp_path: Path, change: str) -> None:
    """Of three files of 9 MiB in each model, and what is trained anew differs everywhere."""
    folders = {name: tmp_path / name for name in ("model", "reference")}
    for name, folder in folders.items():
        folder.mkdir()
        for number in range(3):
            (folder / f"model-{number}.safetensors").write_bytes(name.encode() * (1 << 20))
    config = RunConfig.model_validate(
        config.model_dump()
        | {
            "model": {"path": str(folders["model"])},
            "reference": {"kl_coefficient": 0.1, "path": str(folders["reference"])},
        }
    )
    ended(config)
    for _ in range(2):
        prepare_run_folder(config, resume=True, overwrite=False).__exit__()
    file = folders["reference" if change == "reference" else "model"] / "model-1.safetensors"
    whole = file.read_bytes()
    if change == "missing":
        file.unlink()
    elif change == "more":
        file = shutil.copy(file, file.with_name("model-3.safetensors"))
    else:
        file.write_bytes(whole + b"x" if change == "size" else whole.upper())
    with pytest.raises(ConfigError, match=rf"--resume: {file} is not what it was when the run began, "):
        prepare_run_folder(config, resume=True, overwrite=False)
    prepare_run_folder(config, resume=False, overwrite=True).__exit__()
    prepare_run_folder(config, resume=True, overwrite=False).__exit__()


@pytest.mark.parametrize("is_there", [False, True])
def test_checkpoints_that_are_elsewhere_are_no_fresh_start(config: RunConfig, is_there: bool) -> None:
    """A folder that is not mounted; a run that was ended before its first checkpoint does start again."""
    folder = ended(config)
    shutil.rmtree(folder.checkpoints / "step-00000008")
    prepare_run_folder(config, resume=True, overwrite=False).__exit__()
    folder.checkpoints.rename(folder.path.parent / "unmounted")
    if is_there:
        folder.checkpoints.mkdir()
    with pytest.raises(ConfigError, match=r"has rows of steps, but the run's checkpoints are not in .*; mount that"):
        prepare_run_folder(config, resume=True, overwrite=False)
    assert folder.metrics.read_text() == STEP


def test_folders_of_other_names_among_the_checkpoints_are_ignored(config: RunConfig) -> None:
    """And a broken copy, of which the manifest would have come last."""
    folder = ended(config)
    for name in ("step-old", "step-1e9", "steps", "step-99999999"):
        (folder.checkpoints / name).mkdir()
    assert folder.way_on() == "--resume continues from step 8" and folder.saved_steps() == [8]
    prepare_run_folder(config, resume=True, overwrite=False).__exit__()


@pytest.mark.parametrize("left", ["nothing", "lock", "all", "output", "generated"])
def test_a_start_that_came_to_nothing_leaves_no_run(config: RunConfig, left: str) -> None:
    """Refused, or ended before its first step: the next one needs no `--overwrite`, and finds nothing of it."""
    path = Path(config.output, config.name)
    if left == "nothing":
        path.mkdir()
    else:
        with prepare_run_folder(config, resume=False, overwrite=False) as folder:
            assert folder.way_on() == "no step was completed yet, so --resume starts from the beginning"
        if left == "lock":
            for made in (folder.logs, folder.checkpoints):
                shutil.rmtree(made)
            folder.config.unlink()
            folder.weights.unlink()
        elif left != "all":
            (folder.logs / "trainer.log").write_text("it raised")
            folder.metrics.write_text('{"kind": "eval", "step": 0}\n')
        if left == "generated":
            folder.journal.touch()
            (path / "journal").mkdir()
            (path / "journal/00000001.groups").write_bytes(b"some rollouts")
    with prepare_run_folder(config.model_copy(update={"steps": 3}), resume=False, overwrite=False) as again:
        assert "steps = 3" in again.config.read_text() and not again.metrics.exists()
        assert {one.name for one in path.iterdir()} == {".lock", "config.toml", "weights.json", "logs", "checkpoints"}


@pytest.mark.parametrize(
    "what",
    [
        "step",
        "checkpoint",
        "broken checkpoint",
        "journal",
        "own file",
        "own config",
        "generated",
        "export",
        "elsewhere",
    ],
)
def test_what_came_to_something_is_not_touched(config: RunConfig, what: str) -> None:
    with prepare_run_folder(config, resume=False, overwrite=False) as folder:
        step = folder.checkpoints / "step-00000000"
        if what == "step":
            folder.metrics.write_text(STEP)
        elif what == "journal":
            folder.journal.write_text('{"step": 1, "groups": [3], "state": {}}\n')
        elif "checkpoint" in what:
            step.mkdir()
            (step / ("shard" if "broken" in what else MANIFEST)).touch()
        elif what == "generated":  # for the first step, which may take hours
            (folder.path / "journal").mkdir()
            (folder.path / "journal/00000001.groups").write_bytes(bytes(20_000))
        elif what == "export":
            (folder.path / "export").mkdir()
        elif what == "elsewhere":  # another host is in its first step, and this file system has no locks
            (folder.path / ".lock").write_text("17\nanother-host\n")
        elif what == "own file":
            (folder.path / "notes.txt").touch()
    if what == "own config":  # of a user who keeps it where the run would be
        (folder.path / ".lock").unlink()
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(ConfigError, match=r"exists; resume it \(--resume\), replace it"):
        prepare_run_folder(config, resume=False, overwrite=False)
    assert sorted(folder.path.rglob("*")) == before


def test_a_run_that_another_ended_meanwhile_is_not_taken(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the folder and its lock."""
    lock = RunFolder.lock

    def late(self: RunFolder) -> None:
        lock(self)
        self.metrics.write_text(STEP)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "lock", late)
        with pytest.raises(ConfigError, match="exists; resume it"):
            prepare_run_folder(config, resume=False, overwrite=False)
    with RunFolder(Path(config.output, config.name)) as folder:
        folder.lock()  # nobody else holds it


def test_rollouts_that_were_kept_are_not_deleted_by_a_resume(config: RunConfig) -> None:
    """What a run keeps for resuming alone was never promised to stay; the other way round it may change."""
    of = {kind: config.model_copy(update={"record": config.record.model_copy(update={"kind": kind})}) for kind in KINDS}
    for before, now in (("all", "resume"), ("resume", "all"), ("resume", "resume"), ("all", "all")):
        folder = ended(of[before])
        folder.journals.mkdir()
        if (before, now) == ("all", "resume"):
            with pytest.raises(ConfigError, match="'resume' would delete the rollouts of this run; leave it 'all'"):
                prepare_run_folder(of[now], resume=True, overwrite=False)
        else:
            prepare_run_folder(of[now], resume=True, overwrite=False).__exit__()
        shutil.rmtree(folder.path)


def read_bytes() -> int:
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_resume_reads_no_more_of_an_older_run(config: RunConfig) -> None:
    """Of metrics, and of rollouts beside the journal: what came since the checkpoint, and a block before it."""
    taken = []
    for num_steps in (200, 800):
        folder = ended(config)
        shutil.move(folder.checkpoints / "step-00000008", folder.checkpoints / f"step-{num_steps - 10:08}")
        for path in (folder.metrics, folder.rollouts):
            row = '{{"kind": "step", "step": {}, "text": "' + "x" * 1500 + '"}}\n'
            path.write_text("".join(row.format(step) for step in range(1, num_steps + 1)))
        start = read_bytes()
        log = RowLog(folder.metrics, pytest.fail)
        log.drop_after(num_steps - 5)
        log.close()
        folder.drop_rollouts_after(num_steps - 5)
        assert folder.unrecorded(num_steps - 5, 2) == "" and folder.recorded_steps() == num_steps - 5
        taken.append(read_bytes() - start)
        assert all(len(path.read_text().splitlines()) == num_steps - 5 for path in (folder.metrics, folder.rollouts))
        shutil.rmtree(folder.path)
    assert taken[0] == pytest.approx(taken[1], abs=20_000) and taken[1] < 400_000 < 1500 * 800


def test_steps_without_rows_are_named(config: RunConfig) -> None:
    folder = ended(config)
    rows = [f'{{"kind": "step", "step": {step}}}\n' for step in (1, 2, 3, 6, 9)]
    folder.metrics.with_name("metrics-00001.jsonl").write_text("".join(rows[:3]))
    folder.metrics.write_text("".join(rows[3:]) + '{"kind": "eval", "step": 5}\n{"kind": "step", "step": 8')
    assert folder.unrecorded(3, 1) == ""
    assert folder.unrecorded(8, 1) == f"{folder.metrics} has no rows of steps 7-8", "since the checkpoint"
    shutil.rmtree(folder.checkpoints / "step-00000008")
    assert folder.unrecorded(8, 1) == f"{folder.metrics} has no rows of steps 4-5,7-8"
    compressed = gzip.compress(folder.metrics.with_name("metrics-00001.jsonl").read_bytes())
    folder.metrics.with_name("metrics-00001.jsonl.gz").write_bytes(compressed[:-6])
    folder.metrics.with_name("metrics-00001.jsonl").unlink()
    assert folder.unrecorded(3, 1) == "", "it is read as far as it goes"
    folder.metrics.with_name("metrics-00001.jsonl.gz").unlink()
    folder.metrics.unlink()
    assert folder.unrecorded(8, 1) == f"{folder.metrics} has no rows of steps 1-8"


def test_the_first_evaluation_on_record(config: RunConfig) -> None:
    """Of whichever life, in whichever piece; one of other fields, or a damaged one, is none."""
    with prepare_run_folder(config, resume=False, overwrite=False) as folder:
        assert folder.first_evals([None]) == {}
        entry = EvalMetrics(
            step=0, policy_version_min=0, policy_version_max=0, accuracy=math.nan, pass_at_k=0.5, k=2,
            mean_response_tokens=3.0, num_prompts=4, wall_s=1.0, num_invalid=8, invalid_reason="why",
        )  # fmt: skip
        named = replace(entry, name="sums", pass_at={"1": 0.5, "2": 0.75}, accuracy=0.5, truncated_share=0.25)
        entries = entry, named, replace(entry, step=9, accuracy=0.5), replace(named, step=9)
        rows = [json.dumps(one.to_json()) + "\n" for one in entries]
        folder.metrics.with_name("metrics-00001.jsonl").write_text(STEP + rows[0])
        folder.metrics.write_text("".join(rows[1:]))
        found = folder.first_evals([None, "sums", "other"])
        assert found.keys() == {None, "sums"} and math.isnan(found[None].accuracy)
        assert replace(found[None], accuracy=0.5) == replace(entry, accuracy=0.5)
        assert found["sums"] == named
        folder.metrics.with_name("metrics-00001.jsonl").write_text('{"kind": "eval", "step": 0}\n')
        assert folder.first_evals([None, "sums"]) == {"sums": named}, "a later one was not before training"


def test_a_damaged_piece_of_the_metrics_is_a_warning_of_resume(config: RunConfig) -> None:
    folder = ended(config)
    rows = "".join(f'{{"kind": "step", "step": {step}}}\n' for step in range(1, 9)).encode()
    compressed = bytearray(gzip.compress(rows))
    compressed[-8] ^= 1  # of the checksum
    folder.metrics.with_name("metrics-00001.jsonl.gz").write_bytes(compressed)
    folder.metrics.write_text('{"kind": "step", "step": 9}\n')
    assert folder.unrecorded(9, 1) == "", "what stands before the fault is read"
    folder.metrics.with_name("metrics-00001.jsonl.gz").write_bytes(b"no gzip at all")
    assert folder.unrecorded(9, 1) == f"{folder.metrics} has no rows of steps 1-8"


@pytest.mark.parametrize("name", [".metrics-00001.jsonl.gz.partial", ".rollouts-00001.jsonl.kept"])
def test_what_a_killed_command_was_writing_is_of_the_run(config: RunConfig, name: str) -> None:
    folder = ended(config)
    folder.path.joinpath(name).touch()
    prepare_run_folder(config, resume=False, overwrite=True).__exit__()


def test_a_deletion_that_is_cut_short_leaves_the_config(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which the next one knows whose folder it is."""
    folder, gone = ended(config), list[Path]()
    unlink = Path.unlink

    def cut(path: Path, **options: bool) -> None:
        gone.append(path)
        assert path != folder.config or {one.name for one in folder.path.iterdir()} == {".lock", "config.toml"}
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", cut)
    prepare_run_folder(config, resume=False, overwrite=True).__exit__()
    assert folder.config in gone
