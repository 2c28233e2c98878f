from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from llamarl.config import ConfigError
from llamarl.models import hf
from llamarl.models.attention import causal_attend
from llamarl.models.hf import load_model, load_shape, new_model, open_model, replaced_folder, save_model
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.sharding.box import Box
from tests.nightly import some

IDS = torch.arange(1, 60)


def logits(model: Transformer) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(IDS, torch.arange(len(IDS)), causal_attend([len(IDS)])))


def oracle_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS[None]).logits[0]


def small(tie_embeddings: bool = False, stop_token_ids: tuple[int, ...] = (2, 5)) -> ModelShape:
    return ModelShape(
        family="llama",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=131,
        max_position_embeddings=64,
        tie_embeddings=tie_embeddings,
        stop_token_ids=stop_token_ids,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(new_model(small(), seed=0, std=0.1), tmp_path / "model", None)
    return tmp_path / "model"


@pytest.mark.parametrize("shard", some(["60KB", "10GB"], 1))
def test_loads_what_transformers_saves(oracle: PreTrainedModel, tmp_path: Path, shard: str) -> None:
    oracle.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "60KB")
    assert torch.equal(logits(load_model(tmp_path, torch.float32, "cpu")), oracle_logits(oracle))


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], 1))
def test_transformers_loads_what_is_saved(oracle: PreTrainedModel, tmp_path: Path, dtype: torch.dtype) -> None:
    oracle.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs", dtype, "cpu")
    save_model(model, tmp_path / "ours", None)
    assert len({path.stat().st_mode for path in (tmp_path / "ours").iterdir()}) == 1, "whoever reads one reads all"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto", attn_implementation="sdpa")
    assert loaded.dtype == dtype
    assert loaded.generation_config.eos_token_id == [2, 5]
    # Loading in float32 compares the stored weights, without bfloat16's own rounding in between.
    again = load_model(tmp_path / "ours", torch.float32, "cpu")
    assert torch.equal(logits(again), oracle_logits(loaded.float()))
    assert load_shape(tmp_path / "ours") == load_shape(tmp_path / "theirs")


@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_keeps_every_bit(tmp_path: Path, tied: bool) -> None:
    model = new_model(small(tie_embeddings=tied), seed=0, std=0.1)
    save_model(model, tmp_path / "deep" / "model", None)
    loaded = load_model(tmp_path / "deep" / "model", torch.float32, "cpu")
    assert loaded.shape == model.shape
    assert model.state_dict().keys() == loaded.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("stops", [(), (2,), (2, 5)])
def test_stop_tokens_survive(tmp_path: Path, stops: tuple[int, ...]) -> None:
    save_model(new_model(small(stop_token_ids=stops), seed=0, std=0.1), tmp_path / "model", None)
    assert load_shape(tmp_path / "model").stop_token_ids == stops


def test_generation_config_decides_the_stop_tokens(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_shape(folder).stop_token_ids == (7, 9)
    (folder / "generation_config.json").unlink()
    assert load_shape(folder).stop_token_ids == (2, 5)


def test_loaded_weights_do_not_follow_the_file(folder: Path) -> None:
    model = load_model(folder, torch.float32, "cpu")
    before = logits(model)
    os.truncate(folder / "model.safetensors", 0)
    assert torch.equal(logits(model), before)


def test_save_copies_the_tokenizer_and_replaces_an_older_export(folder: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    (tokenizer / "other.txt").write_text("not ours")
    model = new_model(small(), seed=1, std=0.1)
    save_model(model, folder, tokenizer)
    assert torch.equal(logits(load_model(folder, torch.float32, "cpu")), logits(model))
    written = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == written
    assert {path.name for path in tmp_path.iterdir()} == {"model", "tokenizer"}


def test_tokenizer_may_come_from_the_folder_that_is_replaced(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"a": 1}')
    save_model(new_model(small(), seed=1, std=0.1), folder, folder)
    assert (folder / "tokenizer.json").read_text() == '{"a": 1}'


def test_a_save_that_fails_keeps_the_older_export(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = logits(load_model(folder, torch.float32, "cpu"))

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("llamarl.models.hf.write_json", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_model(new_model(small(), seed=1, std=0.1), folder, None)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert torch.equal(logits(load_model(folder, torch.float32, "cpu")), before)


def test_save_refuses_to_delete_other_files(folder: Path) -> None:
    (folder / "thesis.tex").write_text("ten years")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        save_model(new_model(small(), seed=1, std=0.1), folder, None)
    with pytest.raises(ConfigError, match="which is a file"):
        save_model(new_model(small(), seed=1, std=0.1), folder / "thesis.tex", None)
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        save_model(new_model(small(), seed=1, std=0.1), folder.parent / "new", folder)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load_whole(folder: Path) -> None:
    load_model(folder, torch.float32, "cpu")


@pytest.mark.parametrize("load", [load_whole, open_model], ids=["whole", "parts"])
def test_names_missing_unknown_and_wrong_shaped_tensors(folder: Path, load: Callable[[Path], object]) -> None:
    """Also to a rank that will read none of it."""
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(48, 31)}))
    with pytest.raises(ConfigError, match=rf"`{name}` has shape \(48, 31\), but config.json says \(48, 32\)"):
        load(folder)
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=f"1 tensors are missing, first `{name}`"):
        load(folder)
    rewrite(folder, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(48, 32)}))
    with pytest.raises(ConfigError, match=r"unknown tensor `model\.layers\.9\.mlp\.up_proj\.weight`"):
        load(folder)


