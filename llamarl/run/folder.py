"""The folder of a run and the files in it, and the commands that make sense after the run."""

from __future__ import annotations

import asyncio
import fcntl
import gzip
import json
import os
import re
import shlex
import shutil
import socket
import sys
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from llamarl.checkpoint.folder import saved_steps
from llamarl.config import ConfigError, RunConfig, dump_toml, load_recorded, open_own
from llamarl.observability.files import PIECE_NAME, last_lines, lines, pieces, read_run_rows, write_atomically
from llamarl.observability.metrics import EvalMetrics
from llamarl.observability.sinks import RowLog
from llamarl.run.copies import CopyFailed, open_copies
from llamarl.run.hub_pins import WEIGHTS_FILE, record_of, recorded
from llamarl.run.placement import models_in_use, ranges

_EMPTY_BYTES = 1 << 14
"""A journal file of this size holds more than its header and the rollouts of the first second."""
LOOK_S = 2.0
"""Seconds between two checks that the run's folder still exists."""
_LOCK, _MARK = ".lock", ".of-this-run"
_OF_A_RUN = frozenset((
    "config.toml", "weights.json", "metrics.jsonl", "rollouts.jsonl", "events.jsonl", "journal.jsonl", "journal",
    "summary.json", "report.html", "trace.json", "output.log", "logs", "checkpoints", "kernels", "weights", "export",
    "merged", "profile.json", "flame.svg", "costs.json", "forecast.json", "tensorboard", "wandb",
))  # fmt: skip
"""Names that commands write into a run's folder. Hidden variants exist while they are written."""


class FolderLost(RuntimeError):
    """The run's folder was deleted or replaced during the run."""


class FolderTaken(ConfigError):
    """The folder of a new run belongs to a run that has begun or is running."""


