from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.config.cluster import ClusterConfig
from llamarl.parts.hosts.certificates import CONTROLLER, make_certificates
from llamarl.parts.hosts.machines import check, open_registry


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("no-such-host.invalid:6700", "the host name is unknown; .*; name an address and a free port of this machine$"),
        ("192.0.2.7:6700", "this machine has no such address; name an address and a free port of this machine$"),
        (
            "127.0.0.9:0",
            r"controller.crt in .*pki is for controller, a, 127.0.0.2, not for 127.0.0.9, so no host would",
        ),
    ],
)
def test_where_hosts_cannot_call_is_refused_before_they_wait(tmp_path: Path, listen: str, why: str) -> None:
    """What is wrong with the address itself comes first."""
    make_certificates(tmp_path / "pki", {CONTROLLER: (CONTROLLER, "a", "127.0.0.2")}, days=2)
    check(ClusterConfig(kind="hosts", listen="127.0.0.2:0", pki=str(tmp_path / "pki")))
    with pytest.raises(ConfigError, match=f"^cluster.listen = '{listen}': {why}"):
        check(ClusterConfig(kind="hosts", listen=listen, pki=str(tmp_path / "pki")))


@pytest.mark.parametrize("address", ["192.0.2.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused_before_anything_starts(tmp_path: Path, address: str) -> None:
    settings = ClusterConfig(kind="hosts", listen=f"{address}:6700", pki=str(tmp_path))
    with pytest.raises(ConfigError, match=r"cluster.listen = .* name an address of this machine"):
        open_registry(settings, None, print)
