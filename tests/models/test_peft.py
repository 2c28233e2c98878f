"""Adapters in PEFT's format: found base, merged weights, settings that change what is computed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamarl.config import ConfigError
from llamarl.models.folder import is_adapter
from llamarl.models.hf import load_model, save_model
from llamarl.models.lora import adapted_weights, adapter_of, merged, save_adapters
from llamarl.models.peft import Adapter
from tests.models.test_lora import SOME, adapted, adapters
from tests.nightly import nightly


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """Base and adapters in one folder."""
    model, base = adapted(SOME)
    save_model(base, tmp_path / "in" / "base", None)
    save_adapters(adapters(model), SOME, str(tmp_path / "in" / "base"), tmp_path / "in" / "adapters")
    return tmp_path / "in" / "base", tmp_path / "in" / "adapters"


def change(folder: Path, **settings: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_merged_as_generators_merge(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, folder = saved
    assert is_adapter(folder) and not is_adapter(base)
    adapter = Adapter.of(folder)
    adapter.merge(adapter.base, tmp_path / "merged")
    model, before = adapted(SOME)
    wanted = before.state_dict()
    for name, _ in adapted_weights(before.shape, SOME):
        wanted[name] = merged(wanted[name], *adapter_of(adapters(model), name), SOME.scale)
    found = load_model(tmp_path / "merged", torch.float32, "cpu").state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def test_both_folders_may_move(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = saved
    moved = base.parent.rename(tmp_path / "moved")
    adapter = Adapter.of(moved / "adapters")
    assert Path(adapter.base).resolve() == moved / "base"
    shutil.rmtree(moved / "base")
    with pytest.raises(ConfigError, match="base_model_name_or_path"):
        Adapter.of(moved / "adapters")
    change(moved / "adapters", base_model_name_or_path="owner/name", revision="main")
    assert Adapter.of(moved / "adapters").base == "owner/name@main"


def test_another_base_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, folder = saved
    weights = load_file(base / "model.safetensors")
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, base / "model.safetensors")
    with pytest.raises(ConfigError, match="this adapter was trained on other weights"):
        Adapter.of(folder).merge(str(base), tmp_path / "merged")


@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"peft_type": "IA3"}, {"r": "3"},
     {"rank_pattern": {"q_proj": 8}}, {"base_model_name_or_path": None}],
    ids=str,
)  # fmt: skip
def test_what_is_not_computed_is_refused(saved: tuple[Path, Path], settings: dict[str, object]) -> None:
    _, folder = saved
    change(folder, **settings)
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Adapter.of(folder)


def test_scales_of_others(saved: tuple[Path, Path]) -> None:
    _, folder = saved
    change(folder, r=4, lora_alpha=8, use_rslora=True, target_modules="all-linear", unknown_of_tomorrow=1)
    assert Adapter.of(folder).scale == 4.0


@pytest.mark.parametrize("name", ["base_model.model.lm_head.weight", "base_model.model.x.lora_A.weight"])
def test_tensors_that_belong_nowhere_are_named(saved: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    base, folder = saved
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(weights | {name: torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=name.removeprefix("base_model.model.")):
        Adapter.of(folder).merge(str(base), tmp_path / "merged")


@nightly("a process; architecture/test_imports.py reads imports by day")
def test_who_starts_a_run_needs_no_torch() -> None:
    """The command of a run looks for adapters, and imports no torch."""
    code = "import sys, llamarl.run.models, llamarl.models.peft; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0
