"""`DecoderShape`: sizes of a model, from a Hugging Face config or by built-in name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from llamarl.config import ConfigError, RunConfig, did_you_mean, load_sft_config, read_json
from llamarl.config.errors import one_of
from llamarl.config.hub import OF_MODELS, hub_name, open_hub
from llamarl.config.section import near_path
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.refused import OTHERS, refusal
from llamarl.models.shape import ModelShape
from llamarl.models.sizes import DecoderSizes, MoeShape


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape(DecoderSizes):
    """A model that the planner knows by name."""

    name: str
    path: str = ""
    """`model.path` of a run: a folder, or a name of the Hub."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "config.json") -> DecoderShape:
        """Returns the shape for a parsed `config.json`. Raises ConfigError if a key is missing or the model is not
        supported."""
        shape = ModelShape.from_hf(config)
        sizes = {field.name: getattr(shape, field.name) for field in fields(DecoderSizes)}
        return cls(name=name, path=name, **sizes)


_COLUMNS = (
    *("family", "name", "path", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "tie_embeddings", "moe", "attention_bias", "delta"),
)


def _moe(num_layers: int, num_experts: int, experts_per_token: int, expert_size: int, **others: Any) -> MoeShape:
    """Returns fields of a mixture in the last `num_layers` layers behind `dense` layers."""
    first = others.pop("dense", 0)
    return MoeShape(
        num_experts=num_experts, experts_per_token=experts_per_token, expert_size=expert_size,
        sparse_layers=tuple(range(first, first + num_layers)), normalized=True, **others,
    )  # fmt: skip


def _delta(num_layers: int, num_value_heads: int) -> DeltaShape:
    """Returns the delta nets of a model in which every fourth layer has attention."""
    layers = tuple(layer for layer in range(num_layers) if (layer + 1) % 4)
    return DeltaShape(layers=layers, num_key_heads=16, num_value_heads=num_value_heads, key_dim=128, value_dim=128)


