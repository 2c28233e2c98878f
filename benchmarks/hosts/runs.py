"""What several hosts cost a run, and what it does when they are lost.

    python benchmarks/hosts/runs.py [--agents 64] [--pairs 3] [--losses 30] [--trainers 6]
        [--only attach registry demo losses trainers distance lossy]

Hosts are network namespaces on this machine (`namespaces.py`), as root or in a user namespace. `attach`: three hosts
that are there get an executor each, from the attachment to its first answer, without torch; and a small call against
one to a process on this machine. `registry`: what so many agents, each with its engine, cost the controller.
`demo`: the demo over three hosts against the same executors on one, in pairs. `losses`: any host but the controller's,
the trainer's among them, is killed, frozen or cut off at random moments of the demo, three times in each run, and comes
back after some seconds.
`trainers`: the host of the trainer is killed or cut off in turn, and stays away: seconds to the end of the next step,
which the trainer takes on another host, from a mirror in a third host's memory.
`distance`: the demo with all hosts 100 ms there and back from each other: how long a sync takes. `lossy`: with three
generators on hosts of their own, of which one loses 20 % of what its cable carries, each way: the longest step.
The demo's base model must be there (`make demo` makes it).
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import datetime
import json
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from _record import RESULTS, write_result
from namespaces import Namespaces, available

from llamarl.cluster.api import Cluster, ExecutorHandle, ExecutorSpec, HostShare
from llamarl.cluster.open import open_cluster
from llamarl.config.cluster import ClusterConfig
from llamarl.parts.hosts.certificates import make_certificates, monarch_env
from llamarl.parts.hosts.registry import Registry
from llamarl.run.rollouts import rollout_rows

ROOT = Path(__file__).parents[2]
PORT = 6700
CALLS = 400
WAIT_S = 400.0
LOSSES_PER_RUN = 3
SETTLED_S = 0.5
"""Seconds after a loss in which the last step before it comes on record."""
STEPS, LOSS_STEPS, SLOW_STEPS = 60, 200, 45
FIGURES = (
    *("attach_s", "call_ratio", "call_ratios", "registry_share", "num_agents", "demo_ratio", "demo_ratios"),
    *("losses_tried", "losses_failed", "losses_of_trainer", "losses", "failures", "accuracies", "longest_step_s"),
    *("share_of_wire", "share_of_wire_proved", "relay_ratio"),
    *("sync_100ms_s", "step_100ms_s", "syncs_100ms_s"),
    *("longest_step_lossy_s", "step_lossy_s", "steps_lossy_s"),
    *("trainer_host_s", "trainer_host_all_s", "trainer_host_origins"),
)
"""Of the result; those of parts that are not asked for stay as they were found earlier on the day."""
DELAY_MS, LOSS_PERCENT = 100.0, 5.0
"""Of each way of the generators' cables, in every third run."""
FAR_MS, LOSSY_PERCENT = 25.0, 20.0
"""Of each way of every cable, where hosts are far; of one generator's cable, where it loses."""
GOES_ON = ("--cluster.min_hosts", 2, "--checkpoint.mirror", "true")
ORIGIN = re.compile(r"trainer goes on from (step \d+, \d+ steps)")
KINDS = ("kill", "freeze", "cut")
PARTS = ("attach", "registry", "demo", "losses", "trainers", "distance", "lossy")


def certificates(folder: Path, hosts: Namespaces) -> Path:
    members = {name: (name, address) for name, address in hosts.addresses.items()}
    first = next(iter(hosts.addresses.values()))
    make_certificates(folder / "pki", members | {"controller": ("controller", first)}, days=2)
    return folder / "pki"


def agent(hosts: Namespaces, host: str, pki: Path, name: str = "") -> subprocess.Popen[bytes]:
    place = f"{next(iter(hosts.addresses.values()))}:{PORT}"
    command = [sys.executable, "-m", "llamarl", "host", place, "--pki", str(pki), "--name", name or host]
    with (hosts.tmp(host) / f"agent-{name or host}.txt").open("ab") as output:
        env = {"PYTHONPATH": str(ROOT)}
        return hosts.popen(
            host, [*command, "--address", hosts.addresses[host]], env=env, stdout=output, stderr=output, cwd=ROOT
        )


