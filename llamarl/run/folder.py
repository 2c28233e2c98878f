"""The folder of one run and the files in it."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import json
import os
import re
import shutil
import socket
import sys
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from llamarl.checkpoint.copies import CopyFailed, RemoteCopies
from llamarl.checkpoint.folder import saved_steps
from llamarl.config import ConfigError, RunConfig, dump_toml, load_recorded, open_own
from llamarl.observability.files import PIECE_NAME, last_lines, lines, pieces, read_run_rows, write_atomically
from llamarl.observability.metrics import EvalMetrics
from llamarl.observability.sinks import RowLog
from llamarl.run.names import WEIGHTS_FILE, record_of, recorded
from llamarl.run.placement import models_in_use, ranges

_EMPTY_BYTES = 1 << 14
"""A file of the journal so large holds more than its beginning and what is generated within a second."""
LOOK_S = 2.0
"""Between two looks at whether the run's folder is still there."""
_LOCK, _MARK = ".lock", ".of-this-run"
_OF_A_RUN = frozenset((
    "config.toml", "weights.json", "metrics.jsonl", "rollouts.jsonl", "events.jsonl", "journal.jsonl", "journal",
    "summary.json", "report.html", "trace.json", "output.log", "logs", "checkpoints", "kernels", "weights", "export",
    "merged", "profile.json", "flame.svg", "costs.json", "forecast.json", "tensorboard", "wandb",
))  # fmt: skip
"""Names that commands write into a run's folder. Hidden ones are theirs too while they write."""


class FolderLost(RuntimeError):
    """The folder of a run has gone while the run was under way."""


class FolderTaken(ConfigError):
    """The folder of a run that is to start is that of a run that has begun, or of one that is under way."""


