"""The command line answers before anything heavy is loaded."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.architecture.repository import PACKAGE, ROOT

HELP_CPU_S = 1.0
TRIES = 3
"""The best of these counts: other processes share the machine's caches; of its time they take none that is counted."""

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
        before_s = cpu_s()
        done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, timeout=240)
        taken_s.append(cpu_s() - before_s)
        assert done.returncode == 0, done.stderr
        assert "train" in done.stdout
        if taken_s[-1] < HELP_CPU_S:
            return
    pytest.fail(f"llamarl --help took {taken_s} s of CPU time, at most {HELP_CPU_S} s is allowed")


def cpu_s() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
