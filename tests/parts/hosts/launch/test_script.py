"""What is handed to schedulers: golden files, shells and schemas that read it, values that try to get out of it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from llamarl.config import ConfigError, load_config
from llamarl.parts.hosts.certificates import CONTROLLER, client_context, server_context
from llamarl.parts.hosts.cli.launch import main
from llamarl.parts.hosts.launch import script
from tests.end_to_end.tiny import llamarl_here, make_model

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[4]
DEMO = str(ROOT / "configs" / "demo.toml")
HOSTS = ("--cluster.num_hosts", "3")
POD = (
    "--launch.kubernetes.image",
    "registry.example/llamarl:1",
    "--launch.kubernetes.claim",
    "shared",
    "--model.warm_start=",
)
GPUS = (
    "--trainer.device=cuda",
    "--generator.device=cuda",
    "--trainer.parallelism.fsdp=4",
    "--generator.tensor_parallel=2",
)
OVERWRITE = "LLAMARL_GOLDEN"
"""Set to write the golden files anew."""


@pytest.fixture(autouse=True)
def _fixed_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python")


def slurm(*overrides: str) -> str:
    return script.slurm_script(script.several_hosts(DEMO, overrides), DEMO, overrides)


def kubernetes(*overrides: str) -> str:
    return script.kubernetes_manifest(script.several_hosts(DEMO, overrides))


def check_golden(name: str, text: str) -> None:
    text = text.replace(os.getcwd(), "/home/me/project").replace(str(ROOT), "/home/me/llamarl")
    if os.environ.get(OVERWRITE):
        (HERE / name).write_text(text, encoding="utf-8")
    golden = (HERE / name).read_text(encoding="utf-8")
    assert text == golden, f"{name} differs; if that is meant, run this test with {OVERWRITE}=1 and look at the change"


def test_slurm_as_before() -> None:
    options = ("--launch.slurm.partition", "gpu", "--launch.slurm.time", "12:00:00", "--output", "my runs", "--steps=7")
    check_golden("slurm.sh", slurm(*HOSTS, *GPUS, *options))


def test_kubernetes_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "dump_toml", lambda _: 'name = "demo"\n\n[model]\npath = "base"\n')
    check_golden(
        "kubernetes.yaml",
        kubernetes(*HOSTS, *POD, *GPUS, "--launch.kubernetes.cpu=16", "--launch.kubernetes.memory=64Gi"),
    )


def test_bash_reads_the_script() -> None:
    text = slurm(*HOSTS, "--output", "it's; $(touch here) `x`", "--data.template", 'a "b"\n$c')
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("job", [1, 19_999, 20_000, 39_999, 2**31 - 1])
def test_a_job_has_a_port_of_its_own(job: int) -> None:
    """One that any user may listen at; jobs of neighboring numbers, which share a node, have different ones."""
    (line,) = (line for line in slurm(*HOSTS).splitlines() if line.startswith("LLAMARL_CONTROLLER="))

    def port(number: int) -> int:
        code = f"here=10.0.0.1; SLURM_JOB_ID={number}; {line}; echo $LLAMARL_CONTROLLER"
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=240, check=True)
        return int(done.stdout.strip().removeprefix("10.0.0.1:"))

    assert 1024 <= port(job) <= 65_535 and port(job) != port(job + 1)


def test_the_job_trains_what_was_asked_for(tmp_path: Path) -> None:
    """The words that reach `llamarl train`, whatever is in them."""
    odd = "it's; $(touch here) `touch here` $HOME"
    text = slurm(*HOSTS, "--output", odd, "--data.template", 'a "b"\n{question} \\')
    begin = text.index("set --\n")
    part = text[begin : text.index(' "$@" &\n', begin)].replace("'/opt/my env/bin/python'", "printf '%s\\0'")
    env = {"LLAMARL_CONTROLLER": "10.0.0.1:20001", "LLAMARL_PKI": "/a b/pki", "SLURM_JOB_NUM_NODES": "3"}
    done = subprocess.run(
        ["bash", "-euc", part + ' "$@"'], env=env, capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\0")[:-1]
    assert words[:4] == ["-m", "llamarl", "train", DEMO]
    config = load_config(DEMO, words[4:])
    assert config.output == odd and config.data.template == 'a "b"\n{question} \\'
    assert (config.cluster.kind, config.cluster.listen, config.cluster.pki) == ("hosts", "10.0.0.1:20001", "/a b/pki")
    assert config.cluster.num_hosts == 3
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["--launch.slurm.gpus_per_node", "h100:8"], ["--gpus-per-node=h100:8"]),
        (["--launch.slurm.exclusive", "false"], []),
        (["--launch.slurm.time", "1-00:00:00"], ["--time=1-00:00:00"]),
        (["--launch.slurm.comment", "it's mine"], ['--comment="it\'s mine"']),
    ],
)
def test_options_of_sbatch(overrides: list[str], lines: list[str]) -> None:
    directives = [
        line.removeprefix("#SBATCH ") for line in slurm(*HOSTS, *overrides).splitlines() if line[:8] == "#SBATCH "
    ]
    assert set(lines) <= set(directives) and "--nodes=3" in directives
    takes_whole_nodes = "false" not in overrides
    assert ("--exclusive" in directives) == ("--mem=0" in directives) == takes_whole_nodes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["--launch.slurm.comment", 'a"b'], "cannot be written"),
        (["--launch.slurm.comment", "a\nscancel 1"], "cannot be written"),
        (["--launch.slurm.comment", "a\\"], "cannot be written"),
        (["--launch.slurm.x;y", "1"], "cannot be written"),
        (["--launch.slurm.nodes", "4"], "cluster.num_hosts"),
        (["--launch.slurm.time", "1979-05-27"], "launch.slurm"),
    ],
)
def test_options_that_cannot_be_written_are_refused(value: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slurm(*HOSTS, *value)


REQUIRED = {
    "Service": {"clusterIP", "selector", "publishNotReadyAddresses"},
    "StatefulSet": {"serviceName", "replicas", "selector", "template", "podManagementPolicy"},
    "Job": {"template", "backoffLimit"},
}
POD_KEYS = {
    "automountServiceAccountToken",
    "containers",
    "hostname",
    "restartPolicy",
    "securityContext",
    "subdomain",
    "terminationGracePeriodSeconds",
    "volumes",
}
CONTAINER_KEYS = {"command", "env", "image", "name", "resources", "securityContext", "volumeMounts", "workingDir"}


def parsed(text: str) -> dict[str, dict[str, Any]]:
    return {part["kind"]: part for part in yaml.safe_load_all(text)}


def test_manifests_have_what_kubernetes_needs() -> None:
    parts = parsed(kubernetes(*HOSTS, *POD, *GPUS, "--launch.kubernetes.memory=64Gi"))
    assert list(parts) == ["Service", "ConfigMap", "StatefulSet", "Job"]
    for kind, keys in REQUIRED.items():
        assert set(parts[kind]["spec"]) == keys
    assert all(part["metadata"]["namespace"] == "default" for part in parts.values())
    service, hosts, job = (parts[kind]["spec"] for kind in REQUIRED)
    assert service["clusterIP"] == "None" and hosts["serviceName"] == "demo"
    for spec in (hosts, job):
        labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
        assert service["selector"].items() <= labels.items()
        assert set(pod) <= POD_KEYS and pod["automountServiceAccountToken"] is False
        check_restricted(pod)
        [container] = pod["containers"]
        assert set(container) == CONTAINER_KEYS and container["image"] == "registry.example/llamarl:1"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        shell = subprocess.run(["sh", "-n"], input=container["command"][2], capture_output=True, text=True, timeout=240)
        assert shell.returncode == 0, shell.stderr
    assert hosts["selector"]["matchLabels"].items() <= hosts["template"]["metadata"]["labels"].items()
    assert hosts["template"]["metadata"]["labels"] != job["template"]["metadata"]["labels"]
    assert job["template"]["spec"]["subdomain"] == "demo" and job["template"]["spec"]["hostname"] == "controller"


def test_kubernetes_knows_every_key() -> None:
    """By its schema, where the package kubernetes-validate (119 MB) is installed."""
    validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate checks manifests"
    ).validate
    text = kubernetes(*HOSTS, *POD, *GPUS, "--launch.kubernetes.memory=64Gi")
    for part in yaml.safe_load_all(text):
        validate(part, "1.28.0", strict=True)


def check_restricted(pod: dict[str, Any]) -> None:
    """Kubernetes' Pod Security Standard of that name."""
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}


