"""`llamarl certs`: what it makes, and what it refuses before it makes anything."""

from __future__ import annotations

import socket
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.parts.hosts.certificates import client_context, server_context
from llamarl.parts.hosts.cli.certs import main


def test_a_folder_and_later_another_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pki"
    assert main([str(folder), "--hosts", "b=127.0.0.2,c=127.0.0.3", "--days", "7"]) == 0
    told = capsys.readouterr().out
    last_day = (datetime.now(UTC) + timedelta(days=7)).date().isoformat()
    assert f"b: for b, 127.0.0.2, valid until {last_day}" in told
    assert f"controller: for controller, {socket.gethostname()}, 127.0.0.1, valid until {last_day}" in told
    authority, controller = (folder / "ca.crt").read_bytes(), (folder / "controller.crt").read_bytes()
    assert main([str(folder), "--hosts", "d=127.0.0.4"]) == 0
    assert "ca: new" in told and "ca: new" not in capsys.readouterr().out
    assert (folder / "ca.crt").read_bytes() == authority and (folder / "controller.crt").read_bytes() == controller
    assert main([str(folder), "--hosts", "d=127.0.0.4", "--controller", "head=127.0.0.9"]) == 0
    assert "controller: for controller, head, 127.0.0.9" in capsys.readouterr().out
    assert main([str(folder), "--controller", "head=127.0.0.8"]) == 0
    told = capsys.readouterr().out
    assert "controller: for controller, head, 127.0.0.8" in told and "d: " not in told
    for name in "bcd":
        client_context(folder, name)
    server_context(folder, "controller")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--hosts is missing"),
        (["--hosts", ","], "--hosts is missing"),
        (["--hosts", "b"], "write NAME=ADDRESS"),
        (["--hosts", "b=10.0.0"], "neither an IP address nor a DNS name"),
        (["--hosts", "x/b=10.0.0.2"], "is not the name of a host"),
        (["--hosts", "b=10.0.0.2,b=10.0.0.3"], "'b' is named twice"),
        (["--hosts", "ca=10.0.0.2"], "a file of another"),
        (["--hosts", "controller=10.0.0.2"], "a file of another"),
        (["--hosts", "b=10.0.0.2", "--controller", "head"], "--controller head: write NAME=ADDRESS"),
        (["--hosts", "b=no-such-host.invalid"], "add --controller NAME=ADDRESS"),
        (["--hosts", "b=127.0.0.2", "--days", "0"], "--days 0"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        main([str(tmp_path / "pki"), *arguments])
    assert not (tmp_path / "pki").exists()


def test_folders_of_others_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, full = tmp_path / "file", tmp_path / "full"
    file.write_text("mine")
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    hosts = ["--hosts", "b=127.0.0.2"]
    with pytest.raises(ConfigError, match="is a file"):
        main([str(file), *hosts])
    with pytest.raises(ConfigError, match="holds other files"):
        main([str(full), *hosts])
    assert [path.name for path in full.iterdir()] == ["thesis.txt"] and file.read_text() == "mine"
    monkeypatch.setitem(sys.modules, "llamarl.parts.hosts.issuing", None)
    with pytest.raises(ConfigError, match=r"package `cryptography`.*llamarl\[hosts\]"):
        main([str(tmp_path / "new"), *hosts])
    assert not (tmp_path / "new").exists()


def test_a_damaged_authority_is_refused(tmp_path: Path) -> None:
    folder, hosts = tmp_path / "pki", ["--hosts", "b=127.0.0.2"]
    assert main([str(folder), *hosts]) == 0
    key = (folder / "ca.key").read_text()
    for text in ("mine", (folder / "b.key").read_text()):
        (folder / "ca.key").write_text(text)
        with pytest.raises(ConfigError, match=r"ca\.key"):
            main([str(folder), *hosts])
    (folder / "ca.key").write_text(key)
    assert main([str(folder), *hosts]) == 0
