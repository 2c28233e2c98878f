"""Models with one number per token against transformers' sequence classification."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamarl.config import ConfigError
from llamarl.models.attention import causal_attend
from llamarl.models.hf import new_model, save_model
from llamarl.models.scalar import load_scalar_model
from llamarl.models.shape import ModelShape

CPU = torch.device("cpu")
LENGTHS = (5, 1, 9)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = ModelShape(
        family="qwen3", hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=40,
        vocab_size=41, max_position_embeddings=64, tie_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("scalar") / "language"
    save_model(new_model(shape, seed=2, std=0.3), folder, None)
    return folder


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 41, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def classifier(language_model: Path) -> Path:
    """As transformers writes it."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        language_model, num_labels=1, pad_token_id=0, torch_dtype=torch.float32
    )
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    folder = language_model.with_name("classifier")
    model.save_pretrained(folder)
    return folder


def test_it_says_what_transformers_says(classifier: Path) -> None:
    import transformers

    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(classifier, torch_dtype=torch.float32)
    ours = load_scalar_model(classifier, torch.float32, CPU, new_head=False)
    ids_N = torch.cat(sequences())
    positions_N = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.no_grad():
        scalars_N = ours.scalars(ours(ids_N, positions_N, causal_attend(LENGTHS)))
        for ids_T, scalars_T in zip(sequences(), scalars_N.split(LENGTHS), strict=True):
            torch.testing.assert_close(scalars_T[-1], theirs(ids_T[None]).logits[0, 0], atol=1e-5, rtol=1e-4)
    assert scalars_N.std() > 0.1


def test_a_language_model_gets_a_head_of_zeros_where_that_is_wanted(language_model: Path) -> None:
    model = load_scalar_model(language_model, torch.float32, CPU, new_head=True)
    assert not model.score.weight.any() and "lm_head.weight" not in model.state_dict()
    with pytest.raises(ConfigError, match=r"holds a language model without `score.weight`"):
        load_scalar_model(language_model, torch.float32, CPU, new_head=False)


def test_several_labels_are_refused(classifier: Path) -> None:
    weights = load_file(classifier / "model.safetensors")
    weights["score.weight"] = weights["score.weight"].repeat(3, 1)
    several = classifier.with_name("several")
    several.mkdir()
    (several / "config.json").write_bytes((classifier / "config.json").read_bytes())
    save_file(weights, several / "model.safetensors")
    with pytest.raises(ConfigError, match=r"`score.weight` has shape \(3, 24\), but config.json says \(1, 24\)"):
        load_scalar_model(several, torch.float32, CPU, new_head=False)