class RunFolder:
    """`<output>/<name>`: config, metrics, rollouts, logs, checkpoints, summary. As a context manager, it holds the lock
    that makes this process the only writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        """Rows of rollouts: from runs of earlier versions, or exported by the user."""
        self.events = path / "events.jsonl"
        self.journal, self.journals = path / "journal.jsonl", path / "journal"
        self.weights = path / WEIGHTS_FILE
        self.settings: RunConfig | None = None
        """Settings as the user wrote them, without commits for names on the Hub. None means that the folder is only
        read."""
        self.summary = path / "summary.json"
        self.trace = path / "trace.json"
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.kernels = path / "kernels"
        """Measured choice of kernels for this machine."""
        self._lock: IO[str] | None = None

    @property
    def files(self) -> dict[Path, str]:
        """Files that a run writes, with a description for people."""
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
        """Locks the folder until this process closes it or ends. Raises ConfigError or OSError."""
        self._lock = _locked(self.path)
        self._lock.truncate(0)
        self._lock.write(f"{os.getpid()}\n{socket.gethostname()}\n")
        self._lock.flush()

    def check(self) -> None:
        """Raises FolderLost if the path is no longer the folder that this process has locked."""
        assert self._lock is not None
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._lock.fileno()), (self.path / _LOCK).stat()):
                return
        raise FolderLost(f"{self.path} was deleted or replaced during the run, and its files are lost; start again")

    async def check_loop(self) -> None:
        """Checks the folder every `LOOK_S` seconds. Only ends with FolderLost."""
        while True:
            self.check()
            await asyncio.sleep(LOOK_S)

    def write_config(self) -> None:
        """Writes the settings, which from now on define the run. Raises OSError."""
        assert self.settings is not None
        write_atomically(self.config, dump_toml(self.settings))

    def drop_rollouts_after(self, step: int) -> None:
        """Removes rows of later steps from exported rollouts. Raises OSError."""
        if any(one.is_file() for one in pieces(self.rollouts)):
            log = RowLog(self.rollouts, lambda failure: None)
            log.drop_after(step)
            log.close()

    def saved_steps(self) -> list[int]:
        """Returns the steps of the checkpoints in ascending order, without verifying them."""
        return saved_steps(self.checkpoints)

    def has_begun(self) -> bool:
        """Returns whether there is a step, a checkpoint or its remains, a model, or rollouts for the first step."""
        return bool(
            saved_steps(self.checkpoints, last="")
            or self.done_steps()
            or self.recorded_steps()
            or any((self.path / name).exists() for name in ("export", "merged"))
            or any(one.stat().st_size > _EMPTY_BYTES for one in self.journals.glob("*.groups*"))
        )

    def done_steps(self) -> int:
        """Returns the last step of checkpoints and journal, without verifying them."""
        return max([*self.saved_steps(), _last_step(self.journal, b'"groups": ')])

    def recorded_steps(self) -> int:
        """Returns the last step with a row in the metrics."""
        return _last_step(self.metrics, b'"kind": "step"')

    def first_evals(self, names: Collection[str | None]) -> dict[str | None, EvalMetrics]:
        """Returns the first recorded evaluation of each set of these names, over all restarts. Skips damaged rows."""
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
        """Returns text on steps up to `done` without a row in the metrics. Empty means that all have one. Steps before
        the oldest of the `keep` newest checkpoints were reported earlier, so the search ends at a row of one of
        them."""
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
        """Returns a model file, or a name on the Hub, that has changed since the run began. Empty means that nothing
        has changed, or that the model will be made. `pinned` has commits for names. Raises ConfigError."""
        before = recorded(self.path)
        for folder, files in record_of(config, pinned).items():
            was = before.get(folder, files)
            for name in sorted(was.keys() | files.keys()) if files else ():
                if was.get(name) != files.get(name):
                    return str(Path(folder, name))
        return ""

    def way_on(self) -> str:
        """Returns text on how to resume after an executor was lost."""
        if done := self.done_steps():
            return f"--resume continues from step {done}"
        return "no step was completed yet, so --resume starts from the beginning"


def check_run_folder(config: RunConfig, *, resume: bool, overwrite: bool, pinned: RunConfig | None = None) -> Path:
    """Returns the path of the run's folder without changing it, except that `resume` restores a checkpoint if only
    copies are left.

    Args:
        pinned: settings with commits for names on the Hub, once these are known.

    Raises:
        ConfigError: a run has begun there, or the folder has other files, and neither `resume` nor `overwrite` is set,
        or the requested action is impossible.
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
    """Raises FolderTaken unless the folder is empty, or its run was refused or ended before the first step."""
    lock = path / _LOCK
    # On this machine: on a shared folder without locks, a run may be in its first step elsewhere.
    is_ours = lock.exists() and lock.read_text(encoding="utf-8").split()[1:] in ([], [socket.gethostname()])
    is_ours = is_ours and not any(_not_of_a_run(path)) and not RunFolder(path).has_begun()
    if not is_ours and not (path.is_dir() and not any(path.iterdir())):
        raise FolderTaken(f"{path} exists; resume it (--resume), replace it (--overwrite) or choose another --name")


def _settle_copies(config: RunConfig, path: Path, *, resume: bool, overwrite: bool) -> None:
    """Raises ConfigError if copies cannot be reached, the needed ones are damaged, or they belong to another run."""
    copies = open_copies(config)
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
                sys.stderr.write(f"--resume: the checkpoint of step {step} was restored from {copies.name}\n")
    except CopyFailed as error:
        raise ConfigError(f"checkpoint.copy_to: {copies.name}: {error}; fix that, or leave it out") from None


def runner(path: Path) -> tuple[int, str] | None:
    """Returns process and host of the run that is running in a folder. None means that no run is."""
    with suppress(OSError), (path / _LOCK).open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, host = file.read().split()
            return int(pid), host
    return None


def run_of_record(path: Path) -> Path | None:
    """Returns the folder of the run to which a file belongs, whether or not it exists. None means that there is
    none."""
    path = path.resolve()
    for run in (RunFolder(folder) for folder in path.parents if (folder / _LOCK).exists()):
        name = re.sub(r"-\d{5}\.jsonl.*", ".jsonl", path.name)  # a full piece
        own = {path.with_name(name), *path.parents} & {*run.files, run.journal, run.weights, run.path / _LOCK}
        if own and run.config.exists():
            return run.path
    return None


