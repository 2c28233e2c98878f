"""What the pods of `llamarl launch kubernetes` run, on hosts in namespaces that have the pods' names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.hosts.namespaces import Namespaces, available
from llamarl.parts.hosts.heartbeat import VARIABLE
from llamarl.parts.hosts.launch import script
from tests.end_to_end.tiny import ROOT, make_model, rows, write_toml
from tests.nightly import nightly

REASON = available()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    nightly("a run on three hosts"),
]
RUN_S = 240.0


@pytest.fixture
def hosts() -> Iterator[Namespaces]:
    with Namespaces(3) as hosts:
        pods = zip(hosts.addresses.values(), ("controller.tiny", "tiny-host-0.tiny", "tiny-host-1.tiny"), strict=True)
        with (hosts.folder / "names").open("a") as names:  # every host's /etc/hosts
            names.writelines(f"{address} {pod}\n" for address, pod in pods)
        yield hosts


def test_pods_meet_and_train(hosts: Namespaces, tmp_path: Path) -> None:
    """Also ranks of one executor on two of them."""
    toml = write_toml(tmp_path, make_model(tmp_path / "model"))
    overrides = [
        *(
            "--launch.kubernetes.image=i",
            "--launch.kubernetes.claim=c",
            "--cluster.num_hosts=2",
            "--generator.replicas=2",
        ),
        *(
            "--output",
            str(tmp_path / "the runs"),
            "--trainer.parallelism.fsdp=2",
            "--cluster.place.trainer=['*-host-*']",
        ),
    ]
    config = script.several_hosts(str(toml), overrides)
    secrets = script.kubernetes_secrets(config)
    manifest = yaml.safe_load_all(script.kubernetes_manifest(config, secrets))
    parts: dict[str, Any] = {f"{part['kind']}/{part['metadata']['name']}": part for part in manifest}
    folder = tmp_path / "etc"
    files = {f"run/{file}": text for file, text in parts["ConfigMap/tiny"]["data"].items()}
    for secret, of_pod in secrets.items():
        files |= {f"{secret}/{file}": text for file, text in of_pod.items()}
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text.replace(script.POD_PKI, str(folder / "tiny-controller-pki")))
        (folder / file).chmod(0o440)

    def pod(host: str, name: str) -> subprocess.Popen[str]:
        spec = parts[f"Job/{name}"]["spec"]["template"]["spec"]
        (secret,) = (one["secret"]["secretName"] for one in spec["volumes"] if one["name"] == "pki")
        *shell, command = spec["containers"][0]["command"]
        command = command.replace(script.POD_PKI, f"{folder}/{secret}").replace("/etc/llamarl", str(folder))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {"PATH": path, VARIABLE: str(tmp_path / f"{name}.heartbeat")}
        with (tmp_path / f"{name}.log").open("w") as log:
            return hosts.popen(host, [*shell, command], env=env, stdout=log, stderr=log, cwd=ROOT)

    controller = pod("host-a", "tiny-controller")
    for number, host in enumerate(("host-b", "host-c")):
        pod(host, f"tiny-host-{number}")
    code = controller.wait(RUN_S)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert code == 0, logs
    steps = [row["step"] for row in rows(tmp_path / "the runs" / "tiny" / "metrics.jsonl") if row["kind"] == "step"]
    assert steps == [1, 2, 3, 4]
    assert "trainer" in logs and "tiny-host-0" in logs and "tiny-host-1" in logs
    for name in ("tiny-controller", "tiny-host-0", "tiny-host-1"):
        assert (tmp_path / f"{name}.heartbeat").exists(), "the probe of the container would fail"
