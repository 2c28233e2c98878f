"""Weights that do not fit their configuration are refused by the headers of their files, before a process starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamarl.config import ConfigError
from llamarl.config.schema import RunConfig
from llamarl.models.hf import new_model, save_model
from llamarl.models.tensors import check_listed_weights, check_weights
from llamarl.run.prepare import prepare
from tests.end_to_end.tiny import make_model
from tests.generation.mixtures import MIXTURES

Tensors = dict[str, torch.Tensor]
ROUTER = "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.1.mlp.experts.0.up_proj.weight"
DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no router": (lambda found: found.pop(ROUTER), r"1 tensors are missing, first `model\.layers\.1\.mlp\.gate"),
    "no expert": (lambda found: found.pop(EXPERT), r"experts\.0\.up_proj"),
    "an expert too many": (
        lambda found: found.update({EXPERT.replace(".0.", ".99."): found[EXPERT].clone()}),
        r"experts\.99",
    ),
    "another width": (lambda found: found.update({EXPERT: found[EXPERT][:-1].clone()}), r"experts\.0\.up_proj.*shape"),
    "another type": (lambda found: found.update({ROUTER: found[ROUTER].to(torch.int8)}), r"mlp\.gate.*type I8"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensors") / "model"
    save_model(new_model(MIXTURES["qwen3_moe"], 0, std=0.1), folder, None)
    return folder


def damaged(whole: Path, to: Path, damage: Callable[[Tensors], object], shards: int = 1) -> Path:
    """The same model with other tensors, in so many files."""
    to.mkdir()
    (to / "config.json").write_bytes((whole / "config.json").read_bytes())
    tensors = load_file(whole / "model.safetensors")
    damage(tensors)
    if shards == 1:
        save_file(tensors, to / "model.safetensors")
        return to
    names = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    places = {name: names[at % shards] for at, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name, place in places.items() if place == file}, to / file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return to


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES.keys())
def test_by_headers(whole: Path, tmp_path: Path, damage: Callable[[Tensors], object], named: str, shards: int) -> None:
    check_weights(damaged(whole, tmp_path / "whole", lambda found: None, shards))
    with pytest.raises(ConfigError, match=named):
        check_weights(damaged(whole, tmp_path / "model", damage, shards))


def test_a_tensor_in_two_files_and_a_file_that_is_not_there(whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path / "model", lambda found: None, 2)
    first, second = sorted(folder.glob("*.safetensors"))
    kept = load_file(second)
    save_file(kept | {ROUTER: load_file(whole / "model.safetensors")[ROUTER]}, second)
    if ROUTER not in load_file(first):
        first, second = second, first
        save_file(load_file(second) | {ROUTER: load_file(whole / "model.safetensors")[ROUTER]}, second)
    with pytest.raises(ConfigError, match=rf"`{ROUTER}` is in"):
        check_weights(folder)
    second.unlink()
    with pytest.raises(ConfigError, match=second.name):
        check_weights(folder)


@pytest.mark.parametrize("family", MIXTURES)
def test_every_family_as_it_is_written(family: str, tmp_path: Path) -> None:
    save_model(new_model(MIXTURES[family], 0, std=0.1), tmp_path / "model", None)
    check_weights(tmp_path / "model")
    check_weights(tmp_path / "model", "critic")
    with pytest.raises(ConfigError, match=r"score\.weight"):
        check_weights(tmp_path / "model", "reward-model")


def test_a_start_and_a_dry_run_refuse_it(tmp_path: Path) -> None:
    """In the process that prepares, so before any other starts; weights of a role have that role's head."""
    model = make_model(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    data = {"train": {"name": "running_total", "count": 4}, "template": "{question}\n"}
    settings = {"model": {"path": str(model)}, "data": data, "rollout": {"max_new_tokens": 8}}
    other = make_model(tmp_path / "other")
    save_file({name: one for name, one in tensors.items() if "norm" not in name}, other / "model.safetensors")
    for extra in ({"model": {"path": str(other)}}, {"reference": {"path": str(other), "kl_coefficient": 0.1}}):
        for weights in (True, False):
            prepare(RunConfig.model_validate(settings), weights=weights)
            with pytest.raises(ConfigError, match="other: 5 tensors are missing"):
                prepare(RunConfig.model_validate(settings | extra), weights=weights)


class TestListed:
    """Weights that were not fetched."""

    @pytest.fixture
    def listed(self, whole: Path, tmp_path: Path) -> tuple[Path, dict[str, int]]:
        folder = damaged(whole, tmp_path / "model", lambda found: None, 3)
        return folder, {path.name: path.stat().st_size for path in folder.iterdir()}

    def test_a_whole_one(self, listed: tuple[Path, dict[str, int]]) -> None:
        check_listed_weights(str(listed[0]), listed[1])

    def test_two_of_three_shards(self, listed: tuple[Path, dict[str, int]]) -> None:
        folder, files = listed
        del files["model-00002-of-00003.safetensors"]
        with pytest.raises(ConfigError, match="2 shards of 3"):
            check_listed_weights(str(folder), files)

    def test_too_few_bytes(self, whole: Path, listed: tuple[Path, dict[str, int]]) -> None:
        files = {name: size if name.endswith("json") else size // 4 for name, size in listed[1].items()}
        with pytest.raises(ConfigError, match="bytes"):
            check_listed_weights(str(listed[0]), files)

    @pytest.mark.parametrize("kind", ["no router", "no expert", "an expert too many"])
    def test_names_of_the_index(self, whole: Path, tmp_path: Path, kind: str) -> None:
        damage, named = DAMAGES[kind]
        folder = damaged(whole, tmp_path / "damaged", damage, 3)
        with pytest.raises(ConfigError, match=named):
            check_listed_weights(str(folder), {path.name: path.stat().st_size for path in folder.iterdir()})
