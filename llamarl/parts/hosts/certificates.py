"""Certificates that authenticate the hosts of a run: one folder with `ca.crt` and, per name, `.crt` and `.key`.

Each run has its own authority. Its key (`ca.key`) stays in the folder where certificates are created: a host needs only
`ca.crt` and the two files of its name. Keys are ECDSA P-256. The package `cryptography`, which only `llamarl certs` and
`llamarl launch` need, writes them.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamarl.config import ConfigError
from llamarl.net.reasons import ELSEWHERE, plain
from llamarl.parts.hosts.home import is_ip

CONTROLLER = "controller"
"""Name of the controller's certificate."""
RESERVED = ("ca", CONTROLLER)
"""Names that a host cannot have because their files have other uses."""
AUTHORITY_DAYS = 3650
"""Validity of `ca.crt`."""
NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def check_member(name: str, address: str) -> None:
    """Raises ConfigError unless a certificate can contain the name and the address (IP address or DNS name)."""
    if not NAME.fullmatch(name):
        rule = "letters, digits, dots, dashes and underscores, at most 63"
        raise ConfigError(f"`{name}={address}`: {name!r} is not the name of a host; use {rule}")
    if not is_ip(address) and (not NAME.fullmatch(address) or re.fullmatch(r"[\d.]+", address)):
        raise ConfigError(f"`{name}={address}`: {address!r} is neither an IP address nor a DNS name")


def make_certificates(folder: Path, members: Mapping[str, tuple[str, ...]], days: int) -> bool:
    """Creates a certificate with a new key for each of `members`: file name -> DNS names and IP addresses.

    Returns whether the authority is also new. Replaces existing files of these names.

    Raises:
        ConfigError: the folder has other contents, no `ca.key` or damaged files, or the package `cryptography` is
            missing.
    """
    is_new = _check_folder(folder)
    try:
        from llamarl.parts.hosts.issuing import Authority
    except ModuleNotFoundError:
        raise ConfigError(
            "certificates need the package `cryptography`, which is missing; run pip install 'llamarl[hosts]'"
        ) from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as scratch:
            made = Path(scratch)
            authority = Authority.new(made, AUTHORITY_DAYS) if is_new else Authority.read(folder)
            for name, names in members.items():
                authority.issue(made, name, names, days)
            for path in [*made.glob("*.key"), *made.glob("*.crt")]:
                path.chmod(0o600 if path.suffix == ".key" else 0o644)
                path.replace(folder / path.name)
    except OSError as error:
        raise ConfigError(f"cannot write certificates to {folder}: {error.strerror}; name another folder") from None
    return is_new


def _check_folder(folder: Path) -> bool:
    """Returns whether a new authority is needed. Raises ConfigError if the folder must not be written."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder for the certificates")
    if (folder / "ca.crt").exists():
        if not (folder / "ca.key").exists():
            raise ConfigError(f"{folder} has no ca.key; make certificates in the folder from which it was copied")
        return False
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} holds other files; name a new folder, or one that `llamarl certs` made")
    return True


def server_context(pki: Path, name: str) -> ssl.SSLContext:
    """Returns a TLS 1.3 context for the listening end. Clients must have a certificate of the same authority.

    The certificate may belong to another member: check it with `mismatch`. Raises ConfigError.
    """
    return _context(pki, name, ssl.PROTOCOL_TLS_SERVER)


def client_context(pki: Path, name: str) -> ssl.SSLContext:
    """Returns a TLS 1.3 context for the connecting end. The peer's certificate must contain `server_hostname`. Raises
    ConfigError.

    The handshake completes before the peer has checked this end's certificate: its refusal arrives with the first read,
    and is lost if something was written before.
    """
    return _context(pki, name, ssl.PROTOCOL_TLS_CLIENT)


def monarch_env(pki: Path, name: str) -> dict[str, str]:
    """Returns the variables by which Monarch's `tls://` finds the certificates. Raises ConfigError."""
    authority, certificate, key = _files(pki, name)
    return {"HYPERACTOR_TLS_CA": authority, "HYPERACTOR_TLS_CERT": certificate, "HYPERACTOR_TLS_KEY": key}


def check_controller(pki: Path, listen: str) -> None:
    """Raises ConfigError unless the controller's certificate is valid for hosts that connect to `cluster.listen`."""
    address = listen.rpartition(":")[0]
    try:
        _shown(pki, address)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code not in ELSEWHERE:
            raise ConfigError(f"cluster.pki = '{pki}': no host would believe the controller: {plain(error)}") from None
        has = controller_names(pki)
        name = next((one for one in has if one != CONTROLLER and not is_ip(one)), socket.gethostname())
        raise ConfigError(
            f"cluster.listen = {listen!r}: {CONTROLLER}.crt in {pki} is for {', '.join(has)}, not for {address}, so no "
            f"host would believe it; listen at one of these, or run `llamarl certs {pki} --controller {name}={address}`"
        ) from None


def controller_names(pki: Path) -> list[str]:
    """Returns names and addresses of the controller's certificate, which must be valid. Raises SSLError and
    ConfigError."""
    return [value for _, value in _shown(pki, None).get("subjectAltName", ())]


def _shown(pki: Path, address: str | None) -> dict[str, Any]:
    """Returns the controller's certificate as a client at an address sees it. None means any address. Raises
    SSLCertVerificationError and ConfigError."""
    context, there, back = client_context(pki, CONTROLLER), ssl.MemoryBIO(), ssl.MemoryBIO()
    context.check_hostname = address is not None
    client = context.wrap_bio(back, there, server_hostname=address)
    server = server_context(pki, CONTROLLER).wrap_bio(there, back, server_side=True)
    for end in (client, server, client):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return dict(client.getpeercert() or {})


def mismatch(certificate: Mapping[str, Any] | None, *names: str) -> str:
    """Returns why a peer's certificate (`getpeercert()`) lacks one of these names and addresses. Empty means that it
    has all."""
    has = [value for _, value in (certificate or {}).get("subjectAltName", ())]
    lacks = [name for name in names if name not in has]
    return f"its certificate is for {', '.join(has) or 'nobody'}, not for {', '.join(lacks)}" if lacks else ""


def _files(pki: Path, name: str) -> tuple[str, str, str]:
    """Returns authority, certificate and key. Raises ConfigError if a file is missing or the key is readable by
    others."""
    paths = [Path(os.path.abspath(pki)) / file for file in ("ca.crt", f"{name}.crt", f"{name}.key")]
    for path in paths:
        if not os.access(path, os.R_OK):
            what = "cannot be read" if path.exists() else "is missing"
            raise ConfigError(f"{path} {what}; `llamarl certs` makes it, then it is copied to its host")
    if stat.S_IMODE(paths[2].stat().st_mode) & stat.S_IROTH:
        raise ConfigError(f"{paths[2]} can be read by everybody; run chmod 600 {paths[2]}")
    return str(paths[0]), str(paths[1]), str(paths[2])


def _context(pki: Path, name: str, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    authority, certificate, key = _files(pki, name)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(f"{certificate} and {key} do not fit: {error.reason or error}; make them anew") from None
    return context
