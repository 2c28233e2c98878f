"""`llamarl certs DIR --hosts NAME=ADDRESS,...`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from llamarl.cli.options import command_parser
from llamarl.config import ConfigError
from llamarl.net.reasons import plain
from llamarl.parts.hosts.certificates import AUTHORITY_DAYS, CONTROLLER, RESERVED, check_member, make_certificates
from llamarl.parts.hosts.home import address_towards

EPILOG = """The first call creates DIR and a certificate authority; later calls add hosts, or renew named ones.
Each host needs ca.crt and its own .crt and .key, and the controller's machine controller.crt and controller.key.
ca.key signs certificates and stays in DIR."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code."""
    parser = command_parser("certs", "Create the TLS certificates of the hosts of a run.", EPILOG)
    parser.add_argument("folder", metavar="DIR", help="folder of the certificates, readable by you only")
    parser.add_argument("--hosts", default="", metavar="NAME=ADDRESS,...", help="IP addresses or DNS names")
    parser.add_argument(
        "--controller", metavar="NAME=ADDRESS", help="default: this machine, with the address that the hosts see"
    )
    parser.add_argument("--days", type=int, default=365, help="validity (365)")
    options = parser.parse_args(arguments)
    if not 1 <= options.days <= AUTHORITY_DAYS:
        raise ConfigError(f"--days {options.days}: certificates are valid for 1 to {AUTHORITY_DAYS} days")
    hosts = _hosts(options.hosts)
    if not (hosts or options.controller):
        raise ConfigError("--hosts is missing; name them, as in --hosts b=10.0.0.2,c=10.0.0.3")
    members: dict[str, tuple[str, ...]] = {name: (name, address) for name, address in hosts.items()}
    if options.controller or not Path(options.folder, f"{CONTROLLER}.crt").exists():
        controller = _pair("--controller", options.controller) if options.controller else _this_machine(hosts)
        check_member(*controller)
        members[CONTROLLER] = (CONTROLLER, *controller)
    is_new = make_certificates(Path(options.folder), members, options.days)
    if is_new:
        print(f"ca: new, valid until {_last_day(AUTHORITY_DAYS)}; ca.key makes certificates, keep it in this folder")
    for name, names in members.items():
        print(f"{name}: for {', '.join(dict.fromkeys(names))}, valid until {_last_day(options.days)}")
    print(f"A host needs ca.crt and its own .crt and .key of {options.folder}")
    return 0


def _hosts(text: str) -> dict[str, str]:
    hosts = dict[str, str]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, address = _pair("--hosts", part)
        check_member(name, address)
        if name in hosts or name in RESERVED:
            why = "named twice" if name in hosts else "the name of a file of another host"
            raise ConfigError(f"--hosts {part}: {name!r} is {why}; give every host a different name")
        hosts[name] = address
    return hosts


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not (name and equals and address):
        raise ConfigError(f"{option} {text}: write NAME=ADDRESS, as in b=10.0.0.2")
    return name, address


def _this_machine(hosts: dict[str, str]) -> tuple[str, str]:
    """Returns this machine's name and address, for the first host."""
    address = next(iter(hosts.values()))
    try:
        return socket.gethostname(), address_towards(address, 9)
    except OSError as error:
        raise ConfigError(f"--hosts {address}: {plain(error)}; or add --controller NAME=ADDRESS") from None


def _last_day(days: int) -> str:
    return (datetime.now(UTC) + timedelta(days=days)).date().isoformat()
