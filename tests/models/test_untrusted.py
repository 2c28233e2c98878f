"""A model folder is data: nothing in it is executed, whatever it asks for."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from llamarl.config import ConfigError
from llamarl.data.tokenizer import Tokenizer
from llamarl.models.hf import load_model
from tests.end_to_end.tiny import make_model


class Bomb:
    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._canary,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def test_pickled_weights_are_not_read(folder: Path, canary: Path) -> None:
    """Beside safetensors they are passed over, alone or under their name they are refused."""
    bomb = pickle.dumps(Bomb(canary))
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.pth"):
        (folder / name).write_bytes(bomb)
    load_model(folder, torch.float32, "cpu")
    for content in (None, bomb):
        (folder / "model.safetensors").unlink()
        if content is not None:
            (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError):
            load_model(folder, torch.float32, "cpu")
        (folder / "model.safetensors").touch()
    assert not canary.exists()


def test_code_that_a_config_names_is_not_imported(folder: Path, canary: Path) -> None:
    code = f"from pathlib import Path\nPath({str(canary)!r}).touch()\nclass Model: ...\n"
    (folder / "modeling_evil.py").write_text(code)
    (folder / "tokenization_evil.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        settings["auto_map"] = {
            "AutoModelForCausalLM": "modeling_evil.Model",
            "AutoTokenizer": "tokenization_evil.Model",
        }
        settings["trust_remote_code"] = True
        (folder / name).write_text(json.dumps(settings))
    load_model(folder, torch.float32, "cpu")
    assert Tokenizer(folder).vocab_size == 300
    assert not canary.exists()


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()", "cycler.__init__.__globals__.os.system('touch CANARY')",
        "self.__init__.__globals__", "messages.__class__.__base__.__subclasses__()",
        "lipsum.__globals__['os'].system('touch CANARY')", "raise_exception.__globals__",
        "''|attr('__class__')|attr('__mro__')", "'{0.__class__.__mro__}'.format(1)",
    ],
)  # fmt: skip
def test_chat_templates_reach_no_python(folder: Path, canary: Path, expression: str) -> None:
    (folder / "chat_template.jinja").write_text("{{ " + expression.replace("CANARY", str(canary)) + " }}")
    try:
        said = Tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}])
    except (ConfigError, ValueError):
        said = ""
    assert "class" not in said and str(os.getpid()) not in said
    assert not canary.exists()
