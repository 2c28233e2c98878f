"""The command line answers before anything heavy is loaded."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from tests.architecture.repository import PACKAGE, ROOT

MOST, TRIES = 6, 3
"""So many times what Python itself takes to start and to import numpy, on the same machine; the best try counts, as
other processes share its caches."""

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
    tries = []
    for _ in range(TRIES):
        (_, least_s), (told, taken_s) = spent("import numpy"), spent(HELP)
        assert "train" in told
        tries.append(f"{taken_s:.2f} s of CPU time beside {least_s:.2f} s")
        if taken_s < MOST * least_s:
            return
    pytest.fail(f"llamarl --help took {tries}, at most {MOST} times as much is allowed")


def spent(code: str) -> tuple[str, float]:
    """What a program says, and its CPU time."""
    before_s = cpu_s()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout, cpu_s() - before_s


def cpu_s() -> float:
    """Of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
