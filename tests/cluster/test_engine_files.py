"""What the engine writes is its user's alone, and what killed processes leave goes with the next start."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
    with pytest.raises(ConfigError, match="is another user's, and Monarch would write its log there; remove it"):
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
