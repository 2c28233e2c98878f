"""The command line answers before anything heavy is loaded."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.architecture.repository import PACKAGE, ROOT

HELP_S = 1.5
TRIES = 3
"""The best of these counts: other processes share the machine."""

HELP = """
import sys
from llamarl.cli.main import main
sys.argv = ["llamarl", "--help"]
try:
    code = main()
except SystemExit as done:
    code = done.code
assert not code, code
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.skipif(not (PACKAGE / "cli" / "main.py").exists(), reason="llamarl/cli/main.py is not written yet")
def test_help_is_fast_and_imports_no_torch() -> None:
    taken_s = []
    for _ in range(TRIES):
        start_s = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, timeout=60)
        taken_s.append(time.perf_counter() - start_s)
        assert done.returncode == 0, done.stderr
        assert "train" in done.stdout
        if taken_s[-1] < HELP_S:
            return
    pytest.fail(f"llamarl --help took {taken_s} s, at most {HELP_S} s is allowed")