# Parts that run in the first host, as `runs.py --inside PART ...`, and print a JSON line.


async def inside_attach(pki: Path, num_hosts: int) -> dict[str, Any]:
    from llamarl.parts.hosts.cluster import HostsCluster

    address = os.environ["CONTROLLER"]
    registry = Registry(pki, None, lambda text: None)
    await registry.open(f"{address}:{PORT}")
    await registry.until(num_hosts, WAIT_S)
    cluster = HostsCluster(registry, address, monarch_env(pki, "controller"))
    code = (str(ROOT / "tests" / "cluster"),)

    async def first_answer(name: str) -> ExecutorHandle:
        shares = (HostShare(name, 1, {}),)
        spec = ExecutorSpec(name=f"on-{name}", target="executors:Echo", hosts=shares, code_paths=code)
        handle = await cluster.spawn(spec, WAIT_S)
        await handle.call("echo", 1, timeout_s=WAIT_S)
        return handle

    times = list[float]()
    for _ in range(5):
        start_s = time.monotonic()
        handles = await asyncio.gather(*map(first_answer, registry.hosts))
        times.append(time.monotonic() - start_s)
        calls_s = await _calls(handles[0])
        await asyncio.gather(*(handle.stop(8.0) for handle in handles))
    await cluster.shutdown(8.0)
    return {"attach_s": statistics.median(times), "call_s": calls_s}


async def inside_one_host() -> dict[str, Any]:
    code = (str(ROOT / "tests" / "cluster"),)
    async with open_cluster(ClusterConfig()) as cluster:
        return {"call_s": await _calls(await _spawned(cluster, code))}


async def _spawned(cluster: Cluster, code: tuple[str, ...]) -> ExecutorHandle:
    return await cluster.spawn(ExecutorSpec(name="echo", target="executors:Echo", code_paths=code), WAIT_S)


async def _calls(handle: ExecutorHandle) -> float:
    times = list[float]()
    for _ in range(CALLS):
        start_s = time.monotonic()
        await handle.call("echo", 1, timeout_s=WAIT_S)
        times.append(time.monotonic() - start_s)
    return statistics.median(times)