_GATED: dict[str, Any] = {"shared_size": 512, "gates_shared": True}
_SIGMOID: dict[str, Any] = {"scoring": "sigmoid", "has_selection_bias": True}
_TABLE: tuple[tuple[Any, ...], ...] = (
    # Llama 3.1 (arXiv 2407.21783, table 3); of 3.2 config.json on the Hub
    ("llama", "llama3-1b", "meta-llama/Llama-3.2-1B-Instruct", 2048, 16, 32, 8, 64, 8192, 128_256, 131_072, True),
    ("llama", "llama3-3b", "meta-llama/Llama-3.2-3B-Instruct", 3072, 28, 24, 8, 128, 8192, 128_256, 131_072, True),
    ("llama", "llama3-8b", "meta-llama/Llama-3.1-8B-Instruct", 4096, 32, 32, 8, 128, 14_336, 128_256, 131_072),
    ("llama", "llama3-70b", "meta-llama/Llama-3.1-70B-Instruct", 8192, 80, 64, 8, 128, 28_672, 128_256, 131_072),
    ("llama", "llama3-405b", "meta-llama/Llama-3.1-405B-Instruct", 16_384, 126, 128, 8, 128, 53_248, 128_256, 131_072),
    # Qwen2.5 (arXiv 2412.15115, table 1), and config.json on the Hub
    ("qwen2", "qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", 896, 24, 14, 2, 64, 4864, 151_936, 32_768, True),
    ("qwen2", "qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", 1536, 28, 12, 2, 128, 8960, 151_936, 32_768, True),
    ("qwen2", "qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", 2048, 36, 16, 2, 128, 11_008, 151_936, 32_768, True),
    ("qwen2", "qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", 3584, 28, 28, 4, 128, 18_944, 152_064, 32_768),
    ("qwen2", "qwen2.5-14b", "Qwen/Qwen2.5-14B-Instruct", 5120, 48, 40, 8, 128, 13_824, 152_064, 32_768),
    ("qwen2", "qwen2.5-32b", "Qwen/Qwen2.5-32B-Instruct", 5120, 64, 40, 8, 128, 27_648, 152_064, 32_768),
    ("qwen2", "qwen2.5-72b", "Qwen/Qwen2.5-72B-Instruct", 8192, 80, 64, 8, 128, 29_568, 152_064, 32_768),
    # Qwen3 (arXiv 2505.09388, table 1), and config.json on the Hub
    ("qwen3", "qwen3-0.6b", "Qwen/Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072, 151_936, 40_960, True),
    ("qwen3", "qwen3-1.7b", "Qwen/Qwen3-1.7B", 2048, 28, 16, 8, 128, 6144, 151_936, 40_960, True),
    ("qwen3", "qwen3-4b", "Qwen/Qwen3-4B", 2560, 36, 32, 8, 128, 9728, 151_936, 40_960, True),
    ("qwen3", "qwen3-8b", "Qwen/Qwen3-8B", 4096, 36, 32, 8, 128, 12_288, 151_936, 40_960),
    ("qwen3", "qwen3-14b", "Qwen/Qwen3-14B", 5120, 40, 40, 8, 128, 17_408, 151_936, 40_960),
    ("qwen3", "qwen3-32b", "Qwen/Qwen3-32B", 5120, 64, 64, 8, 128, 25_600, 151_936, 40_960),
    # config.json on the Hub
    ("mixtral", "mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", 4096, 32, 32, 8, 128, 14_336, 32_000, 32_768, False,
     _moe(32, 8, 2, 14_336)),
    ("qwen3_moe", "qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 2048, 48, 32, 4, 128, 6144, 151_936, 40_960, False,
     _moe(48, 128, 8, 768)),
    ("qwen3_moe", "qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", 4096, 94, 64, 4, 128, 12_288, 151_936, 40_960, False,
     _moe(94, 128, 8, 1536)),
    ("glm4_moe", "glm-4.5-air", "zai-org/GLM-4.5-Air", 4096, 46, 96, 8, 128, 10_944, 151_552, 131_072, False,
     _moe(45, 128, 8, 1408, dense=1, shared_size=1408, **_SIGMOID), True),
    ("qwen3_next", "qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct", 2048, 48, 16, 2, 256, 5120, 151_936,
     262_144, False, _moe(48, 512, 10, 512, **_GATED), False, _delta(48, 32)),
    ("qwen3_5_text", "qwen3.5-9b", "Qwen/Qwen3.5-9B", 4096, 32, 16, 4, 256, 12_288, 248_320, 262_144, False, None,
     False, _delta(32, 32)),
    ("qwen3_5_text", "qwen3.5-27b", "Qwen/Qwen3.5-27B", 5120, 64, 24, 4, 256, 17_408, 248_320, 262_144, False, None,
     False, _delta(64, 48)),
    ("qwen3_5_moe_text", "qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", 2048, 40, 16, 2, 256, 512, 248_320, 262_144, False,
     _moe(40, 256, 8, 512, **_GATED), False, _delta(40, 32)),
)  # fmt: skip
MODELS = {row[1]: DecoderShape(**dict(zip(_COLUMNS, row, strict=False))) for row in _TABLE}
"""Built-in shapes."""
_LLAMA = re.compile(r"(meta-)?llama-?3(\.[123])?-")
_TUNED = re.compile(r"-(instruct|base|it)(-\d{4})?$|-v0\.1$")


def built_in(name: str) -> DecoderShape | None:
    """Returns the built-in shape by its name or by a Hub name, such as `Qwen/Qwen2.5-7B-Instruct`."""
    return MODELS.get(_TUNED.sub("", _LLAMA.sub("llama3-", name.lower().rsplit("/", 1)[-1].partition("@")[0])))


def smaller(model: DecoderSizes) -> list[DecoderShape]:
    """Returns built-in shapes of the same family with fewer parameters, the largest first. All families count if the
    family has no dense shape here. A mixture is suggested only for a mixture."""
    kin = model.family.removesuffix("_moe")
    is_known = any(one.family == kin and one.moe is None for one in MODELS.values())
    found = [
        one for one in MODELS.values()
        if (one.family.removesuffix("_moe") == kin or not is_known) and (one.moe is None or model.moe)
        if one.num_parameters < model.num_parameters
    ]  # fmt: skip
    return sorted(found, key=lambda one: one.num_parameters, reverse=True)


def config_only(files: Collection[str]) -> list[str]:
    """Returns the file that describes a model's shape, if a repository has it."""
    return [path for path in files if path == "config.json"]


def model_of_run(config: RunConfig, place: str) -> DecoderShape:
    """Returns the shape of a run's model, or the future shape if a warm start has not created it. `place` is the option
    that names the run's file. Raises ConfigError."""
    path, warm_start = config.model.path, config.model.warm_start
    if warm_start and not Path(path, "config.json").is_file():
        shape = load_sft_config(warm_start).shape
        family, more = (
            (shape.family, {}) if isinstance(shape.family, str) else (shape.family.name, shape.family.options)
        )
        table = {
            "model_type": family, "hidden_size": shape.hidden_size, "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads,
            "intermediate_size": shape.intermediate_size, "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.max_position_embeddings, "tie_word_embeddings": True, **more,
        }  # fmt: skip
        return DecoderShape.from_hf(table, path)
    return find_model(path, f"{place}: model.path =")


def find_model(name: str, option: str = "--model") -> DecoderShape:
    """Returns a built-in shape, or the shape of a Hugging Face folder or `config.json`. For a Hub name, the cached
    config has priority over the built-in shape. Raises ConfigError."""
    if name in MODELS:
        return MODELS[name]
    path, of_hub, known = Path(name), hub_name(name), built_in(name)
    if of_hub:
        with suppress(ConfigError) if known else nullcontext():  # an installation may lack the part of the Hub
            found = open_hub().cached(of_hub, choose=config_only)
            path = found.folder if found else path
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if known:
            return replace(known, name=name, path=name if of_hub else known.path)
        raise ConfigError(f"`{option} {name}` {_unknown(name)}")
    try:
        return DecoderShape.from_hf(read_json(path, "give the config.json of a Hugging Face model"), name)
    except ConfigError as error:
        raise ConfigError(f"`{option} {name}`: {error}") from None


def _unknown(name: str) -> str:
    """Returns the end of a message about an unknown model: the family is not supported, or how to get the model."""
    for family in sorted(OTHERS, key=len, reverse=True):
        words = "[-_.]?".join(re.findall("[a-z]+|[0-9]+", family))
        words += r"(?!\.[5-9])" * (family == "glm4")  # from 4.5 on it is another family, which is computed
        if re.search(rf"(?<![a-z0-9]){words}(?![a-z0-9])", name.lower()):
            return refusal(family)
    if of_hub := hub_name(name):
        fetch = f"fetch its config: hf download {of_hub.repo} config.json"
        return f"is not in this machine's cache of the Hub, and nothing is fetched here; {fetch}"
    if near := near_path(name, OF_MODELS):
        return f"is neither a built-in shape nor a folder; {one_of([near])}"
    hint = did_you_mean(name, MODELS, f"give one of {', '.join(MODELS)} or a Hugging Face folder")
    return f"is neither a built-in shape nor a file; {hint}"
