from __future__ import annotations

from pathlib import Path

import pytest

from llamarl.config import ConfigError
from llamarl.config.cluster import ClusterConfig
from llamarl.parts.hosts.machines import open_registry


@pytest.mark.parametrize("address", ["192.0.2.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_refused_before_anything_starts(tmp_path: Path, address: str) -> None:
    settings = ClusterConfig(kind="hosts", listen=f"{address}:6700", pki=str(tmp_path))
    with pytest.raises(ConfigError, match=r"cluster.listen = .* name an address of this machine"):
        open_registry(settings, None, print)
