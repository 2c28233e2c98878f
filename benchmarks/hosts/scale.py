"""What many hosts cost the controller.

    python benchmarks/hosts/scale.py [--agents 1024] [--hosts 8] [--ranks 4] [--only registry placement calls streams]

`registry`: so many light agents (`light_agents.py`) call a registry at once: seconds until all are there, and the share
of a core that their beats take. `placement`: processor seconds of placing a trainer on all GPUs of half of 128 hosts,
and generators on the others. `calls`: an executor without torch, with ranks on hosts that are network namespaces
(`namespaces.py`), none of them the controller's: milliseconds of a call to all of them, and of the controller's
processor for it; and, by the bytes that leave its network card, how many times a short call leaves it, and how many
times the groups of a step do. The latter is counted too for 512 ranks on 64 hosts, by what decides who gets which part;
the worse one is `bytes_ratio`. `streams`: descriptors of a process and GiB of buckets under way on a host, counted by
`llamarl/weight_sync/growth.py` for weights from 512 trainer ranks to 512 generator ranks, 8 on each host. What others
have found on the same day stays in the file.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import asyncio
import datetime
import json
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from _record import RESULTS, write_result
from light_agents import light_certificates
from namespaces import Namespaces, available
from runs import PORT, ROOT, WAIT_S, agent, certificates

from llamarl.cluster.api import Deal, ExecutorHandle, ExecutorSpec, HostShare
from llamarl.config import RunConfig
from llamarl.parts.hosts.certificates import monarch_env
from llamarl.parts.hosts.hosting import HostPlacer
from llamarl.parts.hosts.registry import Registry
from llamarl.types import FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup
from llamarl.weight_sync.growth import growth

PARTS = ("registry", "placement", "calls", "streams")
PLACED_HOSTS, GPUS = 128, 8
MANY_RANKS = 512
CALLS, SHORT_BYTES, SHORT_CALLS = 200, 60_000, 20
GROUPS, ROLLOUTS, TOKENS = 64, 8, 4096
SETTLED_S, LISTENED_S = 3.0, 20.0


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def registry(folder: Path, number: int) -> dict[str, Any]:
    """So many light agents, in a process of their own."""
    light_certificates(folder / "many", number)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
    one = Registry(folder / "many", None, lambda text: None)
    place = await one.open("127.0.0.1:0")
    command = [sys.executable, str(Path(__file__).with_name("light_agents.py")), place, str(folder / "many"), "0"]
    agents = subprocess.Popen(
        [*command, str(number)], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert agents.stdout is not None
        assert agents.stdin is not None
        assert agents.stdout.readline() == "ready\n"
        start_s = time.monotonic()
        agents.stdin.write("go\n")
        agents.stdin.flush()
        await one.until(number, WAIT_S)
        here_s = time.monotonic() - start_s
        await asyncio.sleep(SETTLED_S)
        before_s, start_s = _cpu_s(), time.monotonic()
        await asyncio.sleep(LISTENED_S)
        share = (_cpu_s() - before_s) / (time.monotonic() - start_s)
        assert len(one.hosts) == number, "agents were lost meanwhile"
        await one.close()
    finally:
        agents.kill()
        agents.wait()
    return {"agents_here_s": here_s, "agents_core_share": share}


def placement() -> dict[str, Any]:
    has = SimpleNamespace(gpus=GPUS, cores=64)
    hosts = {f"node-{i:03}": SimpleNamespace(inventory=has, is_leaving=False) for i in range(PLACED_HOSTS)}
    half = PLACED_HOSTS * GPUS // 2
    sections = {
        "model": {"path": "m"}, "data": {"train": "running_total"},
        "cluster": {"kind": "hosts", "listen": "10.0.0.1:6700", "num_hosts": PLACED_HOSTS},
        "trainer": {"device": "cuda", "parallelism": {"fsdp": half}},
        "generator": {"device": "cuda", "replicas": half},
    }  # fmt: skip
    config, times = RunConfig.model_validate(sections), list[float]()
    for _ in range(5):
        before_s = time.process_time()
        HostPlacer(config, cast(Any, hosts))
        times.append(time.process_time() - before_s)
    return {"placement_s": statistics.median(times)}


def step_groups() -> list[RolloutGroup]:
    """Groups of one step, of random tokens."""
    draw, result = np.random.default_rng(0), RewardResult(outcome=Outcome.SCORE, value=1.0)

    def rollout(group: int, index: int) -> Rollout:
        columns = {
            "token_ids": draw.integers(0, 50_000, TOKENS, np.int32),
            "behavior_logprobs": draw.random(TOKENS, np.float32),
            "policy_versions": np.full(TOKENS, group, np.int32),
        }
        return Rollout(group_id=group, index=index, columns=columns, finish_reason=FinishReason.STOP)

    return [
        RolloutGroup(
            group_id=group,
            prompt=Prompt(prompt_id=f"{group}", text="1 + 1", token_ids_T=np.arange(9, dtype=np.int32), answer="2"),
            rollouts=tuple(rollout(group, index) for index in range(ROLLOUTS)),
            results=(result,) * ROLLOUTS,
            responses=("2",) * ROLLOUTS,
        )
        for group in range(GROUPS)
    ]


def counted(groups: list[RolloutGroup], num_ranks: int) -> float:
    """Bytes that leave for a step on so many ranks, by those of its groups."""
    from llamarl.cluster.monarch import MAX_SENDS

    payload = pickle.dumps((([one.group_id for one in groups], groups), {}, False), pickle.HIGHEST_PROTOCOL)
    deal = Deal(1, len(payload), "step")
    parts = enumerate(deal.parts(payload, num_ranks))
    dealt = sum(len(pickle.dumps((1, place, part), pickle.HIGHEST_PROTOCOL)) for place, (_, part) in parts)
    return (dealt + MAX_SENDS * len(pickle.dumps(deal))) / len(pickle.dumps(groups, pickle.HIGHEST_PROTOCOL))


async def inside_calls(pki: Path, folder: str, per_host: int, names: list[str]) -> dict[str, Any]:
    """Runs in the first host."""
    from llamarl.parts.hosts.cluster import HostsCluster

    address = os.environ["CONTROLLER"]
    registry = Registry(pki, None, lambda text: None)
    await registry.open(f"{address}:{PORT}")
    await registry.until(len(names), WAIT_S)
    cluster = HostsCluster(registry, address, monarch_env(pki, "controller"))
    spec = ExecutorSpec(
        name="all", target="executors:Sharing", options={"folder": folder}, num_ranks=per_host * len(names),
        hosts=tuple(HostShare(name, per_host, {}) for name in names), code_paths=(str(ROOT / "tests" / "cluster"),),
    )  # fmt: skip
    handle, times = await cluster.spawn(spec, WAIT_S), list[float]()
    before_s = _cpu_s()
    for _ in range(CALLS):
        start_s = time.monotonic()
        await handle.call("echo", 1, timeout_s=WAIT_S)
        times.append((time.monotonic() - start_s) * 1e3)
    controller_ms = (_cpu_s() - before_s) * 1e3 / CALLS
    short, groups = bytes(SHORT_BYTES), step_groups()
    sends = await _left(handle, [short] * SHORT_CALLS) / (SHORT_CALLS * SHORT_BYTES)
    ratio = await _left(handle, [groups]) / len(pickle.dumps(groups, pickle.HIGHEST_PROTOCOL))
    await cluster.shutdown(8.0)
    found = {"call_all_ms": statistics.median(times), "call_controller_ms": controller_ms}
    return found | {"sends_per_call": sends, "bytes_ratio_measured": ratio}


async def _left(handle: ExecutorHandle, values: list[Any]) -> int:
    """Bytes that leave this host while all ranks are told these, one after the other."""
    before = _sent_bytes()
    for value in values:
        await handle.call("remember", value, timeout_s=WAIT_S)
    return _sent_bytes() - before


def _sent_bytes() -> int:
    """Bytes that have left this network namespace."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


