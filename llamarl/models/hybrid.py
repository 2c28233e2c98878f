"""Hybrid decoders in a Hugging Face `config.json`: which layers have a delta net, and the text part of models that also
read images. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamarl.config import ConfigError
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.keys import refuse, same_value
from llamarl.models.sizes import count

TEXT_FAMILIES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Family of the decoder by the `model_type` of a model that also reads images."""
TEXT_PREFIX = "model.language_model."
"""Beginning of the decoder's names in the files of such a model."""
LEFT_OUT = ("mtp.", "model.visual.")
"""Beginnings of names in files of layers that predict further tokens, and of the image encoder."""
_OUTER = {
    "model_type", "architectures", "text_config", "vision_config", "image_token_id", "video_token_id",
    "vision_start_token_id", "vision_end_token_id", "tie_word_embeddings", "transformers_version", "torch_dtype",
    "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "language_model_only",
}  # fmt: skip
"""Keys of the config around a `text_config`. None of them changes what the decoder computes for text."""
_SHARED = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "torch_dtype", "dtype")
"""Keys that may be in the config or in its `text_config`."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a decoder: the config itself, or that of the text part of a model that also reads images.

    Raises:
        ConfigError: there is no text part, or a key around it is unknown.
    """
    outer = config.get("model_type")
    if not isinstance(outer, str) or outer not in TEXT_FAMILIES:
        return dict(config)
    inner, family = config.get("text_config"), TEXT_FAMILIES[outer]
    if not isinstance(inner, dict):
        raise ConfigError(f"config.json: `text_config` is missing; model_type {outer} needs it, copy the file again")
    for key, value in config.items():
        if value is not None and key not in _OUTER and not key.startswith("_"):
            refuse(key, value, f"{outer} has no such key; remove it if it changes nothing that the model computes")
    if inner.get("model_type", family) != family:
        refuse("text_config.model_type", inner["model_type"], f"the text part of {outer} is {family}")
    named = {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"} & {
        *config.get("architectures", ())
    }
    text: dict[str, Any] = {"model_type": family, "architectures": [] if named else config.get("architectures")}
    shared = {
        key: same_value({key: config.get(key), f"text_config.{key}": inner.get(key)}, key, f"text_config.{key}")
        for key in _SHARED
    }
    return inner | {key: value for key, value in shared.items() if value is not None} | text


def delta_from_hf(config: Mapping[str, Any], num_layers: int) -> dict[str, Any] | None:
    """Returns the fields of `DeltaShape` of a hybrid family, or None if all layers have attention.

    Raises:
        ConfigError: a key is missing, or of the wrong type.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        every = count(config, "full_attention_interval", default=4)
        kinds = ["full_attention" if (number + 1) % every == 0 else "linear_attention" for number in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        refuse("layer_types", kinds, f"a list with one entry for each of the {num_layers} layers is needed")
    if others := sorted({str(kind) for kind in kinds} - {"full_attention", "linear_attention"}):
        refuse("layer_types", others, "only full_attention and linear_attention are supported")
    layers = tuple(number for number, kind in enumerate(kinds) if kind == "linear_attention")
    if not layers:
        return None
    if len(layers) == num_layers:
        refuse("layer_types", "linear_attention throughout", "at least one layer of full_attention is needed")
    return {
        "layers": layers,
        "num_key_heads": count(config, "linear_num_key_heads", default=16),
        "num_value_heads": count(config, "linear_num_value_heads", default=32),
        "key_dim": count(config, "linear_key_head_dim", default=128),
        "value_dim": count(config, "linear_value_head_dim", default=128),
        "conv_width": count(config, "linear_conv_kernel_dim", default=4),
    }


def delta_to_hf(delta: DeltaShape | None, num_layers: int) -> dict[str, Any]:
    """Returns the keys of `config.json` with these fields: the inverse of `delta_from_hf`."""
    layers = () if delta is None else delta.layers
    kinds = ["linear_attention" if number in layers else "full_attention" for number in range(num_layers)]
    if delta is None:
        return {"layer_types": kinds}
    return {
        "layer_types": kinds,
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_width,
    }
