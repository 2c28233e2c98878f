"""Low-rank adapters (LoRA, arXiv 2106.09685): a frozen matrix W is used as W + scale * B @ A.

Parameters are named as in PEFT's files, without its prefix: `PROJECTION.lora_A.weight` [r, in] and
`PROJECTION.lora_B.weight` [out, r] next to `PROJECTION.weight` [out, in].

Shape suffixes: N packed tokens, I and O inputs and outputs of a projection, R rank of its adapter.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from llamarl.config.hub import HubName, folder_of, hub_name
from llamarl.config.roles import LoraConfig
from llamarl.models.folder import BASE_RECORD, PEFT_CONFIG, PEFT_PREFIX, PEFT_WEIGHTS, fingerprints
from llamarl.models.hf import TOKENIZER_FILES, replaced_folder, small_files, write_json
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Projection, Transformer

A, B = "lora_A.weight", "lora_B.weight"


class LoraLinear(nn.Module):
    """A frozen projection and its adapter: x W^T + b + scale * (x A^T) B^T (section 4.1)."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        (num_outputs, num_inputs), self.scale = base.weight.shape, scale
        self.weight, self.bias = base.weight, base.bias
        options = {
            "bias": False,
            "device": "cpu" if base.weight.is_meta else base.weight.device,
            "dtype": torch.promote_types(base.weight.dtype, torch.float32),
        }
        self.multiply = Projection.multiply
        self.lora_A = Projection(num_inputs, rank, **options)
        self.lora_B = Projection(rank, num_outputs, **options)

    def forward(self, x_N_I: Tensor) -> Tensor:
        weight_O_I = self.weight
        if not torch.is_autocast_enabled(x_N_I.device.type):
            weight_O_I = weight_O_I.to(x_N_I.dtype)
        return self.multiply(x_N_I, weight_O_I, self.bias) + self.scale * self.lora_B(self.lora_A(x_N_I))


def add_adapters(model: Transformer, config: LoraConfig, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Freezes a model and gives the projections `config.targets` of all layers an adapter, which changes nothing at
    first.

    Args:
        seed: seed of the adapters' first values.
        dtype: type of frozen adapted projections, which are also computed in it.
    """
    model.requires_grad_(False)
    for name, base in list(model.named_modules()):
        owner, _, projection = name.rpartition(".")
        if projection not in config.targets:
            continue
        assert isinstance(base, nn.Linear), name
        adapted = LoraLinear(base, config.rank, config.scale)
        if dtype == torch.bfloat16:
            adapted.weight.data = adapted.weight.data.to(dtype)
        with torch.no_grad():
            for kind in (A, B):
                adapted.get_parameter(kind).copy_(
                    first_values(f"{name}.{kind}", adapted.get_parameter(kind).shape, seed)
                )
        setattr(model.get_submodule(owner), projection, adapted)


def first_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Returns an adapter's first values, float32 on the CPU, the same on every rank.

    A is uniform within +-1 / sqrt(inputs), as in PEFT. B is zero, so the model's outputs do not change at first.
    """
    if name.endswith(B):
        return torch.zeros(shape)
    generator = torch.Generator("cpu").manual_seed(crc32(f"{seed}/{name}".encode()))
    return torch.empty(shape).uniform_(-(shape[1] ** -0.5), shape[1] ** -0.5, generator=generator)


def adapted_weights(shape: ModelShape, config: LoraConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields names and shapes of the matrices that have an adapter, in the order of the model."""
    with torch.device("meta"):
        model = Transformer(shape)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight") and name.split(".")[-2] in config.targets:
            yield name, tuple(weight.shape)


def adapter_of(adapters: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Returns A and B of the matrix `name`."""
    module = name.removesuffix("weight")
    return adapters[f"{module}{A}"], adapters[f"{module}{B}"]


def merged(weight_O_I: Tensor, a_R_I: Tensor, b_O_R: Tensor, scale: float) -> Tensor:
    """Returns W + scale * B @ A, float32 (float64 for float64)."""
    dtype = torch.promote_types(weight_O_I.dtype, torch.float32)
    return torch.addmm(weight_O_I.to(dtype), b_O_R.to(dtype), a_R_I.to(dtype), alpha=scale)


def save_adapters(
    adapters: Mapping[str, Tensor],
    config: LoraConfig,
    base: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Writes adapters as a folder that PEFT loads onto the model `base`, with the small files of `base`, atomically.

    A record in the folder finds and recognizes the base model when both folders have moved.

    Args:
        dtype: type of the adapters in the file.
        texts: contents of further files by name. They replace files of `base`.

    Raises:
        ConfigError: `folder` holds other files.
    """
    name = hub_name(base) or _snapshot_name(base)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name.repo if name else base,
        "revision": name.revision if name else None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": config.targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    small, place = small_files(base), folder_of(base)
    record = {} if name else {"relative": os.path.relpath(place.absolute(), folder.absolute())}
    record |= {"files": fingerprints(place)} if place.is_dir() else {}
    names = {PEFT_WEIGHTS, PEFT_CONFIG, BASE_RECORD, *TOKENIZER_FILES, *texts, *(path.name for path in small)}
    with replaced_folder(folder, names) as new:
        for path in small:
            shutil.copyfile(path, new / path.name)
        for file, text in texts.items():
            (new / file).write_text(text, encoding="utf-8")
        tensors = {f"{PEFT_PREFIX}{name}": tensor.to(dtype).contiguous() for name, tensor in adapters.items()}
        save_file(tensors, new / PEFT_WEIGHTS, metadata={"format": "pt"})
        (new / PEFT_WEIGHTS).chmod(new.stat().st_mode & 0o666)  # safetensors makes it readable for its owner only
        write_json(new / PEFT_CONFIG, settings)
        write_json(new / BASE_RECORD, record)


def _snapshot_name(base: str) -> HubName | None:
    """Returns the Hub name of a folder in the cache of the Hub's client, or None for another folder."""
    match = re.search(r"/models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})/?$", base)
    return HubName.of(f"{match[1]}/{match[2]}@{match[3]}") if match else None
