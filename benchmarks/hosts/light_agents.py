"""Light agents: connections that call a registry and answer its beats as agents of hosts do, with nothing behind them.

    python benchmarks/hosts/light_agents.py HOST:PORT PKI FIRST NUMBER

All are in one process, with the address 127.0.0.1 and certificates of `AT_ONCE` names each. They call when a line has
been read, once the first has been written.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import sys
import time
from pathlib import Path

from llamarl.parts.hosts.agent import call
from llamarl.parts.hosts.certificates import client_context, make_certificates
from llamarl.parts.hosts.home import BROKEN, Inventory, own_inventory

ADDRESS = "127.0.0.1"
AT_ONCE = 32
"""Agents that share a certificate."""
HEAR_S = 30.0


def light_certificates(folder: Path, number: int) -> None:
    """Certificates for so many light agents, and the controller's."""
    members = {
        f"light-{first}": (*(f"agent-{i}" for i in range(first, first + AT_ONCE)), ADDRESS)
        for first in range(0, number, AT_ONCE)
    }
    make_certificates(folder, members | {"controller": ("controller", ADDRESS)}, days=2)


async def agent(place: str, context: ssl.SSLContext, inventory: Inventory) -> None:
    """One of them, until the registry hangs up; it calls again while it is put off."""
    while True:
        try:
            line = await call(place, context, ADDRESS)
            try:
                await line.hear(HEAR_S)
                line.tell(**inventory.model_dump())
                await line.hear(HEAR_S)
                line.tell(url="tcp://nowhere", keeper=("", ""))
                while (message := await line.hear(HEAR_S))["what"] != "bye":
                    line.tell(answer=message["ask"], time=time.time(), logs=[])
                return
            finally:
                line.close()
        except BROKEN:
            await asyncio.sleep(random.uniform(0.3, 2.0))


async def main(place: str, pki: Path, first: int, number: int) -> None:
    own = own_inventory("", ADDRESS, "", 0)
    contexts = {i: client_context(pki, f"light-{i}") for i in range(0, first + number, AT_ONCE) if i >= first - AT_ONCE}
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    agents = (
        agent(place, contexts[i - i % AT_ONCE], own.model_copy(update={"name": f"agent-{i}"}))
        for i in range(first, first + number)
    )
    await asyncio.gather(*agents)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