def _locked(path: Path) -> IO[str]:
    """Locks a folder. Raises FolderTaken if another process has locked it, and OSError if locks are impossible."""
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
    """Yields names that no command has written. A folder with files but without a config belongs to no run."""
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
    """Raises ConfigError if the run cannot resume with these settings. `--overwrite` need not fix the cause."""
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
            f"--resume: {folder.metrics} has rows of steps, but the run's checkpoints are not in {folder.checkpoints}; "
            "mount that folder or restore it"
        )


def _last_step(path: Path, sign: bytes) -> int:
    """Returns the last step of rows with this sign. Readers of all rows report damaged ones."""
    return next((max(found) for file in reversed(pieces(path)) if (found := [*_steps(file, sign, most=1)])), 0)


def _steps(file: Path, sign: bytes, most: int = 1 << 62) -> Iterator[int]:
    """Yields the steps of the last rows with this sign, at least `most` of them."""
    with suppress(EOFError, zlib.error, gzip.BadGzipFile):  # a damaged compressed file is read up to the damage
        backwards = file.suffix != ".gz"
        for row in (last_lines(file) if backwards else lines(file)) if file.exists() else ():
            if sign in row and row.endswith(b"}" if backwards else b"\n"):
                with suppress(ValueError, LookupError, TypeError):
                    yield int(json.loads(row)["step"])
                    most -= backwards
            if not most:
                return


def _check_same_weights(before: RunConfig, now: RunConfig) -> None:
    """Raises ConfigError if settings have changed that give weights in checkpoints another meaning."""
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
    """Creates the run's folder, or takes over an existing one, and locks it. A new run's config is written here; a
    resumed run's only after its state has been read.

    Args:
        pinned: `config` with commits for names on the Hub.

    Raises:
        ConfigError: as `check_run_folder`, or the folder cannot be written.
    """
    pinned = pinned or config
    folder = RunFolder(check_run_folder(config, resume=resume, overwrite=overwrite, pinned=pinned))
    folder.settings = config
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.lock()
        if not (resume or overwrite):
            _check_unused(folder.path)  # another run may have begun and ended meanwhile
        # Deletes the config last: if this is interrupted, a folder without a config would belong to no run.
        for old in () if resume else sorted(folder.path.iterdir(), key=lambda one: one == folder.config):
            if old.name != _LOCK:
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
        if overwrite and config.checkpoint.copy_to:
            open_copies(config).clear()
        if not resume:
            folder.write_config()  # first: it shows other processes to which run the folder belongs
        for made in (folder.logs, folder.checkpoints):
            made.mkdir(exist_ok=True)
        (folder.checkpoints / _MARK).touch()
        before = recorded(folder.path)
        if (record := record_of(config, pinned) | before) != before:  # a resumed run may name more models
            write_atomically(folder.weights, json.dumps(record, indent=2, sort_keys=True) + "\n")
    except (OSError, ConfigError) as error:
        folder.__exit__()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"cannot write to {folder.path}: {error.strerror or error}; choose another --output"
        ) from error
    return folder


def next_commands(config: RunConfig, folder: RunFolder, *, of_sft: bool = False) -> list[str]:
    """Returns one or two lines with commands for a run that has finished. Commands for its model need a checkpoint."""
    run = shlex.quote(str(folder.path))
    lines = [f"next: `llamarl report {run}` shows the run as one HTML file"]
    if folder.saved_steps():
        asks = ", ".join(f"`{one}`" for one in _asks(config, run, of_sft=of_sft))
        lines.append(f"the model: {asks}; `llamarl export {run}` writes it as a Hugging Face folder")
    return lines


def _asks(config: RunConfig, run: str, *, of_sft: bool) -> Iterator[str]:
    if config.data.eval is not None and not of_sft:
        yield f"llamarl eval {run}"
    if not config.has_episodes:
        yield f"llamarl generate {run} --prompts FILE"
    yield f"llamarl serve {run}"
