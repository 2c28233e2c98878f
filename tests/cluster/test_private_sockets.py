"""Monarch listens at files, and what is not one is found."""

from __future__ import annotations

import socket
import subprocess
import sys

from llamarl.cluster.engine_sockets import open_to_all
from tests.end_to_end.tiny import ROOT
from tests.nightly import nightly

START = """
import asyncio, sys
from llamarl.cluster import engine_sockets
from llamarl.cluster.engine_files import own_temporary_folder
own_temporary_folder()
if sys.argv[1] == "fails":
    engine_sockets._slots = lambda *_: ()
from llamarl.cluster.monarch import MonarchCluster
from tests.cluster.harness import echo

async def main():
    cluster = MonarchCluster(None)
    await cluster.spawn(echo(), 30.0)
    print(len(engine_sockets.open_to_all()))
    await cluster.shutdown(10.0)

asyncio.run(main())
"""


def test_abstract_sockets_are_found() -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"\0llamarl-test-{id(one)}")
        assert open_to_all() == []
        one.listen()
        assert open_to_all() == [f"@llamarl-test-{id(one)}"]


def start(how: str) -> tuple[int, str]:
    """How many sockets any user can connect to, and what a cluster says that starts."""
    done = subprocess.run([sys.executable, "-c", START, how], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1]), done.stderr


@nightly("a cluster of its own; distributed/test_links.py lets in only who proves itself")
def test_a_cluster_has_none_and_says_so_where_it_has() -> None:
    assert start("works") == (0, "")
    found, said = start("fails")
    assert found > 0, "Monarch has become private by itself: drop this"
    assert "every user of this machine can have Monarch run code as you" in said
