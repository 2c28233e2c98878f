"""Who has a certificate of the run's authority, for its own name and address, is let in; all others hear why not."""

from __future__ import annotations

import shlex
import shutil
import socket
import ssl
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.net.reasons import plain
from llamarl.parts.hosts.certificates import (
    CONTROLLER,
    _shown,
    check_controller,
    check_member,
    client_context,
    make_certificates,
    mismatch,
    monarch_env,
    server_context,
)
from llamarl.parts.hosts.cli import certs

WAIT_S = 240.0
CONTROLLER_IP, B_IP, C_IP = "127.0.0.2", "127.0.0.3", "127.0.0.4"
MEMBERS = {CONTROLLER: (CONTROLLER, "head", CONTROLLER_IP), "b": ("b", B_IP), "c": ("c", C_IP)}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates") / "pki"
    assert make_certificates(folder, MEMBERS, days=2)
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same names by another authority."""
    folder = tmp_path_factory.mktemp("foreign") / "pki"
    make_certificates(folder, MEMBERS, days=2)
    return folder


def _mixed(folder: Path, authority: Path, member: Path, name: str) -> Path:
    """A folder that trusts one authority and shows a certificate of another."""
    folder.mkdir()
    shutil.copy(authority / "ca.crt", folder)
    for suffix in (".crt", ".key"):
        shutil.copy(member / f"{name}{suffix}", folder)
    return folder


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, calls: str = CONTROLLER_IP) -> dict[str, object]:
    """One byte from a server at 127.0.0.2 to a client and back: what each end says when it refuses, and who called."""
    told = dict[str, object]()

    def serve() -> None:
        connection, _ = listener.accept()
        connection.settimeout(WAIT_S)
        try:
            with server.wrap_socket(connection, server_side=True) as secured:
                told["version"], told["caller"] = secured.version(), secured.getpeercert()
                secured.sendall(b"x")
                told["echo"] = secured.recv(1)
        except OSError as error:
            told["server"] = str(error)
            connection.close()

    with closing(socket.create_server((CONTROLLER_IP, 0))) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        plain = socket.create_connection(listener.getsockname(), timeout=WAIT_S)
        try:
            with client.wrap_socket(plain, server_hostname=calls) as secured:
                secured.sendall(secured.recv(1))  # in TLS 1.3 the server's refusal arrives here
        except OSError as error:
            told["client"] = str(error)
        finally:
            plain.close()
            thread.join(WAIT_S)
    assert not thread.is_alive()
    return told


@pytest.mark.parametrize("calls", [CONTROLLER_IP, "head"])
def test_hosts_and_controller_let_each_other_in(pki: Path, calls: str) -> None:
    told = handshake(server_context(pki, CONTROLLER), client_context(pki, "b"), calls)
    check_controller(pki, f"{calls}:6700")
    assert told["echo"] == b"x" and told["version"] == "TLSv1.3" and "server" not in told
    caller = told["caller"]
    assert isinstance(caller, dict)
    assert mismatch(caller, "b", B_IP) == ""
    assert mismatch(caller, "c", B_IP) == f"its certificate is for b, {B_IP}, not for c"
    assert mismatch(caller, "b", C_IP) == f"its certificate is for b, {B_IP}, not for {C_IP}"


def test_a_caller_without_certificate_is_refused(pki: Path) -> None:
    client = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    told = handshake(server_context(pki, CONTROLLER), client)
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in str(told["server"]) and "echo" not in told
    assert "CERTIFICATE_REQUIRED" in str(told["client"])


def test_a_caller_of_another_authority_is_refused(pki: Path, foreign: Path, tmp_path: Path) -> None:
    stranger = _mixed(tmp_path / "stranger", authority=pki, member=foreign, name="b")
    told = handshake(server_context(pki, CONTROLLER), client_context(stranger, "b"))
    assert "CERTIFICATE_VERIFY_FAILED" in str(told["server"]) and "echo" not in told
    assert "ALERT" in str(told["client"])


def test_a_controller_of_another_authority_is_refused(pki: Path, foreign: Path) -> None:
    told = handshake(server_context(foreign, CONTROLLER), client_context(pki, "b"))
    assert "CERTIFICATE_VERIFY_FAILED" in str(told["client"]) and "echo" not in told


@pytest.mark.parametrize("address", ["127.0.0.9", "elsewhere"])
def test_a_controller_that_listens_where_its_certificate_is_not_for_is_refused(pki: Path, address: str) -> None:
    """Hosts would take it for one of another authority."""
    with pytest.raises(ConfigError) as refused:
        check_controller(pki, f"{address}:6700")
    assert str(refused.value) == (
        f"cluster.listen = '{address}:6700': controller.crt in {pki} is for controller, head, 127.0.0.2, not for "
        f"{address}, so no host would believe it; listen at one of these, or run "
        f"`llamarl certs {pki} --controller head={address}`"
    )
    words = shlex.split(str(refused.value).rpartition("llamarl certs ")[2].rstrip("`"))
    certs.main([str(shutil.copytree(pki, pki.parent / f"{address}-pki")), *words[1:]])
    check_controller(pki.parent / f"{address}-pki", f"{address}:6700")


def test_a_controller_that_nobody_would_believe_is_refused(pki: Path, foreign: Path, tmp_path: Path) -> None:
    own = _mixed(tmp_path / "own", authority=foreign, member=pki, name=CONTROLLER)
    with pytest.raises(ConfigError, match=r"cluster.pki = '.*own': no host would believe the controller: its cert"):
        check_controller(own, f"{CONTROLLER_IP}:6700")


def test_a_host_that_poses_as_the_controller_is_refused(pki: Path) -> None:
    told = handshake(server_context(pki, "c"), client_context(pki, "b"))
    assert "not valid for '127.0.0.2'" in str(told["client"]) and "echo" not in told
    with pytest.raises(ssl.SSLCertVerificationError) as refused:
        _shown(pki, "127.0.0.9")
    assert plain(refused.value).startswith("its certificate lacks the name or address that this end connected to")


def test_a_certificate_whose_time_is_over_is_told_so(pki: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(pki, tmp_path / "pki"))
    make_certificates(other, {CONTROLLER: MEMBERS[CONTROLLER]}, days=0)
    with pytest.raises(ConfigError, match=r"its certificate has expired by this machine's clock; .*`llam"):
        check_controller(other, "127.0.0.2:6700")


@pytest.mark.parametrize("end", ["server", "client"])
def test_an_expired_certificate_is_refused(pki: Path, tmp_path: Path, end: str) -> None:
    expired = tmp_path / "pki"
    shutil.copytree(pki, expired)
    name = CONTROLLER if end == "server" else "b"
    assert not make_certificates(expired, {name: MEMBERS[name]}, days=-1)
    server = server_context(expired if end == "server" else pki, CONTROLLER)
    told = handshake(server, client_context(expired if end == "client" else pki, "b"))
    assert "certificate has expired" in str(told["client" if end == "server" else "server"]) and "echo" not in told


def test_old_tls_is_refused(pki: Path) -> None:
    client = client_context(pki, "b")
    client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    assert "echo" not in handshake(server_context(pki, CONTROLLER), client)


def test_keys_are_private_and_hosts_can_be_added(pki: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pki"
    shutil.copytree(pki, folder)
    before = (folder / "b.key").read_bytes()
    assert not make_certificates(folder, {"d": ("d", "127.0.0.5")}, days=2)
    assert (folder / "b.key").read_bytes() == before
    assert handshake(server_context(pki, CONTROLLER), client_context(folder, "d"))["echo"] == b"x"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    names = ("ca", CONTROLLER, "b", "c", "d")
    assert modes == {f"{name}.crt": 0o644 for name in names} | {f"{name}.key": 0o600 for name in names}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_monarch_gets_absolute_paths(pki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pki.parent)
    files = monarch_env(Path("pki"), "b")
    assert files == {
        "HYPERACTOR_TLS_CA": str(pki / "ca.crt"),
        "HYPERACTOR_TLS_CERT": str(pki / "b.crt"),
        "HYPERACTOR_TLS_KEY": str(pki / "b.key"),
    }


def test_files_that_cannot_work_are_named(pki: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/x\.crt is missing"):
        client_context(pki, "x")
    folder = tmp_path / "pki"
    shutil.copytree(pki, folder)
    shutil.copy(folder / "c.key", folder / "b.key")
    with pytest.raises(ConfigError, match=r"b\.crt and .*b\.key do not fit: KEY_VALUES_MISMATCH"):
        server_context(folder, "b")
    (folder / "c.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"c\.key can be read by everybody; run chmod 600"):
        monarch_env(folder, "c")
    (folder / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"has no ca\.key"):
        make_certificates(folder, {"d": ("d", "127.0.0.5")}, days=2)


@pytest.mark.parametrize("name", ["", "a/b", "../b", ".b", "b c", "b\n", "b$(x)", "x" * 64])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a host"):
        check_member(name, "10.0.0.2")


@pytest.mark.parametrize("address", ["10.0.0", "10.0.0.300", "10.0.0.2:70", "a b", "", "DNS:x, IP:10.0.0.1"])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is neither an IP address nor a DNS name"):
        check_member("b", address)


@pytest.mark.parametrize("address", ["10.0.0.2", "fd00::2", "b.example.org", "agent-0.agents"])
def test_good_addresses_are_taken(address: str) -> None:
    check_member("agent-0", address)
