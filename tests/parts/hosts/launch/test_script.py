"""What is handed to schedulers: golden files, shells and schemas that read it, values that try to get out of it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from llamarl.config import ConfigError, load_config
from llamarl.parts.hosts.agent import LEAVE_S
from llamarl.parts.hosts.certificates import CONTROLLER, client_context, server_context
from llamarl.parts.hosts.cli.launch import main
from llamarl.parts.hosts.heartbeat import VARIABLE
from llamarl.parts.hosts.launch import script
from tests.deploy.tools import TOOLS
from tests.end_to_end.tiny import llamarl_here, make_model
from tests.nightly import nightly

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
FIRST_EPHEMERAL = 32_768
"""Of `net.ipv4.ip_local_port_range`, by default."""
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
    """One that any user may listen at and that the system gives nobody. Jobs of neighboring numbers, which share a
    node, have different ones."""
    (line,) = (line for line in slurm(*HOSTS).splitlines() if line.startswith("LLAMARL_CONTROLLER="))

    def port(number: int) -> int:
        code = f"here=10.0.0.1; SLURM_JOB_ID={number}; {line}; echo $LLAMARL_CONTROLLER"
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=240, check=True)
        return int(done.stdout.strip().removeprefix("10.0.0.1:"))

    assert 1024 <= port(job) < FIRST_EPHEMERAL and port(job) != port(job + 1)


def test_the_job_trains_what_was_asked_for(tmp_path: Path) -> None:
    """The words that reach `llamarl train`, whatever is in them."""
    odd = "it's; $(touch here) `touch here` $HOME"
    text = slurm(*HOSTS, "--output", odd, "--data.template", 'a "b"\n{question} \\')
    begin = text.index("set --\n")
    part = text[begin : text.index(' "$@" &\n', begin)].replace("'/opt/my env/bin/python'", "printf '%s\\0'")
    env = {"LLAMARL_CONTROLLER": "10.0.0.1:20001", "LLAMARL_PKI": "/a b/pki", "num_hosts": "3"}
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
        (["--launch.slurm.time", "['1']"], "cannot be written"),
        (["--launch.slurm.setup", "7"], "setup"),
    ],
)
def test_options_that_cannot_be_written_are_refused(value: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        slurm(*HOSTS, *value)


def test_a_site_has_its_own_lines_before_ours() -> None:
    lines = slurm(*HOSTS, "--launch.slurm.setup", '["module load cuda", "ulimit -l unlimited"]').splitlines()
    own = lines.index("module load cuda")
    assert lines[own + 1] == "ulimit -l unlimited"
    assert max(i for i, line in enumerate(lines) if line[:8] == "#SBATCH ") < own < lines.index("set -euo pipefail")
    assert "module load cuda" in slurm(*HOSTS, "--launch.slurm.setup", "module load cuda").splitlines()


def test_a_site_has_its_own_template(tmp_path: Path) -> None:
    template = tmp_path / "site.sh.jinja"
    template.write_text(
        '{% extends "slurm.sh.jinja" %}{% block setup %}source /etc/site.sh{{ "\n" }}{{ super() }}{% endblock %}'
    )
    own = ("--launch.slurm.template", str(template), "--launch.slurm.setup", "module load cuda")
    text = slurm(*HOSTS, *own)
    assert "source /etc/site.sh\nmodule load cuda\n" in text
    before = text.replace("source /etc/site.sh\n", "").partition("llamarl train ")[0]
    assert before == slurm(*HOSTS, *own[2:]).partition("llamarl train ")[0]
    template.write_text("#!/bin/sh\nexec {{ train | map('sh') | join(' ') }}\n")
    assert slurm(*HOSTS, *own[:2]).startswith("#!/bin/sh\nexec /")
    template.write_text("{{ nothing }}")
    with pytest.raises(ConfigError, match=r"launch\.slurm\.template"):
        slurm(*HOSTS, *own[:2])
    with pytest.raises(ConfigError, match=r"launch\.slurm\.template"):
        slurm(*HOSTS, "--launch.slurm.template", str(tmp_path / "none"))


def components(text: str) -> list[list[str]]:
    """Options of each component of a job."""
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line == "#SBATCH hetjob":
            found.append([])
        elif line.startswith("#SBATCH "):
            found[-1].append(line.removeprefix("#SBATCH "))
    return found


def test_generators_may_have_nodes_of_another_kind() -> None:
    own = ("--launch.slurm.partition=h100", "--launch.slurm.gpus_per_node=8", "--launch.slurm.generators.nodes=2")
    others = ("--launch.slurm.generators.partition=l40s", "--launch.slurm.generators.exclusive=false")
    text = slurm(*HOSTS, *GPUS, *own, *others)
    first, second = components(text)
    assert {"--nodes=1", "--partition=h100", "--gpus-per-node=8", "--exclusive", "--requeue"} <= {*first}
    assert {"--nodes=2", "--partition=l40s", "--gpus-per-node=4", "--ntasks-per-node=1"} <= {*second}
    assert not {"--exclusive", "--requeue"} & {*second} and not [line for line in second if "job-name" in line]
    for role, number in (("trainer", 0), ("generator", 1)):
        assert f'--cluster.place.{role} "${{places[{number}]}}"' in text
    placed = slurm(
        *HOSTS, *GPUS, *own, *others, "--cluster.place.trainer=['node-*']", "--launch.slurm.generators.gpus_per_node=4"
    )
    assert '--cluster.place.trainer "$' not in placed and '--cluster.place.generator "$' in placed
    assert len(components(slurm(*HOSTS))) == 1 and "--cluster.place" not in slurm(*HOSTS)


@pytest.mark.parametrize("nodes", ["0", "3", "true", "many"])
def test_both_components_have_nodes(nodes: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.slurm\.generators\.nodes"):
        slurm(*HOSTS, "--launch.slurm.generators.partition=x", f"--launch.slurm.generators.nodes={nodes}")


KINDS = ["Service", "ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Job", "Job", "Job", "Job"]
"""Of a run on three hosts."""
POD_KEYS = {
    "automountServiceAccountToken",
    "containers",
    "hostname",
    "restartPolicy",
    "securityContext",
    "subdomain",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
}
CONTAINER_KEYS = {
    "command",
    "env",
    "image",
    "livenessProbe",
    "name",
    "resources",
    "securityContext",
    "startupProbe",
    "volumeMounts",
    "workingDir",
}


def parsed(text: str) -> dict[str, dict[str, Any]]:
    """By kind and name: `Job/demo-host-0`."""
    return {f"{part['kind']}/{part['metadata']['name']}": part for part in yaml.safe_load_all(text)}


def pods(parts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Templates of pods by their Jobs."""
    return {part["metadata"]["name"]: part["spec"]["template"] for part in parts.values() if part["kind"] == "Job"}


