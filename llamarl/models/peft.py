"""Adapters in PEFT's format, of a run or of another program: finds the base model, checks settings, merges weights.

Imports torch when it merges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.config import ConfigError, read_json
from llamarl.config.hub import HubName, folder_of
from llamarl.models.folder import (
    BASE_RECORD,
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    fingerprints,
    load_shape,
    opened,
)

if TYPE_CHECKING:
    from torch import Tensor

_FIX = "save the adapter again, or merge it with PEFT's merge_and_unload and name the merged model"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None), "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []), "rank_pattern": (None, {}), "alpha_pattern": (None, {}), "lora_bias": (False, None),
    "layer_replication": (None, []), "trainable_token_indices": (None,), "target_parameters": (None, []),
}  # fmt: skip
"""Settings of PEFT that change what an adapter computes, with the supported values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A LoRA adapter in a folder."""

    folder: Path
    base: str
    """Folder of the base model, or `owner/name@revision` on the Hub."""
    scale: float
    """Factor of B @ A."""

    @classmethod
    def of(cls, folder: str | Path, base: str = "") -> Adapter:
        """Reads adapter_config.json.

        Args:
            base: replaces the base model that the file names; "" means no replacement.

        Raises:
            ConfigError: a setting is not supported, or the base model is not found.
        """
        folder = Path(folder)
        settings = read_json(folder / PEFT_CONFIG, _FIX)
        for name, values in _PLAIN.items():
            if settings.get(name, values[0]) not in values:
                raise ConfigError(f"{folder / PEFT_CONFIG}: {name} = {settings[name]!r} is not supported; {_FIX}")
        rank, alpha = settings.get("r"), settings.get("lora_alpha")
        if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
            raise ConfigError(
                f"{folder / PEFT_CONFIG}: r = {rank!r}, lora_alpha = {alpha!r}: two numbers are needed; {_FIX}"
            )
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        return cls(folder=folder, base=base or _base(folder, settings), scale=scale)

    def merge(self, base: str, to: Path) -> None:
        """Writes the base model with the adapter merged in, in float32, and the adapter's tokenizer files.

        Args:
            base: `self.base`, fetched: a folder, or a name on the Hub with a commit.

        Raises:
            ConfigError: the base is another model, or a tensor does not belong to it.
        """
        import torch

        from llamarl.models.hf import TOKENIZER_FILES, load_model, save_tensors
        from llamarl.models.lora import merged

        self._check_base(folder_of(base))
        shape, weights = load_shape(base), load_model(base, torch.float32, "cpu").state_dict()
        for name, (a_R_I, b_O_R) in self._pairs().items():
            if name not in weights or weights[name].ndim != 2:
                raise ConfigError(
                    f"{self.folder}: the model {base} has no matrix `{name}`; name the adapter's own base"
                )
            if weights[name].shape != (b_O_R.shape[0], a_R_I.shape[1]):
                raise ConfigError(
                    f"{self.folder}: `{name}` adapts a matrix of {b_O_R.shape[0]} x {a_R_I.shape[1]}, and in {base} it "
                    f"is {' x '.join(map(str, weights[name].shape))}; name the adapter's own base"
                )
            weights[name].copy_(merged(weights[name], a_R_I, b_O_R, self.scale))
        has_tokenizer = (self.folder / TOKENIZER_FILES[0]).is_file()
        save_tensors(weights, shape, to, self.folder if has_tokenizer else None, base=base)

    def _pairs(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Returns A and B by the name of the matrix that they adapt. Raises ConfigError."""
        from llamarl.models.lora import A, B

        if not (self.folder / PEFT_WEIGHTS).is_file():
            raise ConfigError(f"{self.folder} has no {PEFT_WEIGHTS}; {_FIX}")
        with opened(self.folder / PEFT_WEIGHTS) as file:
            tensors = {name.removeprefix(PEFT_PREFIX): file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name in tensors:
            module, _, kind = name.rpartition(".lora_")
            if not module or f"lora_{kind}" not in (A, B) or not {f"{module}.{A}", f"{module}.{B}"} <= tensors.keys():
                raise ConfigError(f"{self.folder / PEFT_WEIGHTS}: `{name}` is not half of a LoRA pair; {_FIX}")
            pairs[f"{module}.weight"] = tensors[f"{module}.{A}"], tensors[f"{module}.{B}"]
        if not pairs:
            raise ConfigError(f"{self.folder / PEFT_WEIGHTS} holds no adapter; {_FIX}")
        return pairs

    def _check_base(self, base: Path) -> None:
        """Raises ConfigError: the adapter was trained on other weights."""
        if not (self.folder / BASE_RECORD).is_file():
            return
        before = read_json(self.folder / BASE_RECORD, _FIX).get("files")
        if before and (now := fingerprints(base)) and now != before:
            raise ConfigError(
                f"{self.folder}: this adapter was trained on other weights than those in {base}; name the model "
                f"of the run as base_model_name_or_path in {self.folder / PEFT_CONFIG}"
            )


def _base(folder: Path, settings: Mapping[str, Any]) -> str:
    """Returns the folder or name of an adapter's base model, also after both have moved. Raises ConfigError."""
    path, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    if not isinstance(path, str) or not path:
        raise ConfigError(f"{folder / PEFT_CONFIG} has no base_model_name_or_path; name the base model there")
    places = [Path(path), folder / path]
    if (folder / BASE_RECORD).is_file() and isinstance(
        relative := read_json(folder / BASE_RECORD, _FIX).get("relative"), str
    ):
        places.append(folder / relative)
    if found := next((place for place in places if place.is_dir()), None):
        return str(found)
    if name := HubName.of(path):
        return str(name.at(revision)) if isinstance(revision, str) and revision else str(name)
    raise ConfigError(
        f"{folder}: its base model {path!r} was not found; write the folder or the Hub name of the base model as "
        f"base_model_name_or_path into {folder / PEFT_CONFIG}"
    )
