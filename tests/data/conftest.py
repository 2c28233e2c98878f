"""One small tokenizer and a way to change its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llamarl.data.sources.running_total import RunningTotal
from llamarl.data.tokenizer import CONFIG_FILE, Tokenizer
from llamarl.parts.sft.bpe import train_byte_bpe
from tests.parts.hub.server import HubServer, only_hub


@pytest.fixture(scope="session")
def base_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """331 tokens, learnt from the demo task."""
    texts = [f"{row.question}\n{row.solution}" for row in RunningTotal(count=500)]
    return train_byte_bpe(texts, tmp_path_factory.mktemp("tokenizer"), 331)


@pytest.fixture
def make_tokenizer(base_tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., Tokenizer]:
    """A copy of the small tokenizer whose `tokenizer_config.json` has these entries too; None takes one away."""

    def make(**entries: object) -> Tokenizer:
        folder = Path(shutil.copytree(base_tokenizer.folder, tmp_path / "tokenizer"))
        config = json.loads((folder / CONFIG_FILE).read_text()) | entries
        kept = {key: value for key, value in config.items() if value is not None}
        (folder / CONFIG_FILE).write_text(json.dumps(kept))
        return Tokenizer(folder)

    return make


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub without repositories; the cache is of this test."""
    with only_hub(tmp_path / "hf", monkeypatch) as server:
        yield server