def test_manifests_have_what_kubernetes_needs() -> None:
    parts = parsed(kubernetes(*HOSTS, *POD, *GPUS, "--launch.kubernetes.memory=64Gi"))
    assert [part["kind"] for part in parts.values()] == KINDS
    assert all(part["metadata"]["namespace"] == "default" for part in parts.values())
    assert parts["Service/demo"]["spec"]["clusterIP"] == "None"
    selector = parts["Service/demo"]["spec"]["selector"]
    for name, template in pods(parts).items():
        labels, pod = template["metadata"]["labels"], template["spec"]
        assert selector.items() <= labels.items() and pod["subdomain"] == "demo"
        assert pod["hostname"] == name.replace("demo-controller", "controller")
        assert set(pod) == POD_KEYS and pod["automountServiceAccountToken"] is False
        check_restricted(pod)
        [container] = pod["containers"]
        assert set(container) == CONTAINER_KEYS and container["image"] == "registry.example/llamarl:1"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {"medium": "Memory", "sizeLimit": "64Gi"} in [volume.get("emptyDir") for volume in pod["volumes"]]
        shell = subprocess.run(["sh", "-n"], input=container["command"][2], capture_output=True, text=True, timeout=240)
        assert shell.returncode == 0, shell.stderr


def test_only_pods_of_the_run_reach_each_other() -> None:
    rules = parsed(kubernetes(*HOSTS, *POD))["NetworkPolicy/demo"]["spec"]
    own = {"matchLabels": {"app.kubernetes.io/instance": "demo"}}
    assert rules == {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}


