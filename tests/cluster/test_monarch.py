"""What llamarl adds to Monarch's own processes. Not covered: Monarch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llamarl.cluster.handle import rank_of

pytest.importorskip("monarch", reason="the engine is not installed")

CODE = """
from llamarl.cluster import monarch
monarch.MonarchCluster(None)
shut_down = monarch.monarch.actor.shutdown_context

class Slow:
    def __init__(self, found):
        self.found = found

    def get(self, timeout):
        self.found.get(timeout)
        raise TimeoutError

calls = []
import monarch._src.actor.actor_mesh as engine
def shut_down_slowly(host_timeout=None):
    found = shut_down(host_timeout)
    calls.append(host_timeout)
    return Slow(found) if len(calls) == 1 else found
engine.shutdown_context = monarch.monarch.actor.shutdown_context = shut_down_slowly
"""


def test_a_report_of_a_loss_names_a_rank() -> None:
    for place, rank in {"{'ranks': 1/3}": 1, "{'hosts': 2/4, 'ranks': 3/8}": 19, "": 0}.items():
        assert rank_of(f"The actor <root>.<Rank rank{place}> and its descendants have failed: Killed(sig=9)") == rank


def test_a_slow_end_of_the_engine_is_nobody_s_business() -> None:
    """Monarch's own function at the end of the process would print a traceback. Its loop of callbacks may say on a
    loaded machine that it was cut short: that isn't ours."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    assert "TimeoutError" not in done.stderr
