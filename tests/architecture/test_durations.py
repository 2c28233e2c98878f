"""Files of tests come longest first, and each run notes what they took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.architecture.repository import ROOT
from tests.durations import NOTES, TABLE, longest_first

FILES = {
    "test_a.py": "def test_short(): pass\n",
    "test_b.py": "import time\ndef test_long(): time.sleep(0.3)\ndef test_more(): pass\n",
}


def test_every_file_of_the_table_is_there() -> None:
    table = json.loads(TABLE.read_text())
    assert table and not [name for name in table if not (ROOT / name).is_file()]


def test_new_files_come_first_and_tests_of_a_file_stay_in_their_order() -> None:
    """Nobody knows yet how long a new one takes."""
    ids = ["short.py::a", "long.py::b", "short.py::c", "long.py::a", "new.py::a"]
    found = longest_first([SimpleNamespace(nodeid=one) for one in ids], {"short.py": 1.0, "long.py": 2.0})
    assert [one.nodeid for one in found] == ["new.py::a", "long.py::b", "long.py::a", "short.py::a", "short.py::c"]


def test_a_run_notes_what_its_files_took_unless_it_chooses_tests(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    plugin = "from tests.durations import Durations\ndef pytest_configure(config):\n"
    (tmp_path / "conftest.py").write_text(f"{plugin}    config.pluginmanager.register(Durations(config))\n")
    kept = tmp_path / ".pytest_cache" / "v" / NOTES

    def ordered(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:randomly", f"--rootdir={tmp_path}", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout
        return [line.split()[0].rpartition("/")[2] for line in done.stdout.splitlines() if "PASSED" in line]

    a, b = (str(tmp_path / name) for name in FILES)
    ordered(a, b, "-k", "short or long")
    assert not kept.exists()
    assert ordered(a, b) == ["test_a.py::test_short", "test_b.py::test_long", "test_b.py::test_more"]
    notes = json.loads(kept.read_text())
    assert (
        notes["test_b.py"]["seconds"] >= 0.3 and notes["test_b.py"]["tests"] == 2 and notes["test_a.py"]["tests"] == 1
    )
    assert ordered(a, b)[0] == "test_b.py::test_long"