def test_one_host_at_a_time_may_be_drained() -> None:
    parts = parsed(kubernetes(*HOSTS, *POD))
    budget = parts["PodDisruptionBudget/demo-host"]["spec"]
    assert budget["minAvailable"] == 2
    held = [
        name
        for name, pod in pods(parts).items()
        if budget["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ]
    assert held == ["demo-host-0", "demo-host-1", "demo-host-2"]


def test_a_pod_on_a_dead_node_is_replaced_soon_and_a_container_that_hangs_is_restarted() -> None:
    for name, template in pods(parsed(kubernetes(*HOSTS, *POD))).items():
        pod, [container] = template["spec"], template["spec"]["containers"]
        assert {one["key"]: one["tolerationSeconds"] for one in pod["tolerations"]} == {
            "node.kubernetes.io/not-ready": 30, "node.kubernetes.io/unreachable": 30,
        }  # fmt: skip
        assert pod["restartPolicy"] == "OnFailure"
        is_controller = name == "demo-controller"
        assert pod["terminationGracePeriodSeconds"] >= (600 if is_controller else LEAVE_S + 30), "for the checkpoint"
        assert {one["name"]: one["value"] for one in container["env"]}[VARIABLE] == "/tmp/heartbeat"
        assert (
            "/tmp/heartbeat" in str(container["livenessProbe"]) and container["startupProbe"]["failureThreshold"] >= 120
        )


@pytest.mark.parametrize(("age_s", "code"), [(1, 0), (600, 1), (None, 1)])
def test_the_probe_fails_when_the_heartbeat_is_old(age_s: int | None, code: int, tmp_path: Path) -> None:
    pod = pods(parsed(kubernetes(*HOSTS, *POD)))["demo-host-0"]["spec"]
    beat = tmp_path / "heartbeat"
    if age_s is not None:
        beat.touch()
        os.utime(beat, (time.time() - age_s,) * 2)
    command = [
        word.replace("/tmp/heartbeat", str(beat)) for word in pod["containers"][0]["livenessProbe"]["exec"]["command"]
    ]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == code


@pytest.mark.parametrize(
    ("end", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -TERM $PPID; while :; do sleep 0.1; done", 143)]
)
def test_a_pod_that_is_evicted_fails_so_that_it_is_replaced(end: str, code: int, tmp_path: Path) -> None:
    """Its agent ends in order; a Job whose pod succeeds would be complete."""
    (tmp_path / "getent").write_text("#!/bin/sh\n")
    (tmp_path / "python3").write_text(f"#!/bin/sh\ntrap 'exit 0' TERM\n{end}\n")
    for program in ("getent", "python3"):
        (tmp_path / program).chmod(0o755)
    pod = pods(parsed(kubernetes(*HOSTS, *POD)))["demo-host-0"]["spec"]
    command = pod["containers"][0]["command"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert subprocess.run(command, env=env, capture_output=True, timeout=60).returncode == code


def test_kubernetes_knows_every_key() -> None:
    """By the schemas of several versions: `make test-deploy`."""
    if not TOOLS.exists():
        pytest.skip("`make test-deploy` does it")
    validated(kubernetes(*HOSTS, *POD, *GPUS, "--launch.kubernetes.memory=64Gi"))


OVERLAYS = sorted(path.name for path in (ROOT / "deploy" / "kubernetes" / "overlays").iterdir())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_fit_what_is_written(overlay: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A base that `--to` writes, below an overlay, as kubectl reads them."""
    if not TOOLS.exists():
        pytest.skip("`make test-deploy` does it")
    shutil.copytree(ROOT / "deploy" / "kubernetes" / "overlays", tmp_path / "overlays")
    base = tmp_path / "base"
    assert main(["kubernetes", DEMO, *HOSTS, *POD, *GPUS, "--launch.kubernetes.memory=64Gi", "--to", str(base)]) == 0
    assert capsys.readouterr().out == f"kubectl apply --kustomize {base}\n"
    assert not (tmp_path / "runs").exists(), "nothing was submitted"
    build = [str(TOOLS / "kubectl"), "kustomize"]
    plain, text = (
        subprocess.run([*build, str(folder)], capture_output=True, text=True, timeout=120, check=True).stdout
        for folder in (base, tmp_path / "overlays" / overlay)
    )
    validated(text)
    parts = parsed(text)
    assert parts.keys() == parsed(plain).keys() and parts != parsed(plain)
    assert [part for part in parts if part.startswith("Secret/")] == [
        f"Secret/demo-{one}-pki" for one in ("controller", "host-0", "host-1", "host-2")
    ]
    secret = parts["Secret/demo-host-1-pki"]
    assert set(secret["data"]) == {"ca.crt", "demo-host-1.crt", "demo-host-1.key"}
    for template in pods(parts).values():
        check_restricted(template["spec"])


def validated(text: str) -> None:
    """Fails unless the schemas of Kubernetes know every key."""
    for version in ("1.30", "1.34"):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            command = [str(TOOLS / "kubernetes-validate"), "--strict", "--kubernetes-version", version, file.name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr


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
        templates = pods(parsed(kubernetes(*HOSTS, *POD, *overrides)))
        of_controller = templates["demo-controller"]["spec"]["containers"][0]["resources"]
        assert of_controller["requests"] and of_controller["limits"]
        return templates["demo-host-1"]["spec"]["containers"][0]["resources"]

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
    path.write_text(parsed(text)["ConfigMap/demo"]["data"]["run.toml"], encoding="utf-8")
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


def test_a_pod_has_a_secret_of_its_own(tmp_path: Path) -> None:
    """The certificates are for the names that the pods have; the authority's key goes nowhere."""
    config = script.several_hosts(DEMO, (*HOSTS, *POD, "--output", str(tmp_path)))
    parts = parsed(script.kubernetes_manifest(config, script.kubernetes_secrets(config)))
    secrets = {part["metadata"]["name"]: part["stringData"] for part in parts.values() if part["kind"] == "Secret"}
    for name, template in pods(parts).items():
        own = name.replace("demo-controller", CONTROLLER)
        (volume,) = (one["secret"] for one in template["spec"]["volumes"] if one["name"] == "pki")
        files = secrets.pop(volume["secretName"])
        assert set(files) == {"ca.crt", f"{own}.crt", f"{own}.key"}
        folder = tmp_path / "as mounted" / name
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text)
            (folder / file).chmod(0o440)
        (server_context if own == CONTROLLER else client_context)(folder, own)
    assert not secrets
    certificate = x509.load_pem_x509_certificate(
        (tmp_path / "as mounted" / "demo-host-2" / "demo-host-2.crt").read_bytes()
    )
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["demo-host-2", "demo-host-2.demo"]


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
    kinds = [part["kind"] for part in parsed((programs / "input").read_text()).values()]
    assert kinds == [*KINDS, "Secret", "Secret", "Secret", "Secret"]
    assert "PRIVATE KEY" not in (tmp_path / "runs" / "demo.launch" / "kubernetes.yaml").read_text()


def test_a_folder_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^cannot write to /proc/x/demo\.launch: .*; choose another --output$"):
        main(["slurm", DEMO, *HOSTS, "--output", "/proc/x"])


def test_a_missing_scheduler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="'sbatch'; submit where `sbatch` works"):
        main(["slurm", DEMO, *HOSTS])


@nightly("starts a job; by day its script is read")
def test_the_job_of_a_packaged_name_begins(tmp_path: Path) -> None:
    """What the script runs on its first node, with the controller's address as the job knows it."""
    run, model, pki = "demo", make_model(tmp_path / "model"), str(tmp_path / "pki")
    own = (*HOSTS, "--model.path", str(model), "--model.warm_start=", "--output", str(tmp_path / "runs"))
    text = script.slurm_script(script.several_hosts(run, own), run, own).replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if "-m llamarl train " in line]
    known = {
        "$LLAMARL_CONTROLLER": "127.0.0.1:6700",
        "$num_hosts": "3",
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
