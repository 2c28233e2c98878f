"""`llamarl host ADDRESS`."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from llamarl.cli.main import FAILURE
from llamarl.cli.options import command_parser
from llamarl.cluster.engine_files import own_temporary_folder
from llamarl.config import ConfigError
from llamarl.config.cluster import MAX_PORT
from llamarl.distributed.links import interface_of
from llamarl.net.reasons import plain
from llamarl.parts.hosts.agent import DRAIN, HostAgent, HostIdentity
from llamarl.parts.hosts.certificates import check_member
from llamarl.parts.hosts.home import address_towards

EPILOG = """It connects to the run, and again after that run has ended. Executors inherit its environment.
Ctrl-C or SIGTERM: its work moves to other hosts, then it ends; a second signal ends it at once.
Exit codes: 0 released or given up, 1 no controller answers, 2 refused, with the reason."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    options = _parser().parse_args(arguments)
    controllers = options.controller.split(",")
    for place in controllers:
        host, _, port = place.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
            raise ConfigError(f"ADDRESS {place!r} is not address:port; give the run's cluster.listen")
    if options.drain:
        return _drain(controllers, options.name)
    address = options.address or _own_address(controllers[0])
    check_member(options.name, address)
    if ":" in address:
        raise ConfigError(
            f"--address {address}: hosts are reached by IPv4 addresses or names only; give one of this machine"
        )
    for option, given in (("--address", options.address), ("--weights-address", options.weights_address)):
        if given and not _is_here(given):
            raise ConfigError(f"{option} {given}: this machine has no such IPv4 address; give one of `ip -4 address`")
    if options.weights_address.startswith("127.") and not address.startswith("127."):
        raise ConfigError(
            f"--weights-address {options.weights_address}: other hosts do not reach it; give one of `ip -4 address`"
        )
    own_temporary_folder()
    identity = HostIdentity(
        name=options.name, address=address, weights_address=options.weights_address, pki=Path(options.pki)
    )
    give_up_s = options.give_up if options.give_up > 0 else math.inf
    agent = HostAgent(controllers, identity, _say, once=options.once, give_up_s=give_up_s)
    return asyncio.run(agent.run())


def _parser() -> ArgumentParser:
    parser = command_parser("host", "Make this machine available to a run with cluster.kind = 'hosts'.", EPILOG)
    parser.add_argument(
        "controller",
        metavar="ADDRESS",
        help="cluster.listen of the run, or several, separated by commas",
    )
    parser.add_argument("--pki", default="pki", help="folder with ca.crt, NAME.crt and NAME.key; default: pki")
    parser.add_argument("--name", default=socket.gethostname().split(".")[0], help="default: the name of this machine")
    parser.add_argument(
        "--address", default="", help="address of this host for the others; default: the one that reaches ADDRESS"
    )
    parser.add_argument("--weights-address", default="", help="address of this host for weights; default: --address")
    parser.add_argument("--once", action="store_true", help="end after the first run")
    parser.add_argument(
        "--give-up",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="end without a controller after this time; default: never",
    )
    parser.add_argument("--drain", action="store_true", help="ask the running `llamarl host` of this name to leave")
    return parser


def _drain(controllers: Sequence[str], name: str) -> int:
    """Makes the agent of a host leave, with or without a run. Returns the exit code."""
    agents = list(_agents(controllers, name))
    for pid in agents:
        os.kill(pid, DRAIN)
    if not agents:
        print(f"llamarl host: {name} does not call {','.join(controllers)} from here as this user", file=sys.stderr)
    return 0 if agents else FAILURE


def _agents(controllers: Sequence[str], name: str) -> Iterator[int]:
    """Yields processes of this user and network namespace that are the agent of this host for one of these
    controllers."""
    own = _kind(Path("/proc/self"))
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):  # ended, of another user, or another command
            words = (entry / "cmdline").read_text().split("\0")[:-1]
            at = words.index("host")
            if Path(words[at - 1]).name == "llamarl" and _kind(entry) == own:
                options = _parser().parse_args(words[at + 1 :])
                if options.name == name and not options.drain and {*options.controller.split(",")} & {*controllers}:
                    yield int(entry.name)


def _kind(process: Path) -> tuple[int, str, str]:
    """Returns user, interpreter and network namespace of a process. Raises OSError."""
    return process.stat().st_uid, os.readlink(process / "exe"), os.readlink(process / "ns/net")


def _is_here(address: str) -> bool:
    """Returns whether this machine has the address. True for a name, which may resolve later."""
    return not address.replace(".", "").isdigit() or bool(interface_of(address))


def _own_address(place: str) -> str:
    """Returns the address from which the system reaches the controller. Raises ConfigError."""
    host, _, port = place.rpartition(":")
    try:
        return address_towards(host, int(port))
    except OSError as error:
        raise ConfigError(f"ADDRESS {place}: {plain(error)}") from None


def _say(text: str) -> None:
    print(f"llamarl host: {text}", flush=True)
