"""`ModelShape`: the part of a Hugging Face `config.json` that decides a decoder's arithmetic. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamarl.config import ConfigError
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.hybrid import delta_from_hf, delta_to_hf, text_config
from llamarl.models.keys import check_keys, refuse, same_value
from llamarl.models.mixture import flag, mixture_from_hf, mixture_to_hf
from llamarl.models.refused import refusal
from llamarl.models.sizes import (
    HYBRIDS,
    DecoderSizes,
    MoeShape,
    count,
    original_context,
    positive,
    rope_kind,
    rope_of,
    sizes_from_hf,
)
from llamarl.models.vocabulary import Spans

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
"""Class in transformers by family (`model_type` of config.json)."""
MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe", "qwen3_next", "qwen3_5_moe_text")
"""Families of mixtures of experts."""
WINDOWED = ("qwen2", "qwen3", "qwen3_moe")
"""Families in which `use_sliding_window` decides whether there is a window."""
WITHOUT_WINDOW = ("llama", "glm4_moe")
"""Families whose class in transformers has no window."""
_ABSENT: dict[str, dict[str, float]] = {
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "glm4_moe": {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    **{family: {"partial_rotary_factor": 0.25} for family in HYBRIDS},
}
"""Values that a family's class in transformers assumes for absent keys, if other families assume others."""
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Keys of a rope's table for every kind of rope."""
_IMAGE_KEYS = ("mrope_section", "mrope_interleaved")
"""Keys that distribute channels among the axes of images. A token of text has one position on all axes."""
_MOST = {"factor": 1e4, "attention_factor": 1e2, "mscale": 1e2, "mscale_all_dim": 1e2}
"""Largest values of a scaling. Published ones are a hundredth of these."""
_BETAS = {"beta_slow": 1.0, "beta_fast": 32.0}