async def inside_registry(pki: Path, num_hosts: int) -> dict[str, Any]:
    registry = Registry(pki, None, lambda text: None)
    await registry.open(f"{os.environ['CONTROLLER']}:{PORT}")
    await registry.until(num_hosts, WAIT_S)
    await asyncio.sleep(3.0)
    before, start_s = _cpu_s(), time.monotonic()
    await asyncio.sleep(20.0)
    share = (_cpu_s() - before) / (time.monotonic() - start_s)
    await registry.close()
    return {"registry_share": share}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def inside(hosts: Namespaces, *words: object) -> dict[str, Any]:
    """Runs a part in the first host; what it printed."""
    address = next(iter(hosts.addresses.values()))
    process = hosts.popen(
        hosts.names[0], [sys.executable, __file__, "--inside", *map(str, words)],
        env={"PYTHONPATH": str(ROOT), "CONTROLLER": address}, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    told, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, told
    return json.loads(told.splitlines()[-1])


def attach(folder: Path) -> dict[str, Any]:
    """Three hosts, and a call in pairs with one on this machine."""
    ratios, attached = list[float](), list[float]()
    for _ in range(3):
        with Namespaces(3) as hosts:
            pki = certificates(Path(tempfile.mkdtemp(dir=folder)), hosts)
            for host in hosts.names:
                agent(hosts, host, pki)
            found, alone = inside(hosts, "attach", pki, 3), inside(hosts, "one_host")
        attached.append(found["attach_s"])
        ratios.append(found["call_s"] / alone["call_s"])
    return {"attach_s": statistics.median(attached), "call_ratio": statistics.median(ratios), "call_ratios": ratios}


def registry(folder: Path, num_agents: int) -> dict[str, Any]:
    """Agents that share three hosts, under a name each."""
    with Namespaces(3) as hosts:
        names = {f"agent-{i}": hosts.names[i % 3] for i in range(num_agents)}
        members = {name: (name, hosts.addresses[host]) for name, host in names.items()}
        controller = {"controller": ("controller", hosts.addresses[hosts.names[0]])}
        make_certificates(folder / "many", members | controller, days=2)
        for name, host in names.items():
            agent(hosts, host, folder / "many", name)
        return inside(hosts, "registry", folder / "many", num_agents) | {"num_agents": num_agents}


class Demo:
    """One run of the demo in the first host."""

    def __init__(self, hosts: Namespaces, folder: Path, steps: int, *options: object) -> None:
        self.folder = folder / "demo"
        command = [
            *(sys.executable, "-m", "llamarl", "train", "configs/demo.toml", "--output", folder, "--steps", steps),
            *("--eval.every_steps", 0, "--screen.kind", "lines", "--checkpoint.every_steps", 0, *options),
        ]
        with (folder / "out.txt").open("w") as self.out:
            self.process = hosts.popen(
                hosts.names[0], list(map(str, command)), env={"PYTHONPATH": str(ROOT)}, stdout=self.out,
                stderr=self.out, cwd=ROOT,
            )  # fmt: skip

    def steps(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n") if path.exists() else ("", "", "")
        lines = whole.splitlines()  # the last one may not be whole yet
        return [row for line in lines if (row := json.loads(line))["kind"] == "step"]

    def until(self, step: int) -> None:
        start_s = time.monotonic()
        while len(self.steps()) < step and self.process.poll() is None:
            assert time.monotonic() - start_s < WAIT_S, f"step {step} did not come"
            time.sleep(0.05)

    def end(self) -> dict[str, Any]:
        code = self.process.wait(WAIT_S)
        assert code == 0, Path(self.out.name).read_text()
        return json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))


def over_hosts(hosts: Namespaces, pki: Path, replicas: int) -> tuple[object, ...]:
    return (
        *called(hosts, pki, len(hosts.names), replicas),
        *("--cluster.place.trainer", f'["{hosts.names[0]}"]'),
    )


def called(hosts: Namespaces, pki: Path, number: int, replicas: int) -> tuple[object, ...]:
    """The controller is the first host's, and so many call it."""
    return (
        *("--cluster.kind", "hosts", "--cluster.listen", f"{hosts.addresses[hosts.names[0]]}:{PORT}"),
        *("--cluster.pki", pki, "--cluster.num_hosts", number, "--generator.replicas", replicas),
    )


def demo(folder: Path, pairs: int) -> dict[str, Any]:
    """The same executors on three hosts and on one, in turn."""
    ratios = list[float]()
    for pair in range(pairs):
        with Namespaces(3) as hosts:
            speeds = dict[str, float]()
            for kind in ("hosts", "one")[:: 1 if pair % 2 else -1]:
                place = Path(tempfile.mkdtemp(dir=folder))
                pki = certificates(place, hosts)
                if kind == "hosts":
                    agents = [agent(hosts, host, pki) for host in hosts.names]
                options = over_hosts(hosts, pki, 2) if kind == "hosts" else ("--generator.replicas", 2)
                speeds[kind] = Demo(hosts, place, STEPS, "--seed", pair, *options).end()["samples_per_s"]
                if kind == "hosts":
                    for one in agents:
                        one.terminate()
            ratios.append(speeds["hosts"] / speeds["one"])
    return {"demo_ratio": statistics.median(ratios), "demo_ratios": ratios}