def calls(folder: Path, num_hosts: int, per_host: int) -> dict[str, Any]:
    with Namespaces(1 + num_hosts) as hosts:
        pki = certificates(folder, hosts)
        first, *others = hosts.names
        for host in others:
            agent(hosts, host, pki)
        (folder / "parts").mkdir()
        process = hosts.popen(
            first, [sys.executable, __file__, "--inside", str(pki), str(folder / "parts"), str(per_host), *others],
            env={"PYTHONPATH": str(ROOT), "CONTROLLER": hosts.addresses[first]}, stdout=subprocess.PIPE, text=True,
            cwd=ROOT,
        )  # fmt: skip
        told, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, told
    found = json.loads(told.splitlines()[-1])
    found["bytes_ratio_counted"] = counted(step_groups(), MANY_RANKS)
    return found | {"bytes_ratio": max(found["bytes_ratio_measured"], found["bytes_ratio_counted"])}


def earlier(folder: Path) -> dict[str, Any]:
    """What this file's parts, and others (of weights), have found today."""
    path = folder / f"scale-{datetime.datetime.now(tz=datetime.UTC).date().isoformat()}.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    about = ("name", "date", "command", "machine", "versions", "settings", "notes")
    return {figure: value for figure, value in told.items() if figure not in about}


def streams() -> dict[str, Any]:
    found = growth(MANY_RANKS, MANY_RANKS, GPUS)
    return {
        "max_descriptors": max(found.trainer_descriptors, found.generator_descriptors),
        "stream_gib": found.scratch_bytes / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1024)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4, help="of each host")
    parser.add_argument("--only", nargs="+", choices=PARTS)
    parser.add_argument("--output", type=Path, help="folder of the result; default: benchmarks/results")
    parser.add_argument("--inside", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        pki, folder, per_host, *names = options.inside
        print(json.dumps(asyncio.run(inside_calls(Path(pki), folder, int(per_host), names))))
        return
    only, figures = options.only or PARTS, earlier(options.output or RESULTS)
    if "calls" in only and (reason := available()):
        sys.exit(f"no network namespaces: {reason}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if "registry" in only:
            figures |= asyncio.run(registry(folder, options.agents))
        if "placement" in only:
            figures |= placement()
        if "calls" in only:
            figures |= calls(folder, options.hosts, options.ranks)
    if "streams" in only:
        figures |= streams()
    notes = ["agents and hosts are processes of one machine, whose processors all of them share"]
    settings = {
        "agents": options.agents, "hosts": options.hosts, "ranks_per_host": options.ranks, "placed_hosts": PLACED_HOSTS,
        "groups": GROUPS, "rollouts": ROLLOUTS, "tokens": TOKENS,
    }  # fmt: skip
    where = {"folder": options.output} if options.output else {}
    print(write_result("scale", settings, figures, notes, **where).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
