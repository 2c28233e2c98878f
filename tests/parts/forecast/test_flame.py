"""Flame graphs of runs: one picture of all processes, by executors' names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.parts.forecast.cli import profile
from llamarl.parts.forecast.flame import named
from tests.nightly import nightly

BUSY = "import time\ndef {name}():\n    end = time.time() + 60\n    while time.time() < end: sum(range(1000))\n{name}()"
RUN = """
import subprocess, sys
from pathlib import Path
from llamarl.run.folder import RunFolder
run = Path(sys.argv[1])
folder = RunFolder(run)
folder.lock()
own = subprocess.Popen([sys.executable, "-c", {of_generator!r}, str(run / "logs" / "generator-0.log")])
print("locked", flush=True)
exec({of_controller!r})
"""


def test_processes_get_their_names() -> None:
    said = "&quot;/bin/python -c \nimport x\n /runs/a/logs/trainer.log /y&quot;"
    picture = (
        f"<g><title>process 7:{said} (1,058 samples, 9.00%)</title><text x='1'>process 7:{said[:30]}..</text></g>"
        "<g><title>process 6:&quot;llamarl train&quot; (3 samples, 1.00%)</title><text x='2'></text></g>"
        "<g><title>process 8:&quot;sh&quot; (3 samples, 1.00%)</title><text x='2'>step (a.py:3)</text></g>"
    )
    assert named(picture, 6) == (
        "<g><title>trainer (pid 7) (1,058 samples, 9.00%)</title><text x='1'>trainer</text></g>"
        "<g><title>controller (pid 6) (3 samples, 1.00%)</title><text x='2'></text></g>"
        "<g><title>process (pid 8) (3 samples, 1.00%)</title><text x='2'>step (a.py:3)</text></g>"
    )


@nightly("a run of its own; by day a single process is drawn")
def test_all_processes_of_a_run_are_in_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_generator, of_controller = BUSY.format(name="decodes"), BUSY.format(name="controls")
    code = RUN.format(of_generator=of_generator, of_controller=of_controller)
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "locked\n"
            time.sleep(0.5)
            assert profile.main([str(tmp_path), "--flame", "--seconds", "1"]) == 0
        except ConfigError as error:
            if "ermission" in str(error):
                pytest.skip(f"this machine lets nobody look at processes: {error}")
            raise
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    picture = (tmp_path / "flame.svg").read_text()
    assert "controller (pid" in picture and "generator-0 (pid" in picture
    assert "decodes (" in picture and "controls (" in picture
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".flame")] == []
    assert f"wrote {tmp_path / 'flame.svg'}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--flame",), "nobody runs in"), (("--seconds", "3"), "--seconds is for --flame"),
        (("--flame", "--cores", "2"), "--cores is for a profile"), (("--flame", "--seconds", "0"), "--seconds 0"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        profile.main([str(tmp_path), *words])