def losses(folder: Path, number: int, minutes: float, tell: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Runs with three losses each, of any host but the controller's; none begins after so many minutes. What is known
    is told after each."""
    draw, events, failures = random.Random(0), list[dict[str, Any]](), list[str]()
    accuracies, num_trainers, start_s = list[float](), 0, time.monotonic()
    found = dict[str, Any]()
    for i in range(-(-number // LOSSES_PER_RUN)):
        if found and time.monotonic() - start_s > 60 * minutes:
            break
        place = Path(tempfile.mkdtemp(dir=folder))
        try:
            befell, accuracy = one_run(place, draw, slow=i % 3 == 2)
            events += befell
            accuracies.append(accuracy)
            num_trainers += len(ORIGIN.findall((place / "out.txt").read_text()))
        except (AssertionError, subprocess.TimeoutExpired) as error:
            failures.append(str(error)[-2000:])
        found = {
            "losses_tried": LOSSES_PER_RUN * (i + 1),
            "losses_failed": len(failures),
            "losses_of_trainer": num_trainers,
            "losses": events,
            "failures": failures,
            "accuracies": accuracies,
            "longest_step_s": max((event["longest_step_s"] for event in events), default=0.0),
        }
        tell(found)
    return found


def one_run(place: Path, draw: random.Random, *, slow: bool) -> tuple[list[dict[str, Any]], float]:
    """A run that must end with all steps; what befell it, and its accuracy."""
    with Namespaces(5) as hosts:
        pki = certificates(place, hosts)
        agents = {host: agent(hosts, host, pki) for host in hosts.names[1:]}
        options = *called(hosts, pki, 4, 3), *GOES_ON, "--cluster.on_failure.generator", "respawn"
        run = Demo(hosts, place, LOSS_STEPS, *options)
        events = list[dict[str, Any]]()
        run.until(10)
        if slow:
            for host in hosts.names[1:]:
                hosts.limit(host, delay_ms=DELAY_MS, loss_percent=LOSS_PERCENT)
        for i in range(LOSSES_PER_RUN):
            time.sleep(draw.uniform(0.0, 3.0))
            host, kind, away_s = draw.choice(hosts.names[1:]), draw.choice(KINDS), draw.uniform(0.5, 7.0)
            before = len(run.steps())
            if kind == "kill":
                agents[host].kill()
                time.sleep(away_s)
                agents[host] = agent(hosts, host, pki)
            elif kind == "freeze":
                agents[host].send_signal(signal.SIGSTOP)
                time.sleep(away_s)
                agents[host].send_signal(signal.SIGCONT)
            else:
                hosts.cut(host)
                time.sleep(away_s)
                hosts.restore(host)
            run.until(before + 8)
            times = [row["step_s"] for row in run.steps()[before:]]
            others = [row["step_s"] for row in run.steps()[5:before]]
            slowest, usual = max(times, default=0.0), statistics.median(others)
            loss = {"host": host, "kind": kind, "away_s": away_s, "step": before, "is_slow_wire": slow}
            events.append(loss | {"longest_step_s": slowest, "median_step_s": usual})
            assert run.process.poll() is None or i == LOSSES_PER_RUN - 1, Path(run.out.name).read_text()[-2000:]
        for host in hosts.names[1:]:  # a bad way would make the rest last too long
            hosts.limit(host)
        summary = run.end()
        assert [row["step"] for row in run.steps()] == list(range(1, LOSS_STEPS + 1))
        assert_trained_once(run.folder)
        return events, summary["accuracy_after"]


def trainers(folder: Path, number: int) -> dict[str, Any]:
    """Runs that lose the trainer's host."""
    times, origins = list[float](), list[str]()
    for i in range(number):
        place = Path(tempfile.mkdtemp(dir=folder))
        with Namespaces(4) as hosts:
            pki = certificates(place, hosts)
            agents = {host: agent(hosts, host, pki) for host in hosts.names[1:]}
            run = Demo(hosts, place, STEPS, "--seed", i, *called(hosts, pki, 3, 1), *GOES_ON)
            run.until(10)
            start_s = time.monotonic()
            if i % 2:
                agents[hosts.names[1]].kill()
            else:
                hosts.cut(hosts.names[1])
            time.sleep(SETTLED_S)
            run.until(len(run.steps()) + 1)
            times.append(time.monotonic() - start_s)
            run.end()
            assert [row["step"] for row in run.steps()] == list(range(1, STEPS + 1))
            assert_trained_once(run.folder)
            origins.append(", then ".join(ORIGIN.findall(Path(run.out.name).read_text())))
    return {
        "trainer_host_s": statistics.median(times), "trainer_host_all_s": times, "trainer_host_origins": origins,
    }  # fmt: skip


def worse(folder: Path, num_hosts: int, limits: Callable[[Namespaces], None]) -> list[dict[str, Any]]:
    """The steps of a demo after its cables have become worse."""
    place = Path(tempfile.mkdtemp(dir=folder))
    with Namespaces(num_hosts) as hosts:
        pki = certificates(place, hosts)
        for host in hosts.names:
            agent(hosts, host, pki)
        run = Demo(hosts, place, SLOW_STEPS, *over_hosts(hosts, pki, num_hosts - 1))
        run.until(10)
        limits(hosts)
        before = len(run.steps())
        run.end()
        assert_trained_once(run.folder)
        return run.steps()[before:]


def distance(folder: Path) -> dict[str, Any]:
    """Three hosts, all far from each other, two generators."""

    def limits(hosts: Namespaces) -> None:
        for host in hosts.names:
            hosts.limit(host, delay_ms=FAR_MS)

    _, _, *rows = worse(folder, 3, limits)  # but for those that this surprised
    syncs = [row["sync_s"] for row in rows[:-1]]  # nobody waits for the last one's
    return {
        "sync_100ms_s": statistics.median(syncs),
        "syncs_100ms_s": syncs,
        "step_100ms_s": statistics.median(row["step_s"] for row in rows),
    }


def lossy(folder: Path) -> dict[str, Any]:
    """Four hosts, three generators, one of them at a bad cable."""
    rows = worse(folder, 4, lambda hosts: hosts.limit(hosts.names[-1], loss_percent=LOSSY_PERCENT))
    steps = [row["step_s"] for row in rows]
    return {
        "longest_step_lossy_s": max(steps),
        "step_lossy_s": statistics.median(steps),
        "steps_lossy_s": steps,
    }


def assert_trained_once(run: Path) -> None:
    """Every group of every step is of a prompt of its own."""
    rows = [*rollout_rows(run)]
    groups = Counter((row["group_id"], row["index"]) for row in rows)
    assert max(groups.values()) == 1, "a rollout was trained twice"
    prompts = Counter(row["prompt_id"] for row in {row["group_id"]: row for row in rows}.values())
    assert max(prompts.values()) == 1, "a prompt was trained twice within an epoch"


def earlier(folder: Path) -> dict[str, Any]:
    """What other parts, and `weights.py`, have found today."""
    day, found = datetime.datetime.now(tz=datetime.UTC).date().isoformat(), dict[str, Any]()
    for name in ("hosts", "hosts_weights"):
        path = folder / f"{name}-{day}.json"
        told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found |= {figure: value for figure, value in told.items() if figure in FIGURES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--losses", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=90.0, help="no run with losses begins later")
    parser.add_argument("--trainers", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--output", type=Path, help="folder of the result; default: benchmarks/results")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        part, *words = options.inside
        if part == "one_host":
            found = asyncio.run(inside_one_host())
        else:
            inner = {"attach": inside_attach, "registry": inside_registry}[part]
            found = asyncio.run(inner(Path(words[0]), int(words[1])))
        print(json.dumps(found))
        return
    if reason := available():
        sys.exit(f"no network namespaces: {reason}")
    figures = earlier(options.output or RESULTS)
    notes = ["hosts are network namespaces on one machine, whose processors all of them share"]
    settings = {"agents": options.agents, "pairs": options.pairs, "steps": STEPS, "loss_steps": LOSS_STEPS}
    where = {"folder": options.output} if options.output else {}

    def write(found: dict[str, Any]) -> Path:
        """Each part, and each run with losses, is kept as soon as it has ended."""
        figures.update(found)
        return write_result("hosts", settings, figures, notes, **where)

    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "attach": attach,
        "registry": partial(registry, num_agents=options.agents),
        "demo": partial(demo, pairs=options.pairs),
        "losses": partial(losses, number=options.losses, minutes=options.minutes, tell=write),
        "trainers": partial(trainers, number=options.trainers),
        "distance": distance,
        "lossy": lossy,
    }
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.only or PARTS:
            path = write(parts[name](Path(temporary)))
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