def test_old_rotary_buffers_are_passed_over(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    assert load_model(folder, torch.float32, "cpu").shape == small()


def test_tied_checkpoint_may_repeat_its_head_but_not_contradict_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_model(new_model(small(tie_embeddings=True), seed=0, std=0.1), folder, None)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert load_model(folder, torch.float32, "cpu").lm_head is None
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ConfigError, match=r"`lm_head\.weight` differs"):
        load_model(folder, torch.float32, "cpu")


def test_a_part_of_the_embeddings_is_compared_with_that_of_the_head(tmp_path: Path) -> None:
    """So the rank that has it refuses a tied checkpoint that contradicts itself."""
    folder = tmp_path / "model"
    save_model(new_model(small(tie_embeddings=True), seed=0, std=0.1), folder, None)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    rewrite(folder, lambda tensors: tensors["lm_head.weight"][-1].add_(1))
    _, weights = open_model(folder)
    rows = Box((0, 0), (130, 32))
    whole = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weights.read("model.embed_tokens.weight", rows), whole[:130])
    with pytest.raises(ConfigError, match=r"`lm_head\.weight` differs"):
        weights.read("model.embed_tokens.weight", Box((130, 0), (131, 32)))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(132, 32)}))
    with pytest.raises(ConfigError, match=r"`lm_head\.weight` differs"):
        open_model(folder)


@pytest.mark.parametrize("load", [load_whole, open_model], ids=["whole", "parts"])
@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_truncated_weights(folder: Path, keep: int, load: Callable[[Path], object]) -> None:
    os.truncate(folder / "model.safetensors", keep)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole safetensors file"):
        load(folder)


def test_missing_folder_and_files(folder: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        load_model(folder / "nowhere", torch.float32, "cpu")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        load_model(folder, torch.float32, "cpu")
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match="has no `weight_map`"):
        load_model(folder, torch.float32, "cpu")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match=r"has no model-00002-of-00002\.safetensors"):
        load_model(folder, torch.float32, "cpu")
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_shape(folder)
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=r"model: config\.json: `model_type` = 'gpt2'"):
        load_shape(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_shape(folder)


def test_a_disk_without_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left of what was begun."""

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(hf, "save_file", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*; name a folder on a disk with room"):
        hf.save_tensors({}, small(), tmp_path / "model", None)
    assert not list(tmp_path.iterdir())


def test_two_commands_do_not_write_one_folder(tmp_path: Path) -> None:
    with replaced_folder(tmp_path / "export", ()) as new:
        (new / "config.json").write_text("first")
        said = r"another command writes .*export; wait for its end"
        with pytest.raises(ConfigError, match=said), replaced_folder(tmp_path / "export", ()):
            pytest.fail("it was let in")
        with replaced_folder(tmp_path / "merged", ()):
            pass
    assert (tmp_path / "export/config.json").read_text() == "first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "merged"], "no lock is left"


def test_a_models_own_files_and_keys_stay(folder: Path, tmp_path: Path) -> None:
    """Of the base training decides the weights and their type; all else is as it was."""
    base = Path(shutil.copytree(folder, tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    config |= {"pad_token_id": 3, "use_cache": True, "torch_dtype": "float32", "initializer_range": 0.3}
    (base / "config.json").write_text(json.dumps(config))
    settings = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": [2, 5], "pad_token_id": 3}
    (base / "generation_config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.json", "LICENSE", "vocab.json", "added_tokens.json", "README.md", "pytorch_model.bin"):
        (base / name).write_text("{}")
    (tmp_path / "secret").write_text("key")
    (base / "NOTICE").symlink_to(tmp_path / "secret")
    for name in ("llamarl_sft.json", ".hidden", "adapter_config.json", "model.safetensors.index.json", "a.gguf"):
        (base / name).write_text("{}")
    model, texts = load_model(base, torch.float32, "cpu"), {"README.md": f"{hf.CARD_MARK}", "vocab.json": "[]"}
    for _ in range(2):  # an older export is replaced
        hf.save_tensors(
            model.state_dict(), model.shape, tmp_path / "made", base, base=base, dtype=torch.bfloat16, texts=texts
        )
    made = tmp_path / "made"
    assert {path.name for path in made.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "LICENSE", "vocab.json",
        "added_tokens.json", "README.md",
    }  # fmt: skip
    assert json.loads((made / "config.json").read_text()) == config | {"torch_dtype": "bfloat16"}
    assert json.loads((made / "generation_config.json").read_text()) == settings
    assert (made / "vocab.json").read_text() == "[]"
    with safe_open(made / "model.safetensors", "pt") as file:
        types = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    assert {one for name, one in types.items() if "norm" not in name} == {torch.bfloat16}
    assert types["model.norm.weight"] == torch.float32
    rounded = load_model(made, torch.float32, "cpu").state_dict()["model.embed_tokens.weight"]
    assert torch.equal(rounded, model.state_dict()["model.embed_tokens.weight"].bfloat16().float())
    (made / "README.md").write_text("my own words")
    with pytest.raises(ConfigError, match=r"README\.md"):
        hf.save_tensors(model.state_dict(), model.shape, made, base, base=base, texts=texts)
