"""A run whose generator is vLLM: behind a server that stands in for it, here always; and vLLM itself where it is.

The stand-in has vLLM's routes and the plugin's way to receive weights, and samples from the package's own model. What
vLLM itself makes of them, only the second shows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llamarl.config import ConfigError
from llamarl.parts.vllm.joint import open_engine
from llamarl.parts.vllm.server import VllmSettings
from tests.end_to_end.tiny import llamarl, llamarl_here, make_model, rows
from tests.nightly import nightly
from tests.parts.vllm.test_vllm import FAKE, PYTHON, needs_vllm

STEPS = 5
FOR_VLLM = ("--generator.backend", "vllm", "--generator.vllm.python")


def interpreter(folder: Path, *arguments: str) -> Path:
    """Something that has vLLM, if one asks it, and runs the stand-in for `-m vllm...`."""
    path = folder / "python"
    command = " ".join(map(str, (sys.executable, FAKE, *arguments)))
    path.write_text(f'#!/bin/sh\n[ "$1" = -m ] || exit 0\nshift 2\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM on CPUs has no attention for smaller heads."""
    return make_model(tmp_path_factory.mktemp("vllm") / "model", head_dim=32)


@nightly("processes; parts/vllm tests the adapter by day")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["stand-in", pytest.param("vllm", marks=needs_vllm)])
def test_weights_are_adopted_in_flight(tmp_path: Path, toml: Path, which: str) -> None:
    python = interpreter(tmp_path) if which == "stand-in" else PYTHON
    done = llamarl(
        *("train", toml, "--output", tmp_path, "--steps", STEPS, *FOR_VLLM, python),
        *("--rollout.max_new_tokens", 40, "--rollout.segment_tokens", 25, "--rollout.max_staleness", 2),
        *("--trainer.learning_rate", 0.02, "--weight_sync.max_mismatch", 0.01),
        *("--generator.kv_on_update", "recompute", "--generator.kv_cache_bytes", 64 << 20),
        *("--generator.vllm.arguments", "['--enforce-eager']", "--generator.max_running", 16),
        *("--cluster.timeout_s", 800, "--eval.max_prompts", 2, "--weight_sync.probe_every_steps", 1),
        *("--reward.parts", "['tests.executors.rewards:EvenLength']"),
        timeout_s=880,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "tiny"
    steps = [row for row in rows(folder / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    probed = [row["extra.mismatch_max"] for row in steps if "extra.mismatch_max" in row]
    assert len(probed) > 2 and max(probed) < 1e-3, "after a sync it has other weights than the trainer"
    assert max(row["importance_ratio_max"] or 0 for row in steps) > 1.01, "the weights did not change"
    rollouts = rows(folder / "rollouts.jsonl")
    assert any(len(row["policy_versions"]) > 1 for row in rollouts), "no weights came while a rollout was decoded"
    assert any(len(row["token_ids"]) > 25 for row in rollouts), "no rollout was cut and went on"
    for row in rollouts:
        versions = np.repeat(*np.array(row["policy_versions"]).T)
        assert len(versions) == len(row["token_ids"]) and (np.diff(versions) >= 0).all()
        assert row["step"] - 1 - versions[0] <= 2 + 1  # S and the window
    assert (folder / "logs" / "generator-0.vllm.log").is_file()


def test_what_cannot_start_is_said_in_a_sentence(tmp_path: Path, toml: Path, model: Path) -> None:
    started = tmp_path / "tiny"
    done = llamarl_here("train", toml, "--output", tmp_path, *FOR_VLLM, "/no/such/python")
    assert (done.returncode, started.exists()) == (2, False)
    assert "generator.vllm.python = '/no/such/python' cannot be run; name the interpreter" in done.stderr

    done = llamarl_here("train", toml, "--output", tmp_path, *FOR_VLLM, sys.executable)
    assert (done.returncode, started.exists()) == (2, False)
    assert f"generator.vllm.python = '{sys.executable}' has no vllm; name the interpreter" in done.stderr

    settings = VllmSettings(python=str(interpreter(tmp_path, "die")), log_path=str(tmp_path / "vllm.log"))
    with pytest.raises(ConfigError) as raised:
        open_engine(str(model), settings, delta=False)
    first, *log = str(raised.value).splitlines()
    assert first.startswith(
        f"generator.backend = 'vllm': vLLM server of {model} has ended; the end of {tmp_path}/vllm.log"
    )
    assert "cannot find a device" in "".join(log)