class RunFolder:
    """`<output>/<name>`: config, metrics, rollouts, logs, checkpoints, summary. As a context manager it holds the lock
    by which only one process writes there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        """Rows of rollouts: of runs of before, and where somebody has exported them."""
        self.events = path / "events.jsonl"
        self.journal, self.journals = path / "journal.jsonl", path / "journal"
        self.weights = path / WEIGHTS_FILE
        self.settings: RunConfig | None = None
        """Settings as the user wrote them, without commits for names of the Hub; None: the folder is only read."""
        self.summary = path / "summary.json"
        self.trace = path / "trace.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.kernels = path / "kernels"
        """Which code multiplies weights here, as it was measured."""
        self._lock: IO[str] | None = None

    @property
    def files(self) -> dict[Path, str]:
        """Files that a run writes, and what each is, for people."""
        return {
            self.metrics: "one line per step and evaluation",
            self.summary: "final numbers",
            self.events: "phases, warnings and work of each executor; `llamarl report` shows them",
            self.trace: "timeline of all executors; open it in ui.perfetto.dev",
            self.journals: "every rollout that was trained on (`llamarl export --rollouts`); `--resume` and `replay` "
            "need it",
            self.config: "the fully resolved settings",
            self.checkpoints: "weights and optimizer; `llamarl export` writes them as a Hugging Face folder",
            self.logs: "output of each executor",
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def lock(self) -> None:
        """Until this process leaves it, or ends, no other takes it. Raises ConfigError, OSError."""
        self._lock = _locked(self.path)
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n{socket.gethostname()}\n")
        self._lock.flush()

    def check(self) -> None:
        """Raises FolderLost when what this process has locked is not what is at its path now."""
        assert self._lock is not None
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._lock.fileno()), (self.path / _LOCK).stat()):
                return
        raise FolderLost(f"{self.path} was deleted or replaced during the run, and its files are lost; start again")

    async def check_loop(self) -> None:
        """Waits for time alone; ends with FolderLost."""
        while True:
            self.check()
            await asyncio.sleep(LOOK_S)

    def write_config(self) -> None:
        """From here on the run is that of its settings. Raises OSError."""
        assert self.settings is not None
        write_atomically(self.config, dump_toml(self.settings))

    def drop_rollouts_after(self, step: int) -> None:
        """Takes back rows of later steps, where rows of rollouts are beside the journal. Raises OSError."""
        if any(one.is_file() for one in pieces(self.rollouts)):
            log = RowLog(self.rollouts, lambda failure: None)
            log.drop_after(step)
            log.close()

    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints, ascending; not verified."""
        return saved_steps(self.checkpoints)

    def has_begun(self) -> bool:
        """There is a step, a checkpoint or what is left of one, a model, or what was generated for the first step."""
        return bool(
            saved_steps(self.checkpoints, last="")
            or self.done_steps()
            or self.recorded_steps()
            or any((self.path / name).exists() for name in ("export", "merged"))
            or any(one.stat().st_size > _EMPTY_BYTES for one in self.journals.glob("*.groups*"))
        )

    def done_steps(self) -> int:
        """Last step that checkpoints and journal lead to; not verified."""
        return max([*self.saved_steps(), _last_step(self.journal, b'"groups": ')])

    def recorded_steps(self) -> int:
        """Last step of which the metrics have a row."""
        return _last_step(self.metrics, b'"kind": "step"')

    def first_evals(self, names: Collection[str | None]) -> dict[str | None, EvalMetrics]:
        """The first evaluation on record of sets of these names, of whichever life of the run; not of one whose row is
        damaged."""
        found, lacking = dict[str | None, EvalMetrics](), set(names)
        with suppress(OSError, ConfigError):
            for _, row in read_run_rows(self.metrics, ""):
                if row.get("kind") == "eval" and (name := row.get("name")) in lacking:
                    lacking.remove(name)
                    with suppress(TypeError):
                        found[name] = EvalMetrics.of_row(row)
                if not lacking:
                    break
        return found

    def unrecorded(self, done: int, keep: int) -> str:
        """Text on those of so many steps of which the metrics have no row; empty: they have all. Those before the
        oldest of the `keep` newest checkpoints were named before: if there is a row of them, nobody looks further."""
        known = min(self.saved_steps()[-keep:], default=0)
        found, fault = set[int](), ""
        for file in reversed(pieces(self.metrics)):
            try:
                for step in _steps(file, b'"kind": "step"'):
                    found.add(step)
                    if step <= known and file.suffix != ".gz":
                        break
            except OSError as error:
                fault = f"; {file}: {error.strerror or error}"
            if min(found, default=known + 1) <= known:
                break
        first = max([step for step in found if step <= known], default=0) + 1
        lacking = tuple(step for step in range(first, done + 1) if step not in found)
        return f"{self.metrics} has no rows of steps {ranges(lacking)}{fault}" if lacking else ""

    def other_file(self, config: RunConfig, pinned: RunConfig) -> str:
        """A file of a model, or a name of the Hub, that is not what it was when the run began; empty: all are, or their
        model is about to be made. `pinned` has commits for names. Raises ConfigError."""
        before = recorded(self.path)
        for folder, files in record_of(config, pinned).items():
            was = before.get(folder, files)
            for name in sorted(was.keys() | files.keys()) if files else ():
                if was.get(name) != files.get(name):
                    return str(Path(folder, name))
        return ""

    def way_on(self) -> str:
        """Text: how a run goes on that an executor has left."""
        if done := self.done_steps():
            return f"--resume continues from step {done}"
        return "no step was completed yet, so --resume starts from the beginning"


def check_run_folder(config: RunConfig, *, resume: bool, overwrite: bool, pinned: RunConfig | None = None) -> Path:
    """The path of the run's folder, which nothing has touched yet, but that `resume` brings a checkpoint back where
    only copies are left.

    `pinned` are the settings with commits for names of the Hub, once those are known.

    Raises:
        ConfigError: a run has begun there, or others have files there, and neither `resume` nor `overwrite` was asked
            for, or what was asked for cannot be.
    """
    path = Path(config.output) / config.name
    if overwrite and resume:
        raise ConfigError("--resume and --overwrite contradict each other; give one")
    if config.checkpoint.copy_to:
        _settle_copies(config, path, resume=resume, overwrite=overwrite)
    if not path.exists():
        if resume:
            raise ConfigError(f"--resume: there is no run in {path}; start it without --resume")
        return path
    if not (resume or overwrite):
        _check_unused(path)
    if (path / _LOCK).exists():
        _locked(path).close()
    if resume:
        _check_resumable(RunFolder(path), config, pinned or config)
        for other in _not_of_a_run(path):
            sys.stderr.write(f"--resume: {path} also holds {other!r}, which no run wrote; it is kept\n")
    elif others := list(_not_of_a_run(path)):
        cause = f"also holds {others[0]!r}" if (path / "config.toml").exists() else "has no config.toml"
        raise ConfigError(
            f"{path} {cause}: it is not only a run folder and is not deleted; "
            "move your files elsewhere or choose another --name"
        )
    return path


