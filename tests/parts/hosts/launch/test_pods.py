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
    parts: dict[str, Any] = {
        part["kind"]: part for part in yaml.safe_load_all(script.kubernetes_manifest(config, secrets))
    }
    folder, of_hosts = tmp_path / "etc", secrets["tiny-pki"]
    volumes = parts["StatefulSet"]["spec"]["template"]["spec"]["volumes"]
    (items,) = (one["secret"]["items"] for one in volumes if one["name"] == "pki")
    files = {f"run/{file}": text for file, text in parts["ConfigMap"]["data"].items()}
    files |= {f"pki/controller/{file}": text for file, text in secrets["tiny-pki-controller"].items()}
    files |= {f"pki/{item['path']}": of_hosts[item["key"]] for item in items}
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text.replace(script.POD_PKI, str(folder / "pki" / "controller")))
        (folder / file).chmod(0o440)

    def pod(host: str, kind: str, name: str) -> subprocess.Popen[str]:
        [container] = parts[kind]["spec"]["template"]["spec"]["containers"]
        *shell, command = container["command"]
        command = command.replace(script.POD_PKI, f"{folder}/pki/{name}").replace("/etc/llamarl", str(folder))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with (tmp_path / f"{name}.log").open("w") as log:
            return hosts.popen(
                host, [*shell, command], env={"POD_NAME": name, "PATH": path},
                stdout=log, stderr=log, cwd=ROOT,
            )  # fmt: skip

    controller = pod("host-a", "Job", "controller")
    for number, host in enumerate(("host-b", "host-c")):
        pod(host, "StatefulSet", f"tiny-host-{number}")
    code = controller.wait(RUN_S)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert code == 0, logs
    steps = [row["step"] for row in rows(tmp_path / "the runs" / "tiny" / "metrics.jsonl") if row["kind"] == "step"]
    assert steps == [1, 2, 3, 4]
    assert "trainer" in logs and "tiny-host-0" in logs and "tiny-host-1" in logs