def test_hosts_ask_for_what_the_run_needs() -> None:
    def asks(*overrides: str) -> dict[str, Any]:
        spec = parsed(kubernetes(*HOSTS, *POD, *overrides))["StatefulSet"]["spec"]["template"]["spec"]
        return spec["containers"][0]["resources"]

    assert asks() == {"requests": {}, "limits": {}}
    needs = {"nvidia.com/gpu": 2, "cpu": 16, "memory": "64Gi"}  # 4 ranks of the trainer on two hosts, 2 of a generator
    assert asks(*GPUS, "--launch.kubernetes.cpu=16", "--launch.kubernetes.memory=64Gi") == {
        "requests": needs,
        "limits": needs,
    }
    assert asks("--launch.kubernetes.gpus=8")["limits"] == {"nvidia.com/gpu": 8}
    alone = ("--cluster.place.trainer=['demo-host-0']", "--cluster.place.generator=['*-1']")
    assert asks(*GPUS, *alone)["limits"] == {"nvidia.com/gpu": 4}
    with pytest.raises(ConfigError, match=r"finds no host that match.*; set launch\.kubernetes\.gpus"):
        asks(*GPUS, "--cluster.place.trainer=['n1']")
    with pytest.raises(ConfigError, match=r"set launch\.slurm\.gpus_per_node"):
        slurm(*HOSTS, *GPUS, "--cluster.place.trainer=['n1']")
    named = slurm(*HOSTS, *GPUS, "--cluster.place.trainer=['n1']", "--launch.slurm.gpus_per_node=8")
    assert "#SBATCH --gpus-per-node=8\n" in named


