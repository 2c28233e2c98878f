"""The warm start at a size that takes seconds. What the shipped settings reach is measured elsewhere."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from llamarl.config import ConfigError, SftConfig
from llamarl.data.tokenizer import Tokenizer
from llamarl.models.attention import causal_attend
from llamarl.models.hf import load_model
from llamarl.parts.sft.cli import sft
from llamarl.parts.sft.warm_start import warm_start
from llamarl.training.base_model import RECORD_FILE, is_made, settings_hash
from tests.parts.hub.server import HubServer

Made = tuple[Path, SftConfig, list[tuple[int, Mapping[str, float]]]]
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 64}


def tiny(output: Path, **options: Any) -> SftConfig:
    """30 steps of 4 rows of a two-layer model."""
    source = {"name": "running_total", "count": 200, "first": 100, "error_rate": 0.65}
    settings = {"output": str(output), "source": source, "shape": SIZES, "steps": 30, "rows": 4, "threads": 1}
    return SftConfig.model_validate(settings | options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of one tiny warm start, its settings and what it reported."""
    config = tiny(tmp_path_factory.mktemp("sft") / "runs" / "base")
    steps = list[tuple[int, Mapping[str, float]]]()
    return warm_start(config, lambda step, metrics: steps.append((step, metrics))), config, steps


def test_progress_off_a_terminal_is_a_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a cell of a notebook, which asks for colors and keeps all that was drawn."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    toml = tmp_path / "sft.toml"
    shape = "\n".join(f"{name} = {value}" for name, value in SIZES.items())
    source = 'name = "running_total"\ncount = 200\nfirst = 100'
    toml.write_text(f"steps = 20\nrows = 4\nthreads = 1\n[source]\n{source}\n[shape]\n{shape}\n")
    assert sft.main([str(toml), f"--output={tmp_path / 'base'}"]) == 0
    *steps, last = capsys.readouterr().out.splitlines()
    assert [line.partition(", loss ")[0] for line in steps] == [f"warm start: {n} of 20 steps" for n in range(2, 21, 2)]
    assert last == f"base model: {tmp_path / 'base'}"


@pytest.mark.parametrize("others", [{}, {"seed": 7}], ids=["same", "other settings"])
def test_two_runs_may_make_the_same_model_at_once(tmp_path: Path, others: dict[str, Any]) -> None:
    """Two examples with one base model, started side by side."""
    config = tiny(tmp_path / "base", steps=1)

    def meanwhile(*_: Any) -> None:
        other = warm_start(config.model_copy(update={"output": str(tmp_path / "elsewhere")}))
        record = json.loads((other / RECORD_FILE).read_text())
        record["settings_hash"] = settings_hash(config.model_copy(update=others))
        (other / RECORD_FILE).write_text(json.dumps(record))
        other.rename(tmp_path / "base")

    if others:
        with pytest.raises(ConfigError, match=r"output = .*base"):
            warm_start(config, meanwhile)
    else:
        assert warm_start(config, meanwhile) == tmp_path / "base"
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_loss_falls(made: Made) -> None:
    _, _, steps = made
    assert [step for step, _ in steps] == list(range(1, 31))
    losses = [metrics["loss"] for _, metrics in steps]
    assert losses[0] > 4.5  # a model that knows nothing: ln 331 = 5.8 at most
    assert losses[-1] < losses[0] - 2
    assert all(3 * 256 < metrics["num_input_tokens"] <= 4 * 256 for _, metrics in steps)


def test_transformers_loads_the_folder(made: Made) -> None:
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


def test_nothing_else_is_left_beside_the_output(made: Made) -> None:
    folder, config, _ = made
    assert [path.name for path in folder.parent.iterdir()] == ["base"]
    assert json.loads((folder / RECORD_FILE).read_text())["settings_hash"] == settings_hash(config)


def test_seed_repeats_the_weights(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        return (warm_start(tiny(tmp_path / name, steps=2, seed=seed)) / "model.safetensors").read_bytes()

    first = weights("a", 1)
    assert weights("b", 1) == first
    assert weights("c", 2) != first


def test_base_model_is_known_by_its_settings(made: Made, tmp_path: Path) -> None:
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
    def stop(step: int, metrics: Mapping[str, float]) -> None:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        warm_start(tiny(tmp_path / "base", threads=threads + 1), stop)
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
        warm_start(tiny(tmp_path / "base", **options))
    assert list(tmp_path.iterdir()) == []


def test_rows_without_solutions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": "r7", "question": "1?", "answer": "1"}\n')
    source = {"name": "jsonl", "path": str(tmp_path / "rows.jsonl")}
    with pytest.raises(ConfigError, match="row 'r7' has no `solution`"):
        warm_start(tiny(tmp_path / "base", source=source))


def test_existing_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=f"output = {re.escape(repr(str(tmp_path)))} exists and is not empty"):
        warm_start(tiny(tmp_path))


def test_it_learns_conversations_of_one_turn_and_tells_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    rows = [{"messages": talk, "when": datetime.date(2026, 1, 1)}] * 9
    pq.write_table(pa.Table.from_pylist(rows), path := tmp_path / "talks.parquet")
    source = {"name": "file", "path": str(path)}
    folder = warm_start(tiny(tmp_path / "base", source=source, steps=2))
    assert (folder / "model.safetensors").exists()
    said = "llamarl sft: source: columns that hold values that are not JSON are left out: `when` (date)\n"
    assert capsys.readouterr().err == said
    pq.write_table(pa.Table.from_pylist([{"messages": talk * 2}]), path)
    with pytest.raises(ConfigError, match="row 'talks-1' is a conversation of 3 messages"):
        warm_start(tiny(tmp_path / "more", source=source, steps=2))


def test_a_data_set_of_the_hub_is_that_of_one_commit_which_is_told(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.dumps({"question": "1+1?", "answer": "2", "solution": "2"}) + "\n"
    commit = hub.add("me/sums", {"train.jsonl": row.encode() * 9}, kind="dataset")
    config = tiny(tmp_path / "base", source={"name": "hub", "path": "me/sums"}, steps=2)
    folder = warm_start(config)
    assert f"llamarl sft: source: me/sums at commit {commit}\n" in capsys.readouterr().err
    assert json.loads((folder / RECORD_FILE).read_text())["settings"]["source"]["revision"] == commit
    assert is_made(folder, config), "it is known by the settings as they are given"
    with pytest.raises(ConfigError, match=r"source = 'me/none': .*no such data set"):
        warm_start(tiny(tmp_path / "more", source={"name": "hub", "path": "me/none"}))


def test_progress_outside_of_a_terminal_says_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the first reported step on, which may be one of a resumed run."""
    times = iter([100.0, 100.5, 101.0, 102.0])
    show = sft._StepLines("warm start", 20)
    with monkeypatch.context() as patched:
        patched.setattr(sft.time, "monotonic", lambda: next(times))
        for step in (11, 12, 13, 20):
            show(step, {"loss": 0.25})
    first, last = capsys.readouterr().out.splitlines()
    assert first == "warm start: 12 of 20 steps, loss 0.250, about 4.0s left"
    assert last == "warm start: 20 of 20 steps, loss 0.250"