def _check_unused(path: Path) -> None:
    """Raises ConfigError, unless it is empty, or a start was refused there, or ended before its first step."""
    lock = path / _LOCK
    # Of this machine: where a shared folder has no locks, a run may be in its first step elsewhere.
    is_ours = lock.exists() and lock.read_text(encoding="utf-8").split()[1:] in ([], [socket.gethostname()])
    is_ours = is_ours and not any(_not_of_a_run(path)) and not RunFolder(path).has_begun()
    if not is_ours and not (path.is_dir() and not any(path.iterdir())):
        raise FolderTaken(f"{path} exists; resume it (--resume), replace it (--overwrite) or choose another --name")


def _settle_copies(config: RunConfig, path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises ConfigError, when they cannot be reached, none that is needed is whole, or they are another run's."""
    copies = RemoteCopies(config.checkpoint, config.name)
    try:
        if not resume and not overwrite and copies.steps():
            raise ConfigError(
                f"{copies.name} holds checkpoints of a run; resume it (--resume), replace it (--overwrite) or "
                "choose another --name"
            )
        if resume and not RunFolder(path).saved_steps():
            if (path / _LOCK).exists():
                _locked(path).close()
            if (step := copies.bring_back(path)) is not None:
                sys.stderr.write(f"--resume: the checkpoint of step {step} was brought back from {copies.name}\n")
    except CopyFailed as error:
        raise ConfigError(f"checkpoint.copy_to: {copies.name}: {error}; fix that, or leave it out") from None


def runner(path: Path) -> tuple[int, str] | None:
    """Process and host of the run that is under way in a folder; None: none is."""
    with suppress(OSError), (path / _LOCK).open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, host = file.read().split()
            return int(pid), host
    return None


def run_of_record(path: Path) -> Path | None:
    """Folder of the run that has written this file, or will, and that is less without it; None: there is none."""
    path = path.resolve()
    for run in (RunFolder(folder) for folder in path.parents if (folder / _LOCK).exists()):
        name = re.sub(r"-\d{5}\.jsonl.*", ".jsonl", path.name)  # of a full piece
        own = {path.with_name(name), *path.parents} & {*run.files, run.journal, run.weights, run.path / _LOCK}
        if own and run.config.exists():
            return run.path
    return None


def _locked(path: Path) -> IO[str]:
    """Raises ConfigError, when another process has it, and OSError, where nothing can be locked."""
    file = open_own(path / _LOCK, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        pid = file.read().partition("\n")[0]
        file.close()
        if not isinstance(error, BlockingIOError):
            raise
        raise FolderTaken(
            f"{path} belongs to a running run (pid {pid}); wait for its end, end it, or choose another --name"
        ) from None
    return file


def _not_of_a_run(path: Path) -> Iterator[str]:
    """Names of what no command has written. A folder without a config is no run's, unless nothing is in it."""
    if not path.is_dir():
        yield path.name
        return
    names = {one.name for one in path.iterdir()} - {_LOCK}
    if names and "config.toml" not in names:
        yield min(names)
    for name in sorted(names - _OF_A_RUN):
        is_piece = re.fullmatch(rf"\.?{PIECE_NAME}(\.partial|\.gz\.partial|\.kept)?", name)
        if not is_piece and not name.startswith((".seen-", *(f".{one}." for one in _OF_A_RUN))):
            yield name


def _check_resumable(folder: RunFolder, config: RunConfig, pinned: RunConfig) -> None:
    """Raises ConfigError when the run cannot go on from here, which `--overwrite` need not mend."""
    if folder.config.exists():
        _check_same_weights(before := load_recorded(folder.config), config)
        if (before.record.kind, config.record.kind) == ("all", "resume") and folder.journals.exists():
            raise ConfigError("--resume: record.kind = 'resume' would delete the rollouts of this run; leave it 'all'")
    if file := folder.other_file(config, pinned):
        raise ConfigError(
            f"--resume: {file} is not what it was when the run began, so its checkpoints and this model do not belong "
            "together; restore it, or start a new run with another --name"
        )
    if (done := folder.done_steps()) > config.steps:
        raise ConfigError(
            f"--resume: the run has done {done} steps and steps = {config.steps}; give --steps {done} or more"
        )
    if not folder.saved_steps() and not (folder.checkpoints / _MARK).exists() and folder.recorded_steps():
        raise ConfigError(
            f"--resume: {folder.metrics} holds steps, and the checkpoints of this run are not in {folder.checkpoints}; "
            "mount that folder or put it back"
        )


def _last_step(path: Path, sign: bytes) -> int:
    """Last step of the rows with this sign; whoever reads all of them says what is damaged."""
    return next((max(found) for file in reversed(pieces(path)) if (found := [*_steps(file, sign, most=1)])), 0)


def _steps(file: Path, sign: bytes, most: int = 1 << 62) -> Iterator[int]:
    """Steps of the last rows with this sign, so many at least."""
    with suppress(EOFError, zlib.error, gzip.BadGzipFile):  # of a compressed one that is damaged, what stands before
        backwards = file.suffix != ".gz"
        for row in (last_lines(file) if backwards else lines(file)) if file.exists() else ():
            if sign in row and row.endswith(b"}" if backwards else b"\n"):
                with suppress(ValueError, LookupError, TypeError):
                    yield int(json.loads(row)["step"])
                    most -= backwards
            if not most:
                return


def _check_same_weights(before: RunConfig, now: RunConfig) -> None:
    """Raises ConfigError when what checkpoints hold would mean something else."""
    same = [
        ("model.path", before.model.path, now.model.path),
        ("trainer.lora", before.trainer.lora, now.trainer.lora),
        ("seed", before.seed, now.seed),
    ]
    if ("critic" in models_in_use(before)) != ("critic" in models_in_use(now)):
        same.append(("trainer.advantage", before.trainer.advantage.name, now.trainer.advantage.name))
    for name, old, new in same:
        if old != new:
            raise ConfigError(
                f"--resume: {name} was {old!r} when the run began and is {new!r} now, which its checkpoints do "
                "not fit; use the old value, or start a new run with another --name"
            )


def prepare_run_folder(
    config: RunConfig, *, resume: bool, overwrite: bool, pinned: RunConfig | None = None
) -> RunFolder:
    """Creates the run's folder, or takes it over, locked. The config is in it, unless it is resumed: that counts once
    what it holds has been read. `pinned` has commits for the names of the Hub in `config`.

    Raises:
        ConfigError: as `check_run_folder`, or it cannot be written.
    """
    pinned = pinned or config
    folder = RunFolder(check_run_folder(config, resume=resume, overwrite=overwrite, pinned=pinned))
    folder.settings = config
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.lock()
        if not (resume or overwrite):
            _check_unused(folder.path)  # another run may have begun and ended in between
        # The config last: a folder without one is nobody's, if this is cut short.
        for old in () if resume else sorted(folder.path.iterdir(), key=lambda one: one == folder.config):
            if old.name != _LOCK:
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        if overwrite and config.checkpoint.copy_to:
            RemoteCopies(config.checkpoint, config.name).clear()
        if not resume:
            folder.write_config()  # first: by it others know whose folder this is
        for made in (folder.logs, folder.checkpoints):
            made.mkdir(exist_ok=True)
        (folder.checkpoints / _MARK).touch()
        before = recorded(folder.path)
        if (record := record_of(config, pinned) | before) != before:  # a run that goes on may name more
            write_atomically(folder.weights, json.dumps(record, indent=2, sort_keys=True) + "\n")
    except (OSError, ConfigError) as error:
        folder.__exit__()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"cannot write to {folder.path}: {error.strerror or error}; choose another --output"
        ) from error
    return folder
