"""Files that Monarch, the engine of executors, writes outside of the run's folder: its log, and sockets in temporary
folders.

By default Monarch appends its log to one file for all runs, with a predictable name, and leaves a folder for each
killed process.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import pwd
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llamarl.config.errors import ConfigError

PREFIX = "llamarl-tmp-"
MEMORY = "LLAMARL_MEMORY"
"""Environment variable with a folder in this host's memory, which is removed with the process that set it."""
IN_MEMORY = Path("/dev/shm")
MAX_PATH_CHARS = 60
"""Longest path of a temporary folder, in characters. A socket's address has room for 107, including the file's name."""
MOST_TRIES = 1000
"""Most folders that a start makes until it has locked one, because other starts may sweep a new folder."""
_held = list[int]()
"""Descriptors of this process's temporary folders, which are locked."""
_making = threading.Lock()


def log_env(folder: Path | None, shared: Path = Path("/tmp")) -> dict[str, str]:
    """Returns the environment of a process that will import Monarch. Monarch then logs only errors, into
    `folder`/monarch.log, which only its user can read.

    Args:
        folder: None means the user's own folder in `shared`.

    Raises:
        ConfigError: another user owns the folder in `shared` that Monarch uses for this user.
    """
    with suppress(KeyError):  # a user without a name
        _check_own(shared / pwd.getpwuid(os.getuid()).pw_name)
    found = {"MONARCH_FILE_LOG": os.environ.get("MONARCH_FILE_LOG", "error")}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.absolute() / "monarch.log"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        # Monarch appends this to a name in that folder; the parent of the root is the root.
        found["MONARCH_LOG_SUFFIX"] = "/.." * 32 + str(path.with_suffix(""))
    return found


def _check_own(home: Path) -> None:
    with suppress(FileExistsError):
        home.mkdir(mode=0o700)
    found = home.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{home} belongs to another user, and Monarch would write its log there; remove it")
    home.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    for name in ("monarch_log.log", "monarch_log_"):
        if (home / name).is_symlink():
            (home / name).unlink(missing_ok=True)  # another start may do the same


def own_temporary_folder() -> None:
    """Sets TMPDIR of this process and its children to a folder that is removed with it. Removes the folders of killed
    processes. Raises ConfigError."""
    with _making:  # two threads may start runs at the same time
        if not _held:
            sweep()
            _make_own()


def _make_own() -> None:
    """Raises ConfigError."""
    beside = Path(tempfile.gettempdir())
    if beside.name.startswith(PREFIX):  # the parent process has its own there: paths stay short
        beside = beside.parent
    try:
        folder, descriptor = make_locked(beside)
    except OSError as error:
        raise ConfigError(f"no temporary folder can be created ({error}); set TMPDIR to a writable folder") from None
    _held.append(descriptor)
    atexit.register(_remove_own, folder, os.getpid())
    if len(str(folder)) > MAX_PATH_CHARS:
        os.close(_held.pop())
        os.rmdir(folder)
        raise ConfigError(f"TMPDIR = {tempfile.gettempdir()!r} is too long for sockets in it; use a shorter path")
    os.environ["TMPDIR"] = tempfile.tempdir = os.environ[MEMORY] = str(folder)
    with suppress(OSError):  # no such file system, or it is not writable: the disk serves
        in_memory, descriptor = make_locked(IN_MEMORY)
        _held.append(descriptor)
        os.environ[MEMORY] = str(in_memory)
        atexit.register(_remove_own, in_memory, os.getpid())


def make_locked(beside: Path) -> tuple[Path, int]:
    """Makes a temporary folder that `sweep` ignores. Returns it with the descriptor that holds its lock.

    Another start may sweep a folder after it is made and before it is locked. Then the next one is made.

    Raises:
        OSError: no folder can be made there.
    """
    for _ in range(MOST_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=beside))
        try:
            descriptor = _locked(folder)
        except (BlockingIOError, FileNotFoundError):  # a sweep has it, or has removed it
            continue
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), folder.stat()):
                return folder, descriptor
        os.close(descriptor)
    raise BlockingIOError(errno.EAGAIN, f"{MOST_TRIES} folders were removed as they were made", str(beside))


def _remove_own(folder: Path, pid: int) -> None:
    """Removes a folder at the end of the process that has made it. A forked child leaves it to its parent."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def mirror_folder(run: str) -> Path:
    """Returns the folder where trainer and critic of a run keep copies of their state in this host's memory."""
    return Path(os.environ[MEMORY], "mirror", run)


def sweep() -> None:
    """Removes the folders of killed processes, whose locks are free."""
    for folder in (*Path(tempfile.gettempdir()).glob(f"{PREFIX}*"), *IN_MEMORY.glob(f"{PREFIX}*")):
        with suppress(OSError):  # locked, owned by another user, or gone
            descriptor = _locked(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _locked(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Discards standard error while the engine starts, whose messages bypass Python and its own settings."""
    sys.stderr.flush()
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
