"""Runs that lose the host of the trainer, or the controller: they go on with the hosts that are left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hosts.namespaces import Namespaces, available
from llamarl.run.rollouts import rollout_rows
from tests.end_to_end.tiny import ROOT, descendants, llamarl_here, make_model, write_toml
from tests.nightly import nightly
from tests.parts.hosts.namespaces.test_run import PORT, _told, _until, _wait, agent, llamarl, steps, train

REASON = available()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.timeout(900)]
STEPS = 16
SAME = (
    "--steps", STEPS, "--rollout.max_staleness", 0, "--rollout.window", 1, "--eval.every_steps", 0,
    "--checkpoint.every_steps", 5, "--trainer.learning_rate", 0.01,
    "--reference.kl_coefficient", 0.05, "--generator.replicas", 1,
)  # fmt: skip
LEARNT = ("step", "loss", "grad_norm", "reward_mean")
NEXT_STEP_S = 60.0
"""Seconds at most from the loss to the end of the next step: a fetch that waited for the lost host would take as many.
`benchmarks/hosts/runs.py` measures it."""


def learnt(folder: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in LEARNT} for row in steps(folder)]


def undisturbed(folder: Path, *options: object) -> list[dict[str, Any]]:
    folder.mkdir()
    toml = write_toml(folder, make_model(folder / "model"))
    done = llamarl_here("train", toml, "--output", folder / "runs", "--cluster.kind", "inline", *SAME, *options)
    assert done.returncode == 0, done.stderr
    return learnt(folder)


def until_step(run: Any, folder: Path, step: int) -> None:
    _until(lambda: len(steps(folder)) >= step or run.poll() is not None)


@nightly("`test_hosts.py` loses hosts of simulated executors by day")
@pytest.mark.parametrize("mirror", [True, False])
def test_the_trainer_s_host_is_cut_off(tmp_path: Path, mirror: bool) -> None:
    """The trainer continues on a host that has nothing, from memory of another host, or from the newest checkpoint."""
    options = ("--cluster.min_hosts", 2, "--checkpoint.mirror", str(mirror).lower())
    with Namespaces(4) as hosts:
        run = train(hosts, tmp_path, *options, *SAME)
        for host in hosts.names[1:]:
            agent(hosts, tmp_path, host)
        until_step(run, tmp_path, 7)
        hosts.cut("host-b")
        cut_s, before = time.monotonic(), len(steps(tmp_path))
        until_step(run, tmp_path, before + 1)
        after_s = time.monotonic() - cut_s
        told = f"{_wait(run)}\n{_told(tmp_path)}"
    assert run.returncode == 0, told
    assert "trainer (rank 0): host host-b (10.77.0.2) is lost: it has been silent for 3 s; it is started again" in told
    found = re.search(r"trainer continues from step (\d+), (\d+) steps were trained again", told)
    assert found and (int(found[1]) >= 6 if mirror else int(found[1]) == 5 and int(found[2]) >= 2), told
    assert learnt(tmp_path) == undisturbed(tmp_path / "whole")
    rollouts = Counter((row["group_id"], row["index"]) for row in rollout_rows(tmp_path / "runs/tiny"))
    assert set(rollouts.values()) == {1}, "none is trained twice"
    assert after_s < NEXT_STEP_S, f"{after_s:.1f} s\n{told}"


@nightly("of one host and without a critic it is said above")
def test_hosts_of_a_trainer_on_two_and_of_the_critic_are_lost(tmp_path: Path) -> None:
    """One after the other, and what keeps the state of the first; each part comes from wherever it is."""
    # Ranks round otherwise than one process: with larger steps that grows until another token is drawn.
    critic = ("--trainer.advantage", "gae", "--critic.learning_rate_scale", 1, "--trainer.learning_rate", 0.002)
    places = ("--cluster.place.trainer", '["host-[cde]"]', "--cluster.place.critic", '["host-[bcde]"]')
    options = ("--cluster.min_hosts", 2, "--checkpoint.mirror", "true", "--trainer.parallelism.fsdp", 2, *places)
    with Namespaces(6) as hosts:
        run = train(hosts, tmp_path, *SAME, *critic, *options, "--cluster.num_hosts", 5, "--steps", 24)
        for host in hosts.names[1:]:
            agent(hosts, tmp_path, host)
        for step, host in ((5, "host-d"), (11, "host-b"), (16, "host-e")):
            until_step(run, tmp_path, step)
            hosts.cut(host)
        told = f"{_wait(run)}\n{_told(tmp_path)}"
    assert run.returncode == 0, told
    again = re.findall(r"(trainer|critic) continues from step (\d+), (\d+) steps were trained again", told)
    assert {name for name, *_ in again} == {"trainer", "critic"} and len(again) >= 3, told
    assert all(int(number) <= 2 for _, _, number in again), told
    assert [row["step"] for row in steps(tmp_path)] == list(range(1, 25))
    for step, other in zip(learnt(tmp_path), undisturbed(tmp_path / "whole", *critic, "--steps", 24), strict=True):
        assert step == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in other.items()}


@nightly("fewer hosts and places that know nobody are in tests of the registry and of agents")
def test_controller_and_a_host_are_lost(tmp_path: Path) -> None:
    """`--restarts` goes on with the hosts that call again, at one of the places that they know."""
    with Namespaces(4) as hosts:
        run = train(hosts, tmp_path, "--cluster.min_hosts", 2, "--restarts", 2, *SAME)
        first = hosts.addresses["host-a"]
        for host in hosts.names[1:]:
            places = f"{hosts.addresses[host]}:1,{first}:{PORT}"
            name = ("--name", host, "--address", hosts.addresses[host])
            llamarl(hosts, host, tmp_path, "host", places, *name)
        until_step(run, tmp_path, 7)
        hosts.cut("host-b")
        (controller,) = [pid for pid in descendants(run.pid) if "\0train\0" in _command(pid)]
        os.kill(controller, signal.SIGKILL)
        told = f"{_wait(run)}\n{_told(tmp_path)}"
    assert run.returncode == 0, told
    assert (
        "restart 1 of 2" in told
        and "waiting at 10.77.0.1:6700 for hosts to call, 3 in all, and going on with 2" in told
    )
    assert "2 of 3 hosts have called: host-c, host-d; 1 missing, of host-a, host-b" in told
    assert learnt(tmp_path) == undisturbed(tmp_path / "whole")


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


LISTENS = """
import time
from llamarl.distributed.links import open_entrance
print(open_entrance("10.77.0.1", "secret", lambda connection: time.sleep(600), 600.0)[1], flush=True)
time.sleep(600)
"""
WAITS = """
import sys, time
from llamarl.distributed.links import BROKEN, LOST_S, connect, notice_loss
connection = connect(sys.argv[1], "secret", 600.0, LOST_S)
notice_loss(connection)
print("here", flush=True)
for wait in (connection.recv, lambda: connect(sys.argv[1], "secret", 600.0, LOST_S)):
    start_s = time.monotonic()
    try:
        wait()
    except BROKEN as error:
        print(time.monotonic() - start_s, flush=True)
"""


@nightly("hosts in real time; test_hosts.py loses hosts by day")
def test_who_waits_for_a_lost_host_hears_of_it() -> None:
    """In some seconds, of 600, whether it is connected or wants to be."""
    with Namespaces(2) as hosts:
        options = {"env": {"PYTHONPATH": str(ROOT)}, "text": True, "stdout": subprocess.PIPE}
        listens = hosts.popen("host-a", [sys.executable, "-c", LISTENS], **options)
        place = listens.stdout.readline().strip()
        waits = hosts.popen("host-b", [sys.executable, "-c", WAITS, place], **options)
        assert waits.stdout.readline() == "here\n"
        hosts.cut("host-a")
        seconds = [float(waits.stdout.readline()) for _ in range(2)]
    assert all(2.0 < one < 120.0 for one in seconds), seconds
