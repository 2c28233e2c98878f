"""The controller of the test of agents: does what it reads, a JSON list per line, and writes what came of it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from llamarl.cluster.api import ExecutorHandle, ExecutorSpec, HostShare
from llamarl.cluster.engine_files import own_temporary_folder
from llamarl.parts.hosts.certificates import monarch_env
from llamarl.parts.hosts.cluster import HostsCluster
from llamarl.parts.hosts.registry import Registry

CODE = str(Path(__file__).parents[3] / "cluster")
WAIT_S = 240.0


class Scenario:
    def __init__(self, pki: Path, logs: Path) -> None:
        self.registry = Registry(pki, logs, lambda text: None)
        self.pki = pki
        self.executors = dict[str, ExecutorHandle]()

    async def open(self) -> str:
        place = await self.registry.open("127.0.0.2:0")
        self.cluster = HostsCluster(self.registry, "127.0.0.2", monarch_env(self.pki, "controller"))
        return place

    async def until(self, *names: str) -> float:
        """Seconds until exactly these are here, and known."""
        start_s = time.monotonic()
        async with asyncio.timeout(WAIT_S):
            while {name for name, host in self.registry.hosts.items() if host.is_known} != set(names):
                await asyncio.sleep(0.01)
        return time.monotonic() - start_s

    async def spawn(self, name: str, hosts: list[str]) -> list[int]:
        shares = [HostShare(host, hosts.count(host), {"LLAMARL_TEST": f"on {host}"}) for host in dict.fromkeys(hosts)]
        spec = ExecutorSpec(
            name=name, target="executors:Echo", num_ranks=len(hosts), hosts=tuple(shares), code_paths=(CODE,)
        )
        self.executors[name] = await self.cluster.spawn(spec, WAIT_S)
        return self.executors[name].pids

    async def call(self, name: str, method: str, *arguments: Any) -> list[Any]:
        return await self.executors[name].call_each(method, *arguments, timeout_s=WAIT_S)

    async def failed(self, name: str) -> list[Any]:
        """Why, and after how many seconds."""
        start_s = time.monotonic()
        error = await asyncio.wait_for(self.executors[name].failed, WAIT_S)
        return [str(error), time.monotonic() - start_s]

    async def span_age(self, name: str) -> float:
        """How old an executor's last span is when the clock of its host is 1,000 s ahead."""
        host = self.registry.hosts["b"]
        host.offset_s, host.error_s = 1000.0, -1.0
        await self.executors[name].call("sleep", 0.05, timeout_s=WAIT_S)
        spans = (await self.executors[name].status(WAIT_S)).spans
        return time.time() - spans[-1].end_s

    async def stop(self, name: str) -> float:
        start_s = time.monotonic()
        await self.executors[name].stop(WAIT_S)
        return time.monotonic() - start_s

    async def end(self) -> float:
        start_s = time.monotonic()
        await self.cluster.shutdown(WAIT_S)
        return time.monotonic() - start_s


async def main() -> None:
    own_temporary_folder()
    scenario = Scenario(Path(sys.argv[1]), Path(sys.argv[2]))
    while line := await asyncio.to_thread(sys.stdin.readline):
        method, *arguments = json.loads(line)
        try:
            answer = {"value": await getattr(scenario, method)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if method == "end":
            return


if __name__ == "__main__":
    asyncio.run(main())
