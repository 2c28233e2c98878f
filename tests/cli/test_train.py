"""A start that is refused leaves nothing in the way of the corrected command, and what can be read is read first."""

from __future__ import annotations

import importlib.util
import socket
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamarl.config import load_config
from llamarl.config.cluster import lack_of_monarch
from tests.cli.test_bad_input import check, damaged, halve
from tests.end_to_end.tiny import llamarl, llamarl_here
from tests.nightly import NIGHTLY


@pytest.mark.parametrize("kind", ["inline", *(["monarch"] if NIGHTLY else [])])
def test_truncated_weights(toml: Path, model: Path, tmp_path: Path, kind: str) -> None:
    """Known before anything is started, and nothing of the run is there."""
    folder = damaged(model, tmp_path, lambda copy: halve(copy / "model.safetensors"))
    run = llamarl if kind == "monarch" else llamarl_here
    done = run("train", toml, "--model.path", folder, "--cluster.kind", kind)
    check(done, "model.safetensors", "not a whole safetensors file", "copy it again")
    assert not (toml.parent / "runs").exists()


@pytest.mark.parametrize("kind", ["inline", *(["monarch"] if NIGHTLY else [])])
def test_what_an_executor_refuses_leaves_no_run(toml: Path, model: Path, tmp_path: Path, kind: str) -> None:
    """Only they read all of the weights. The corrected command runs, and once it has done a step it is a run."""

    def change(copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        weights["model.norm.weight"][0] = torch.nan
        save_file(weights, copy / "model.safetensors")

    run, options = llamarl if kind == "monarch" else llamarl_here, ("--cluster.kind", kind, "--steps", 1)
    check(run("train", toml, *options, "--model.path", damaged(model, tmp_path, change)), "model.norm.weight")
    assert (toml.parent / "runs/tiny").exists()
    done = run("train", toml, *options)
    assert done.returncode == 0, done.stderr
    check(run("train", toml, *options), "exists; resume it")


def test_a_port_that_another_listens_at(toml: Path, tmp_path: Path) -> None:
    """And missing certificates: known before hosts are waited for, by `sft` too."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        hosts = ("--cluster.kind", "hosts", "--cluster.pki", tmp_path / "pki", "--cluster.listen", listen)
        for command in ("train", "sft"):
            check(
                llamarl_here(command, toml, *hosts), listen, "another process listens", "a free port", command=command
            )
    for command in ("train", "sft"):
        check(llamarl_here(command, toml, *hosts), "`llamarl certs` makes it", command=command)
    assert not (toml.parent / "runs").exists()


def test_monarch_that_is_missing(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "monarch" else found(name))
    lack, alone = "Monarch is not installed: pip install 'llamarl[monarch]'", ("--cluster.kind", "monarch")
    for command in ("train", "sft"):
        check(llamarl_here(command, toml, *alone), lack, "or set cluster.kind = 'processes'", command=command)
    assert not (toml.parent / "runs").exists()
    for asked in ("--trainer.parallelism.fsdp=2", "--weight_sync.transport=nixl", "--checkpoint.mirror=true"):
        check(llamarl_here("train", toml, asked), "cluster.kind = 'inline'", "use cluster.kind = 'processes'")
    done = llamarl_here("train", toml)  # `auto`: nobody asked for Monarch
    assert done.returncode == 0, done.stderr
    assert f"executors share this process and take turns; {lack}" in done.stdout
    assert 'kind = "inline"' in (toml.parent / "runs/tiny/config.toml").read_text()


def test_monarch_of_another_version(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"0.6.9": False, "0.7.0": True, "0.7.12rc1": True, "0.8": False, "1.7.0": False}
    for version, is_right in versions.items():
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        assert load_config(toml).cluster.kind == ("monarch" if is_right else "inline")
        assert ("pip install" in lack_of_monarch()) is not is_right
