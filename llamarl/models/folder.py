"""Readers of a Hugging Face folder's description of its model, except the weights. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from llamarl.config import ConfigError, open_file, read_json
from llamarl.config.hub import folder_of, missing_folder
from llamarl.models.hybrid import text_config
from llamarl.models.shape import ModelShape, stop_ids
from llamarl.models.vocabulary import unused_ids
from llamarl.observability.metrics import megabytes

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
PEFT_WEIGHTS, PEFT_CONFIG, PEFT_PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
BASE_RECORD = "llamarl_base.json"
"""File in an adapter's folder with the relative path of its base model, and fingerprints of that model's weights."""

_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


def fingerprints(folder: str | Path) -> dict[str, str]:
    """Returns the fingerprint of each file of weights in `folder`, by name; of no folder, none.

    A fingerprint is the size and a digest of 64 blocks of 64 KiB, spread over the file from its header to its end. It
    takes a few milliseconds for any size. It detects other weights and other shapes, because training changes weights
    everywhere. In a file over 4 MiB it may miss a change of a few bytes.

    Raises:
        ConfigError: a file cannot be read.
    """
    digests = dict[str, str]()
    for path in sorted(folder_of(folder).glob("*.safetensors")):
        size, digest = path.stat().st_size, xxhash.xxh3_128()
        try:
            with open_file(path) as file:
                for at in sorted({max(0, size - _SAMPLE_BYTES) * block // (_SAMPLES - 1) for block in range(_SAMPLES)}):
                    file.seek(at)
                    digest.update(file.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; copy it again") from None
        digests[path.name] = f"{size} bytes, xxh3-128 {digest.hexdigest()} of samples"
    return digests


def is_adapter(folder: str | Path) -> bool:
    """Returns whether a folder holds adapters and no whole model."""
    return (Path(folder) / PEFT_CONFIG).is_file() and not (Path(folder) / CONFIG).is_file()


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of the weights: one, or shards with an index. Raises ConfigError: one is missing."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / WEIGHTS_INDEX).is_file():
        raise ConfigError(f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}; save the checkpoint as safetensors")
    weight_map = read_model_file(folder, WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{folder / WEIGHTS_INDEX} has no `weight_map`; copy the file again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}, which {WEIGHTS_INDEX} names; copy the missing shard")
    return [folder / name for name in names]


def loading_text(folder: str | Path) -> str:
    """Returns `loading the model (269 MB)`, without the size if the folder has no weights."""
    num_bytes = sum(path.stat().st_size for path in folder_of(folder).glob("*.safetensors"))
    return f"loading the model ({megabytes(num_bytes)})" if num_bytes else "loading the model"


def opened(path: Path, framework: str = "pt") -> Any:
    """Opens a file of weights. Raises ConfigError: it is damaged."""
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a whole safetensors file ({error}); copy it again") from None


def load_shape(folder: str | Path) -> ModelShape:
    """Returns the shape in `folder`/config.json, with the stop tokens of generation_config.json if it has any, and the
    token ids that its tokenizer does not use.

    Raises:
        ConfigError: there is no such folder or file, or it has a feature that the decoder does not support.
    """
    folder = folder_of(folder)
    config = read_model_file(folder, CONFIG)
    stops = read_model_file(folder, GENERATION_CONFIG) if (folder / GENERATION_CONFIG).is_file() else None
    try:
        config = text_config(config)
        if stops is not None:
            config["eos_token_id"] = list(stop_ids(stops) or stop_ids(config))
        shape = ModelShape.from_hf(config)
        return replace(shape, unused_ids=unused_ids(folder, shape.vocab_size))
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        cause = f"a value of the wrong kind ({type(error).__name__}: {error})"
        raise ConfigError(f"{folder / CONFIG} has {cause}; copy the file again") from None


def read_model_file(folder: Path, name: str) -> dict[str, Any]:
    """Returns the JSON object in `folder`/`name`. Raises ConfigError: there is none."""
    if not folder.is_dir():
        raise ConfigError(missing_folder(folder))
    if not (folder / name).is_file():
        raise ConfigError(f"{folder} has no {name}; name a Hugging Face model folder")
    return read_json(folder / name, "copy the file again")
