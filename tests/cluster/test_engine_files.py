"""What the engine writes is its user's alone, and what killed processes leave goes with the next start."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llamarl.cluster import engine_files
from llamarl.cluster.engine_files import PREFIX, log_env
from llamarl.config import ConfigError

USER = pwd.getpwuid(os.getuid()).pw_name


def test_the_log_is_in_the_run_folder_and_for_its_user_alone(tmp_path: Path) -> None:
    env = log_env(tmp_path / "logs", tmp_path)
    assert (tmp_path / "logs/monarch.log").stat().st_mode & 0o777 == 0o600
    assert env["MONARCH_FILE_LOG"] == "error"
    assert (
        os.path.normpath(f"/tmp/{USER}/monarch_log_{env['MONARCH_LOG_SUFFIX']}.log") == f"{tmp_path}/logs/monarch.log"
    )
    assert (tmp_path / USER).stat().st_mode & 0o777 == 0o700


def test_what_others_may_have_planted(tmp_path: Path) -> None:
    (tmp_path / USER).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match=r"belongs to another user, .* remove it"):
        log_env(None, tmp_path)
    (tmp_path / USER).unlink()
    (tmp_path / USER).mkdir(mode=0o777)
    (tmp_path / USER / "monarch_log.log").symlink_to(tmp_path / "precious")
    log_env(None, tmp_path)
    assert not (tmp_path / USER / "monarch_log.log").is_symlink()
    assert not (tmp_path / USER).stat().st_mode & 0o022


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_killed_processes_leave_nothing_for_long(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = "from llamarl.cluster.engine_files import own_temporary_folder as take; take()"
    env = os.environ | {"TMPDIR": str(short_path)}
    for end in ("import os; os.kill(os.getpid(), 9)", ""):
        subprocess.run([sys.executable, "-c", f"{take}; {end}"], env=env)
        assert len(list(short_path.glob(f"{PREFIX}*"))) == bool(end), "an end in order leaves nothing"
    lives = subprocess.Popen([sys.executable, "-c", f"{take}; print(flush=True); input()"], env=env,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert lives.stdin and lives.stdout and lives.stdout.readline()
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    engine_files.sweep()
    assert len(list(short_path.glob(f"{PREFIX}*"))) == 1, "it is held"
    lives.communicate(b"\n")


def test_simultaneous_starts_do_not_take_each_others_folders(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many starts make folders while many sweep: each gets one that stays, and at the end nothing else is there."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    monkeypatch.setattr(engine_files, "IN_MEMORY", short_path / "memory")
    made, is_over = list[tuple[Path, int]](), threading.Event()

    def sweep() -> None:
        while not is_over.is_set():
            engine_files.sweep()

    sweepers = [threading.Thread(target=sweep) for _ in range(3)]
    for one in sweepers:
        one.start()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: engine_files.make_locked(short_path), range(60)))
    is_over.set()
    for one in sweepers:
        one.join()
    assert sorted(folder for folder, _ in made) == sorted(short_path.glob(f"{PREFIX}*"))
    for _, descriptor in made:
        os.close(descriptor)
    engine_files.sweep()
    assert not list(short_path.iterdir())


def test_threads_of_one_process_share_its_folder(short_path: Path) -> None:
    take = """
import os, threading, tempfile
from llamarl.cluster.engine_files import own_temporary_folder
failed = []
threading.excepthook = lambda args: failed.append(args.exc_value)
threads = [threading.Thread(target=own_temporary_folder) for _ in range(8)]
[one.start() for one in threads]; [one.join() for one in threads]
assert not failed, failed
if os.fork() == 0:
    raise SystemExit  # which runs what the parent has registered for its own end
os.wait()
assert os.path.isdir(tempfile.gettempdir())
print(len(os.listdir(os.path.dirname(tempfile.gettempdir()))))
"""
    env = os.environ | {"TMPDIR": str(short_path)}
    found = subprocess.run([sys.executable, "-c", take], env=env, capture_output=True, text=True)
    assert found.stdout == "1\n", found.stderr