MAX_LAYERS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Llama 3 stretch of the rotary wavelengths (`rope_type = "llama3"`)."""

    factor: float
    """Divides the frequencies of long wavelengths."""
    low_freq_factor: float
    """Wavelengths over original_max_position_embeddings / low_freq_factor are divided."""
    high_freq_factor: float
    """Wavelengths under original_max_position_embeddings / high_freq_factor stay. Those between are blended."""
    original_max_position_embeddings: int
    """Context of pretraining, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """YaRN stretch of the rotary wavelengths (`rope_type = "yarn"`, arXiv 2309.00071), as in transformers 5."""

    factor: float
    """Divides the frequencies of long wavelengths."""
    original_max_position_embeddings: int
    """Context of pretraining, in tokens."""
    beta_fast: float = 32.0
    """Wavelengths that turn more often than this in the context of pretraining stay."""
    beta_slow: float = 1.0
    """Wavelengths that turn less often than this in it are divided. Those between are blended."""
    attention_factor: float | None = None
    """Factor of sine and cosine. None means that `magnitude` computes it."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    """Weights of the logarithm in the magnitude's numerator and denominator. Both or none are set."""
    truncate: bool = True
    """Whether the bounds of the blended channels are whole numbers."""

    @property
    def magnitude(self) -> float:
        """Factor of sine and cosine, so scores are multiplied by its square (section 3.4 of the paper)."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        log = math.log(max(1.0, self.factor))
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * log + 1.0) / (0.1 * self.mscale_all_dim * log + 1.0)
        return 0.1 * log + 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """All rotary frequencies divided (`rope_type = "linear"`, arXiv 2306.15595)."""

    factor: float


RopeScaling = Llama3Scaling | YarnScaling | LinearScaling
SCALINGS: dict[str, type[RopeScaling]] = {"llama3": Llama3Scaling, "yarn": YarnScaling, "linear": LinearScaling}
"""Records by the `rope_type` of config.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape(DecoderSizes):
    """Sizes and switches of one decoder. Its family is a key of `ARCHITECTURES`, heads divide evenly among key/value
    heads, and `head_dim` is even."""

    partial_rotary_factor: float = 1.0
    """Share of a head's channels, the first ones, that is rotated."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    bos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response."""
    unused_ids: Spans = ()
    """Token ids below `vocab_size` without a token in the tokenizer. They are never sampled."""

    def __post_init__(self) -> None:
        if self.family not in ARCHITECTURES:
            raise ConfigError(f"model family {self.family!r} is not supported; use one of {', '.join(ARCHITECTURES)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly; "
                "give a number of key/value heads that divides the number of attention heads"
            )
        self._check_rotation()
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(f"{self.num_layers} layers; a model may have {MAX_LAYERS}")
        for name, value in (("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)):
            if isinstance(value, bool) or not 0 < value < math.inf:  # refuses NaN too
                raise ConfigError(f"{name} = {value!r}; a positive number is needed, copy config.json again")
        for token in self.stop_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise ConfigError(f"eos_token_id = {token!r} is none of the {self.vocab_size} tokens of the model")

    def _check_rotation(self) -> None:
        if self.head_dim % 2:
            raise ConfigError(f"head_dim = {self.head_dim} cannot be rotated in pairs; give an even number")
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise ConfigError(
                f"partial_rotary_factor = {self.partial_rotary_factor} of head_dim = {self.head_dim} cannot be rotated "
                "in pairs; give a share up to 1 of which an even number of channels comes"
            )
        if isinstance(self.rope_scaling, YarnScaling) and self.rope_theta <= 1:
            raise ConfigError(f"rope_theta = {self.rope_theta!r} with YaRN; over 1 is needed, copy config.json again")

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelShape:
        """Returns the shape of a parsed `config.json`, written by transformers 4 or 5.

        Raises:
            ConfigError: the architecture or a feature in use is not supported, or a key is missing.
        """
        config = text_config(config)
        family = config.get("model_type")
        if not isinstance(family, str) or family not in ARCHITECTURES:
            raise ConfigError(f"config.json: `model_type` = {family!r} {refusal(family)}")
        absent = _ABSENT.get(family, {})
        check_keys(config, family)
        named = config.get("architectures") or []
        if not isinstance(named, list):
            refuse("architectures", named, "a list is needed")
        if ARCHITECTURES[family] not in named and any(str(name).endswith("ForCausalLM") for name in named):
            refuse("architectures", named, f"model_type {family} is a {ARCHITECTURES[family]}")
        sizes = sizes_from_hf(config)
        if family not in HYBRIDS:
            _check_full_attention(config, sizes["num_layers"], sizes["max_position_embeddings"])
        if (
            config.get("head_dim") is None
            and family not in ("qwen3", *HYBRIDS)
            and sizes["hidden_size"] % sizes["num_heads"]
        ):
            divides = f"without head_dim, num_attention_heads = {sizes['num_heads']} must divide it"
            refuse("hidden_size", sizes["hidden_size"], divides)
        theta, scaling, rotated = _rope(config, absent)
        mixture = mixture_from_hf(config, sizes["num_layers"]) if family in MIXTURES else None
        delta = delta_from_hf(config, sizes["num_layers"]) if family in HYBRIDS else None
        return cls(
            family=family,
            **sizes,
            moe=MoeShape(**mixture) if mixture else None,
            delta=DeltaShape(**delta) if delta else None,
            partial_rotary_factor=rotated,
            attention_bias=family == "glm4_moe" and flag(config, "attention_bias", False),
            use_qk_norm=family == "glm4_moe" and flag(config, "use_qk_norm", False),
            rms_norm_eps=positive("rms_norm_eps", config.get("rms_norm_eps", absent.get("rms_norm_eps", 1e-6))),
            rope_theta=theta,
            rope_scaling=scaling,
            bos_token_id=_bos(config),
            stop_token_ids=stop_ids(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns a `config.json` that transformers 4 and 5 load: 5 still reads the older rope keys, 4 knows no
        others."""
        of_family: dict[str, Any] = {"sliding_window": None} if self.family == "mistral" else {}  # absent: 4096
        if self.moe is not None:
            of_family = mixture_to_hf(self.family, self.num_layers, dataclasses.asdict(self.moe))
        if self.family == "glm4_moe":
            names = ("attention_bias", "use_qk_norm", "partial_rotary_factor")
            of_family |= {name: getattr(self, name) for name in names}
        if self.is_hybrid:
            of_family |= delta_to_hf(self.delta, self.num_layers) | {
                "partial_rotary_factor": self.partial_rotary_factor
            }
            of_family |= {"num_experts": 0} if self.family == "qwen3_next" and self.moe is None else {}
        return {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": _hf_scaling(self.rope_scaling),
            "tie_word_embeddings": self.tie_embeddings,
            "hidden_act": "silu",
            "bos_token_id": self.bos_token_id,
            "eos_token_id": hf_eos(self.stop_token_ids),
            **of_family,
        }


def stop_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns `eos_token_id` of a config, which may be a number, a list, null or absent."""
    eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def _bos(config: Mapping[str, Any]) -> int | None:
    value = config.get("bos_token_id")
    return None if value is None else count(config, "bos_token_id", least=0)


def hf_eos(stop_token_ids: tuple[int, ...]) -> int | list[int] | None:
    """Returns the shortest form of `eos_token_id`, which every reader knows: the inverse of `stop_ids`."""
    if len(stop_token_ids) > 1:
        return list(stop_token_ids)
    return stop_token_ids[0] if stop_token_ids else None


def _rope(config: Mapping[str, Any], absent: Mapping[str, float]) -> tuple[float, RopeScaling | None, float]:
    """Returns base, scaling and share of the channels, from `rope_parameters` (transformers 5) or `rope_theta` and
    `rope_scaling` (4)."""
    key, rope = rope_of(config)
    theta = float(positive("rope_theta", _in_both(config, key, rope, "rope_theta", absent.get("rope_theta", 10_000.0))))
    name = "partial_rotary_factor"
    rotated = positive(name, _in_both(config, key, rope, name, absent.get(name, 1.0)))
    if name not in absent and rotated != 1:
        refuse(f"{key}.{name}", rotated, "only 1 is supported")
    kind = rope_kind(config)
    if kind != "default" and kind not in SCALINGS:
        refuse(f"{key}.rope_type", kind, f"default, {', '.join(SCALINGS)} are supported")
    all_fields = () if kind == "default" else dataclasses.fields(SCALINGS[kind])
    fields = {field.name: field.default is dataclasses.MISSING for field in all_fields}
    read = (*_ROPE_KEYS, *(_IMAGE_KEYS if config["model_type"] in HYBRIDS else ()))
    values = {name: value for name, value in rope.items() if value is not None and name not in read}
    if unknown := sorted(values.keys() - fields):
        refuse(f"{key}.{unknown[0]}", values[unknown[0]], f"transformers reads no such key with {kind}; take it out")
    if kind == "default":
        return theta, None, rotated
    if "original_max_position_embeddings" in fields:
        values["original_max_position_embeddings"] = original_context(config)
    if missing := [name for name, is_needed in fields.items() if is_needed and name not in values]:
        raise ConfigError(f"config.json: `{key}.{missing[0]}` is missing; rope_type {kind} needs it")
    _check_scaling(key, values)
    return theta, SCALINGS[kind](**values), rotated


def _in_both(config: Mapping[str, Any], key: str, rope: Mapping[str, Any], name: str, default: float) -> Any:
    """Returns the value of a key that may be in the rope's table `key`, in the config, or in both with one value."""
    value = same_value({name: config.get(name), f"{key}.{name}": rope.get(name)}, name, f"{key}.{name}")
    return default if value is None else value


def _check_scaling(key: str, values: Mapping[str, Any]) -> None:
    """Raises ConfigError: a value is of the wrong type, out of range, contradicts another, or is not read."""
    for name, value in values.items():
        if name == "truncate":
            flag(values, name, True, key)
        elif positive(f"{key}.{name}", value) > _MOST.get(name, math.inf):
            refuse(f"{key}.{name}", value, f"at most {_MOST[name]:g} is supported")
    if values["factor"] < 1:
        refuse(f"{key}.factor", values["factor"], "at least 1 is needed")
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        small, large = (values.get(name, _BETAS.get(name)) for name in (low, high))
        if {low, high} & values.keys() and not small < large:
            refuse(f"{key}.{low}", small, f"it must be less than {high} = {large!r}")
    pair = [name for name in ("mscale", "mscale_all_dim") if name in values]
    if len(pair) == 1:
        refuse(f"{key}.{pair[0]}", values[pair[0]], "mscale and mscale_all_dim count together only; give both or none")
    if pair and "attention_factor" in values:
        refuse(f"{key}.attention_factor", values["attention_factor"], "it overrides mscale; give one of them")


def _hf_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Returns `rope_scaling` of config.json without default values, as older readers know fewer keys."""
    if scaling is None:
        return None
    kind = next(kind for kind, cls in SCALINGS.items() if isinstance(scaling, cls))
    fields = dataclasses.fields(scaling)
    values = {field.name: getattr(scaling, field.name) for field in fields}
    changed = [field.name for field in fields if values[field.name] != field.default]
    return {"rope_type": kind} | {name: values[name] for name in changed}


def _check_full_attention(config: Mapping[str, Any], num_layers: int, context: int) -> None:
    """Refuses a sliding window that hides a token of the context in some layer.

    Released Qwen configs have a window that is off, and Ministral's is as long as its context.
    """
    if kinds := config.get("layer_types"):
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            refuse("layer_types", kinds, f"a list with one entry for each of the {num_layers} layers is needed")
        if others := sorted({str(kind) for kind in kinds} - {"full_attention"}):
            refuse("layer_types", others, "only full_attention is supported")
    family, uses = config["model_type"], flag(config, "use_sliding_window", False)
    # If the key is absent, Qwen2Config and Qwen3Config assume 28, and MistralConfig assumes 4096.
    first = count(config, "max_window_layers", default=28, least=0)
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    if window is not None:
        count({"sliding_window": window}, "sliding_window")
    if not uses and (family in WINDOWED or (family in WITHOUT_WINDOW and "use_sliding_window" in config)):
        return  # there is a window, but it is off
    if family in ("qwen2", "qwen3") and (kinds or first >= num_layers):
        return
    if window is not None and window < context:
        refuse(
            "sliding_window",
            window if "sliding_window" in config else "absent, which means 4096",
            f"only full attention is supported, so null or at least the {context} tokens of the context"
            + ("; of the Mistral 7B models those from v0.2 on have none" if family == "mistral" else ""),
        )