def test_pods_train_what_was_asked_for(tmp_path: Path) -> None:
    template = '- a: {question}\n---\n# "it\'s" \\ {{ x }} {% y %}\t$HOME: é'
    text = kubernetes(*HOSTS, *POD, "--data.template", template, "--steps", "7")
    path = tmp_path / "run.toml"
    path.write_text(parsed(text)["ConfigMap"]["data"]["run.toml"], encoding="utf-8")
    config = load_config(path)
    assert config.data.template == template and config.steps == 7
    assert config.cluster.listen == "controller.demo:6700" and config.cluster.num_hosts == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--name", "My_Run", *POD], "name = 'My_Run' is not a name for Kubernetes"),
        (["--name", "a" * 46, *POD], "not a name for Kubernetes"),
        (["--name", "1a", *POD], "not a name for Kubernetes"),
        (POD[:2], "launch.kubernetes.claim is missing"),
        (POD[2:], "launch.kubernetes.image is missing"),
        (POD[:4], "model.warm_start"),
        ([*POD, "--launch.kubernetes.mount", "work"], "launch.kubernetes.mount"),
        ([*POD, "--launch.kubernetes.imag", "x"], "did you mean `image`"),
    ],
)
def test_runs_that_no_pod_can_have_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kubernetes(*HOSTS, *overrides)


