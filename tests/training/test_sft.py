"""The warm start at a size that takes seconds. What the shipped settings reach is measured elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.config import ConfigError, SftConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.models.attention import causal_attend
from llamarl.models.hf import load_model, new_model
from llamarl.models.shape import ModelShape
from llamarl.training.base_model import RECORD_FILE, is_made, settings_hash
from llamarl.training.sft import (
    NO_LABEL,
    Document,
    SftProgress,
    attend_rows,
    pack,
    run_sft,
)

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64}


def tiny(output: Path, **options: Any) -> SftConfig:
    """30 steps of 4 rows of a two-layer model."""
    source = {"name": "running_total", "count": 200, "first": 100, "error_rate": 0.65}
    settings = {"output": str(output), "source": source, "shape": SIZES, "steps": 30, "rows": 4, "threads": 1}
    return SftConfig.model_validate(settings | options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SftConfig, list[SftProgress]]:
    """The folder of one tiny warm start, its settings and what it reported."""
    config = tiny(tmp_path_factory.mktemp("sft") / "runs" / "base")
    steps: list[SftProgress] = []
    return run_sft(config, steps.append), config, steps


def test_loss_falls(made: tuple[Path, SftConfig, list[SftProgress]]) -> None:
    _, _, steps = made
    assert [progress.step for progress in steps] == list(range(1, 31))
    assert steps[0].loss > 4.5  # a model that knows nothing: ln 331 = 5.8 at most
    assert steps[-1].loss < steps[0].loss - 2
    assert all(0 < progress.num_tokens <= 4 * 256 for progress in steps)


def test_transformers_loads_the_folder(made: tuple[Path, SftConfig, list[SftProgress]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, config, _ = made
    theirs, their_tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ours, tokenizer = load_model(folder, torch.float32, "cpu"), Tokenizer(folder)
    text = "Leo has 10 coins: a+3. How many coins now?\na:10+3"
    token_ids = tokenizer.encode(text)
    assert their_tokenizer(text)["input_ids"] == token_ids.tolist()
    assert theirs.generation_config.eos_token_id == tokenizer.eos_token_ids[0]
    ids_N = torch.from_numpy(token_ids).long()
    with torch.no_grad():
        logits_N_V = ours.logits(ours(ids_N, torch.arange(len(ids_N)), causal_attend([len(ids_N)])))
        torch.testing.assert_close(logits_N_V, theirs(ids_N[None]).logits[0], atol=1e-4, rtol=1e-4)
    assert ours.shape.max_position_embeddings == config.shape.max_position_embeddings


def test_nothing_else_is_left_beside_the_output(made: tuple[Path, SftConfig, list[SftProgress]]) -> None:
    folder, config, _ = made
    assert [path.name for path in folder.parent.iterdir()] == ["base"]
    assert json.loads((folder / RECORD_FILE).read_text())["settings_hash"] == settings_hash(config)


def test_seed_repeats_the_weights(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        return (run_sft(tiny(tmp_path / name, steps=2, seed=seed)) / "model.safetensors").read_bytes()

    first = weights("a", 1)
    assert weights("b", 1) == first
    assert weights("c", 2) != first


def test_base_model_is_known_by_its_settings(made: tuple[Path, SftConfig, list[SftProgress]], tmp_path: Path) -> None:
    folder, config, _ = made
    assert is_made(str(folder), config.model_copy(update={"output": "another", "threads": 2}))
    assert not is_made(tmp_path / "nothing", config)
    with pytest.raises(ConfigError, match=r"made by other settings.*delete the folder, or set another model\.path"):
        is_made(folder, config.model_copy(update={"steps": 31}))


def test_model_from_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="something else"):
        is_made(tmp_path, tiny(tmp_path))


def test_failed_warm_start_leaves_nothing(tmp_path: Path) -> None:
    def stop(progress: SftProgress) -> None:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        run_sft(tiny(tmp_path / "base", threads=threads + 1), stop)
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"row_tokens": 40}, r"a document has \d+ tokens and 40 fit; raise row_tokens"),
        ({"shape": SIZES | {"max_position_embeddings": 50}}, "and 50 fit"),
        ({"shape": SIZES | {"num_heads": 3}}, "hidden_size = 32 must be a multiple of num_heads = 3"),
        ({"template": "{nothing}"}, "no field 'nothing'"),
        ({"source": {"name": "unknown"}}, "source = 'unknown'"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_sft(tiny(tmp_path / "base", **options))
    assert list(tmp_path.iterdir()) == []


def test_rows_without_solutions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "r7", "question": "1?", "answer": "1"}\n')
    source = {"name": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    with pytest.raises(ConfigError, match="row 'r7' has no `solution`"):
        run_sft(tiny(tmp_path / "base", source=source))


def test_existing_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=f"output = {re.escape(repr(str(tmp_path)))} exists and is not empty"):
        run_sft(tiny(tmp_path))


def documents(lengths: list[tuple[int, int]]) -> list[Document]:
    """Documents of (question, solution) lengths whose tokens are all different."""
    begins = np.cumsum([0, *[sum(pair) for pair in lengths]])
    return [
        Document(token_ids_T=np.arange(begin, begin + q + s, dtype=np.int32) + 1, num_prompt=q)
        for begin, (q, s) in zip(begins, lengths, strict=False)
    ]


def test_packing_keeps_each_document_whole_and_learns_solutions_alone() -> None:
    docs = documents([(3, 4), (2, 9), (5, 1), (1, 2), (4, 8), (6, 6), (2, 2)])
    batches = pack(docs, 3, 16, seed=0)
    seen: list[int] = []
    while len(seen) < len(docs) * 2:
        batch = next(batches)
        for number in range(int(batch.documents_B_T.max()) + 1):
            own = batch.documents_B_T == number
            assert len(own.any(1).nonzero()) == 1
            token_ids = batch.token_ids_B_T[own]
            (index,) = [i for i, doc in enumerate(docs) if doc.token_ids_T[0] == token_ids[0]]
            seen.append(index)
            assert token_ids.tolist() == docs[index].token_ids_T.tolist()
            assert batch.positions_B_T[own].tolist() == list(range(len(token_ids)))
            q = docs[index].num_prompt
            labels = batch.labels_B_T[own].tolist()
            assert labels == [NO_LABEL] * (q - 1) + token_ids[q:].tolist() + [NO_LABEL]
        assert (batch.labels_B_T[batch.documents_B_T < 0] == NO_LABEL).all()
    assert sorted(seen[: len(docs)]) == list(range(len(docs)))


def test_documents_of_a_row_do_not_see_each_other() -> None:
    """Packed hidden states are those of each document alone."""
    shape = ModelShape(family="llama", head_dim=16, vocab_size=64, max_position_embeddings=32, **SIZES)
    model = new_model(shape, seed=0, std=0.2)
    docs = documents([(3, 4), (2, 5), (4, 3), (1, 6)])
    batch = next(pack(docs, 2, 18, seed=0))
    with torch.no_grad():
        flat = (x.flatten() for x in (batch.token_ids_B_T, batch.positions_B_T))
        hidden_B_T_D = model(*flat, attend_rows(batch.documents_B_T)).unflatten(0, (2, 18))
        for number in range(int(batch.documents_B_T.max()) + 1):
            own = batch.documents_B_T == number
            ids = batch.token_ids_B_T[own]
            alone = model(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
            torch.testing.assert_close(hidden_B_T_D[own], alone, atol=1e-5, rtol=1e-5)
    assert hidden_B_T_D.isfinite().all()