def test_a_pod_sees_its_own_key_alone(tmp_path: Path) -> None:
    """The certificates are for the names that the pods have; the authority's key goes nowhere."""
    config = script.several_hosts(DEMO, (*HOSTS, *POD, "--output", str(tmp_path)))
    parts = list(yaml.safe_load_all(script.kubernetes_manifest(config, script.kubernetes_secrets(config))))
    secrets = {part["metadata"]["name"]: part["stringData"] for part in parts if part["kind"] == "Secret"}
    assert set(secrets["demo-pki-controller"]) == {"ca.crt", "controller.crt", "controller.key"}
    folder = tmp_path / "as mounted"
    for part in parts:
        if part["kind"] not in ("Job", "StatefulSet"):
            continue
        pod = part["spec"]["template"]["spec"]
        (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "pki")
        (volume,) = (one["secret"] for one in pod["volumes"] if one["name"] == "pki")
        files = secrets[volume["secretName"]]
        if part["kind"] == "Job":
            assert "subPathExpr" not in mount and "items" not in volume
            found = {f"controller/{file}": text for file, text in files.items()}
        else:
            assert mount["subPathExpr"] == "$(POD_NAME)"
            found = {item["path"]: files[item["key"]] for item in volume["items"]}
        for path, text in found.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            (folder / path).chmod(0o440)
    for i in range(3):
        own = f"demo-host-{i}"
        assert {path.name for path in (folder / own).iterdir()} == {"ca.crt", f"{own}.crt", f"{own}.key"}
        client_context(folder / own, own)
    server_context(folder / CONTROLLER, CONTROLLER)
    text = subprocess.run(
        ["openssl", "x509", "-in", str(folder / "demo-host-2" / "demo-host-2.crt"), "-noout", "-text"],
        capture_output=True,
        text=True,
    ).stdout
    assert "DNS:demo-host-2, DNS:demo-host-2.demo" in text


def _fake(folder: Path, program: str) -> None:
    """A scheduler's program that keeps what it is given."""
    path = folder / program
    given = shlex.quote(str(folder))
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {given}/given\ncat > {given}/input\nexit 3\n')
    path.chmod(0o755)


def test_submitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", DEMO, *HOSTS, "--dry-run"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith("#!/bin/bash\n") and not list(tmp_path.iterdir())
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    _fake(programs, "sbatch")
    assert main(["slurm", DEMO, *HOSTS]) == 1  # what sbatch says
    submitted = tmp_path / "runs" / "demo.launch" / "slurm.sh"
    assert (programs / "given").read_text() == f"{submitted}\n" and submitted.read_text() == printed
    _fake(programs, "kubectl")
    assert main(["kubernetes", DEMO, *HOSTS, *POD]) == 1
    assert (programs / "given").read_text().split() == ["apply", "--filename", "-"]
    assert list(parsed((programs / "input").read_text())) == ["Service", "ConfigMap", "StatefulSet", "Job", "Secret"]
    assert "PRIVATE KEY" not in (tmp_path / "runs" / "demo.launch" / "kubernetes.yaml").read_text()


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^cannot write to /proc/x/demo\.launch: .*; choose another --output$"):
        main(["slurm", DEMO, *HOSTS, "--output", "/proc/x"])


def test_a_missing_scheduler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="'sbatch'; submit where `sbatch` works"):
        main(["slurm", DEMO, *HOSTS])


def test_the_job_of_a_packaged_name_begins(tmp_path: Path) -> None:
    """What the script runs on its first node, with the controller's address as the job knows it."""
    run, model, pki = "demo", make_model(tmp_path / "model"), str(tmp_path / "pki")
    own = (*HOSTS, "--model.path", str(model), "--model.warm_start=", "--output", str(tmp_path / "runs"))
    text = script.slurm_script(script.several_hosts(run, own), run, own).replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if "-m llamarl train " in line]
    known = {
        "$LLAMARL_CONTROLLER": "127.0.0.1:6700",
        "$SLURM_JOB_NUM_NODES": "3",
        "$LLAMARL_PKI": str(tmp_path / "pki"),
    }
    words = [known.get(word, word) for word in shlex.split(line.removesuffix("&")) if word != "$@"]
    assert words[:4] == ["/opt/my env/bin/python", "-m", "llamarl", "train"] and Path(words[4]).is_file()
    (line,) = [line for line in text.splitlines() if "-m llamarl certs " in line]
    known = {"${LLAMARL_HOSTS#,}": "a=127.0.0.1,b=127.0.0.2,c=127.0.0.3", "$SLURMD_NODENAME=$here": "a=127.0.0.1"}
    known["$LLAMARL_PKI"] = pki
    done = llamarl_here(*(known.get(word, word) for word in shlex.split(line)[3:]))
    assert done.returncode == 0, done.stderr
    done = llamarl_here(*words[3:], "--dry-run")
    assert done.returncode == 0, done.stderr
