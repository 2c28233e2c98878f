"""`DecoderSizes`: the weights and operations of a decoder, for a model that is computed or only planned. Bytes are in
`memory.py`. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llamarl.config.errors import ConfigError
from llamarl.config.roles import ATTENTION, LoraConfig
from llamarl.kernels.delta_shape import DeltaShape
from llamarl.models.keys import refuse, same_value

MAX_COUNT = 1 << 27
"""Largest number of tokens, columns or positions: a hundred times that of models. Tables of this size fit in memory."""
MAX_EXPERTS = 1 << 17
"""Largest number of experts in all layers. Models have some 20,000."""
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families with delta nets in some layers. Their attention has an output gate, and their norms are centered on 1."""
_HEAD_DIMS = {"qwen3": 128} | dict.fromkeys(HYBRIDS, 256)
"""Channels of a head if the key is absent, in families whose class in transformers does not divide."""
_ROPES = ("rope_scaling", "rope_parameters")
_TYPES = ("rope_type", "type")
"""Keys of a rope's type. transformers 4 wrote the second one too."""
_BYTE, _TWO_BYTES = 255, 65_535
Weights = dict[str, tuple[int, ...]]
"""Shapes by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """Sizes and switches of the mixtures of experts in a decoder. Groups divide the experts evenly."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    """Width of one expert."""
    sparse_layers: tuple[int, ...]
    """Numbers of the layers with experts, counted through the whole model, ascending."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Softmax over all experts, or the sigmoid of each."""
    normalized: bool = False
    """Whether gates are divided by their sum."""
    scaling: float = 1.0
    """Factor of the gates."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Groups from which a token's experts are chosen."""
    shared_size: int = 0
    """Width of the expert that serves every token; 0 means none."""
    has_selection_bias: bool = False
    """Whether a bias is added to the scores for the choice only."""
    gates_shared: bool = False
    """Whether a gate scales the output of the expert that serves every token."""

    def __post_init__(self) -> None:
        if not self.sparse_layers:
            raise ConfigError("a mixture of experts without a layer that has experts; use the dense family")
        if (num := self.num_experts * len(self.sparse_layers)) > MAX_EXPERTS or self.num_experts > _TWO_BYTES:
            most = f"{MAX_EXPERTS}, and {_TWO_BYTES} in a layer"
            raise ConfigError(f"{num} experts, {self.num_experts} in a layer; a model may have {most}")
        if self.num_experts % self.num_groups or not 0 < self.groups_per_token <= self.num_groups:
            raise ConfigError(
                f"{self.groups_per_token} of {self.num_groups} groups of {self.num_experts} experts; the groups must "
                "divide the experts, and a token takes some or all"
            )
        most = self.num_experts // self.num_groups * self.groups_per_token
        if not 0 < self.experts_per_token <= most:
            raise ConfigError(f"{self.experts_per_token} experts of a token; it can choose among {most}")

    @property
    def route_width(self) -> int:
        """Experts of a token in all layers."""
        return len(self.sparse_layers) * self.experts_per_token

    def columns(self, layer: int) -> slice | None:
        """Returns the columns of a layer's experts among those of all layers, or None if it has none."""
        if layer not in self.sparse_layers:
            return None
        start = self.sparse_layers.index(layer) * self.experts_per_token
        return slice(start, start + self.experts_per_token)

    @property
    def route_bytes(self) -> int:
        """Bytes of an expert's number. The largest number means that it was not recorded."""
        return 1 if self.num_experts <= _BYTE else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSizes:
    """Sizes of a decoder-only transformer with gated feed-forward layers, and counts that follow from them."""

    family: str
    """`model_type` of config.json."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """May differ from hidden_size / num_heads."""
    intermediate_size: int
    """Width of the feed-forward of a layer without experts."""
    vocab_size: int
    max_position_embeddings: int
    """Longest context, prompt and response together, in tokens."""
    tie_embeddings: bool = False
    """Whether the output head is the embedding matrix."""
    moe: MoeShape | None = None
    """Mixtures of experts in some or all layers."""
    delta: DeltaShape | None = None
    """Delta nets in some layers, in place of attention."""
    attention_bias: bool = False
    """Whether the query, key and value projections have a bias, in families that leave it open."""
    use_qk_norm: bool = False
    """Whether heads are normed, in families that leave it open."""

    @property
    def qkv_bias(self) -> bool:
        """True if the query, key and value projections have a bias."""
        return self.family == "qwen2" or self.attention_bias

    @property
    def qk_norm(self) -> bool:
        """True if each query and key head is RMS-normed before the rotation."""
        return self.family in ("qwen3", "qwen3_moe", *HYBRIDS) or self.use_qk_norm

    @property
    def is_hybrid(self) -> bool:
        """True if the family's attention has an output gate and its norms multiply by 1 + weight."""
        return self.family in HYBRIDS

    @property
    def query_size(self) -> int:
        """Scalars of all heads' queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Scalars of all heads' keys of one token in one layer. Values have as many."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_attention_layers(self) -> int:
        """Layers with attention, which cache keys and values."""
        return self.num_layers - (0 if self.delta is None else len(self.delta.layers))

    def has_delta(self, layer: int) -> bool:
        """Returns whether the layer has a delta net in place of attention."""
        return self.delta is not None and layer in self.delta.layers

    @property
    def state_bytes(self) -> int:
        """Bytes that a generator keeps of a sequence, whatever its length; 0 without delta nets."""
        return 0 if self.delta is None else 4 * self.delta.state_scalars * len(self.delta.layers)

    @property
    def num_sparse_layers(self) -> int:
        return 0 if self.moe is None else len(self.moe.sparse_layers)

    def is_sparse(self, layer: int) -> bool:
        """Returns whether the layer has experts."""
        return self.moe is not None and layer in self.moe.sparse_layers

    @property
    def routed_width(self) -> int:
        """Columns of the experts that a router chooses for a token; 0 without experts."""
        return 0 if self.moe is None else self.moe.experts_per_token * self.moe.expert_size

    @property
    def active_width(self) -> int:
        """Largest number of feed-forward columns that a token passes in one layer; in a mixture those of its
        experts."""
        if self.moe is None:
            return self.intermediate_size
        dense = self.intermediate_size * (self.num_sparse_layers < self.num_layers)
        return max(self.routed_width + self.moe.shared_size, dense)

    @property
    def rows_per_token(self) -> int:
        """Rows of the residual stream that a layer copies for a token's experts; 0 without experts."""
        return 0 if self.moe is None else 2 * self.moe.experts_per_token  # inputs and outputs

    def weights(self) -> Weights:
        """Returns the shape of every weight by its Hugging Face name. The experts of a layer are one weight per
        projection."""
        ends = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        weights: Weights = {**ends, "model.norm.weight": (self.hidden_size,)}
        for number in range(self.num_layers):
            of_layer = self.layer_weights(self.is_sparse(number), self.has_delta(number))
            weights |= {f"model.layers.{number}.{name}": shape for name, shape in of_layer.items()}
        return weights | ({} if self.tie_embeddings else {"lm_head.weight": (self.vocab_size, self.hidden_size)})

    def layer_kinds(self) -> list[tuple[int, Weights]]:
        """Returns the number of layers of each kind, and the weights of one of them, by name in the layer."""
        kinds = Counter((self.is_sparse(number), self.has_delta(number)) for number in range(self.num_layers))
        return [(num, self.layer_weights(*kind)) for kind, num in kinds.items()]

    def layer_weights(self, is_sparse: bool, has_delta: bool = False) -> Weights:
        """Returns the shape of every weight of one layer by its name in the layer.

        Args:
            is_sparse: whether the layer has experts.
            has_delta: whether it has a delta net in place of attention.
        """
        weights = self._delta_net() if has_delta else self._attention()
        weights |= {f"{name}_layernorm.weight": (self.hidden_size,) for name in ("input", "post_attention")}
        return weights | (self._experts() if is_sparse else self._feed_forward("mlp", self.intermediate_size))

    def _delta_net(self) -> Weights:
        """Returns the weights of a delta net. Files hold some of them joined (`models/file_parts.py`)."""
        assert self.delta is not None
        delta, hidden = self.delta, self.hidden_size
        mixed = {"q": delta.key_size, "k": delta.key_size, "v": delta.value_size}
        heads = {"z": delta.value_size, "b": delta.num_value_heads, "a": delta.num_value_heads}
        weights: Weights = {f"linear_attn.{name}": (delta.num_value_heads,) for name in ("dt_bias", "A_log")}
        weights |= {f"linear_attn.in_proj_{kind}.weight": (size, hidden) for kind, size in (mixed | heads).items()}
        weights |= {f"linear_attn.conv_{kind}.weight": (size, delta.conv_width) for kind, size in mixed.items()}
        weights["linear_attn.norm.weight"] = (delta.value_dim,)
        return weights | {"linear_attn.out_proj.weight": (hidden, delta.value_size)}

    def _attention(self) -> Weights:
        hidden, queries = self.hidden_size, self.query_size * (2 if self.is_hybrid else 1)
        sizes = {"q": queries, "k": self.kv_size, "v": self.kv_size}
        weights: Weights = {f"self_attn.{kind}_proj.weight": (size, hidden) for kind, size in sizes.items()}
        weights["self_attn.o_proj.weight"] = (hidden, self.query_size)
        if self.qkv_bias:
            weights |= {f"self_attn.{kind}_proj.bias": (size,) for kind, size in sizes.items()}
        if self.qk_norm:
            weights |= {f"self_attn.{kind}_norm.weight": (self.head_dim,) for kind in "qk"}
        return weights

    def _feed_forward(self, name: str, width: int) -> Weights:
        into: Weights = {f"{name}.{kind}_proj.weight": (width, self.hidden_size) for kind in ("gate", "up")}
        return into | {f"{name}.down_proj.weight": (self.hidden_size, width)}

    def _experts(self) -> Weights:
        assert self.moe is not None
        num, width = self.moe.num_experts, self.moe.expert_size
        weights: Weights = {"mlp.gate.weight": (num, self.hidden_size)}
        weights |= {"mlp.gate.e_score_correction_bias": (num,)} if self.moe.has_selection_bias else {}
        weights |= {f"mlp.experts.{kind}_proj": (num, width, self.hidden_size) for kind in ("gate", "up")}
        weights["mlp.experts.down_proj"] = (num, self.hidden_size, width)
        weights |= {"mlp.shared_expert_gate.weight": (1, self.hidden_size)} if self.moe.gates_shared else {}
        return weights | (self._feed_forward("mlp.shared_experts", shared) if (shared := self.moe.shared_size) else {})

    @property
    def layer_parameters(self) -> int:
        """Scalars in all weights of one layer: in a mixture of one with experts, in a hybrid model the mean of layers
        with attention and with a delta net."""
        attention = num_scalars(self.layer_weights(self.moe is not None))
        if self.delta is None:
            return attention
        with_delta = num_scalars(self.layer_weights(self.moe is not None, has_delta=True))
        return attention + round((with_delta - attention) * len(self.delta.layers) / self.num_layers)

    @property
    def num_parameters(self) -> int:
        """Scalars in all weights. A tied head counts once."""
        layers = sum(num * num_scalars(weights) for num, weights in self.layer_kinds())
        return layers + self.hidden_size + (2 - self.tie_embeddings) * self.vocab_size * self.hidden_size

    @property
    def layer_expert_parameters(self) -> int:
        """Scalars in all experts among which a layer's router chooses; 0 without experts."""
        return 0 if self.moe is None else 3 * self.hidden_size * self.moe.expert_size * self.moe.num_experts

    @property
    def expert_parameters(self) -> int:
        """Scalars in the experts of all layers, without shared ones."""
        return self.layer_expert_parameters * self.num_sparse_layers

    @property
    def routed_scalars(self) -> int:
        """Weights of the experts that a router chooses for a token, in all layers."""
        return 3 * self.hidden_size * self.routed_width * self.num_sparse_layers

    @property
    def layer_scalars(self) -> int:
        """Weights of all layers' matrices that a token is multiplied by, including routers."""
        size = (2 * (self.query_size + self.kv_size) + self.query_size * self.is_hybrid) * self.num_attention_layers
        if self.delta is not None:
            delta = self.delta
            size += (delta.mixed_size + 2 * delta.value_size + 2 * delta.num_value_heads) * len(delta.layers)
        size += 3 * self.intermediate_size * (self.num_layers - self.num_sparse_layers)
        if self.moe is not None:
            size += (3 * self.moe.shared_size + self.moe.num_experts + self.moe.gates_shared) * self.num_sparse_layers
        return self.hidden_size * size + self.routed_scalars

    @property
    def matmul_parameters(self) -> int:
        """Weights that a token is multiplied by: those of layers and of the output head, not the embedding look-up."""
        return self.layer_scalars + self.vocab_size * self.hidden_size

    def forward_flops(self, tokens: float, targets: float, pairs: float) -> float:
        """Returns the FLOPs of a forward.

        They are 2 per weight that a token meets, 4 per query channel and pair of tokens that see each other (Kaplan et
        al., arXiv 2001.08361, table 1), and those of the delta rule.

        Args:
            targets: tokens whose logits are computed.
        """
        matrices = self.layer_scalars * tokens + self.vocab_size * self.hidden_size * targets
        rule = 0.0 if self.delta is None else self.delta.rule_flops * len(self.delta.layers) * tokens
        return 2.0 * matrices + rule + 4.0 * self.num_attention_layers * self.query_size * pairs

    def step_flops(
        self, tokens: float, targets: float, pairs: float, lora: LoraConfig | None = None, recompute: float = 0.0
    ) -> float:
        """Returns the FLOPs of an optimizer step: forward, twice as much for backward, and `recompute` forwards.

        A frozen weight has no gradient, which saves a third. Adapters have theirs (arXiv 2205.05198; the rest as in
        `forward_flops`).
        """
        passes = 3 + recompute
        if lora is None:
            return passes * self.forward_flops(tokens, targets, pairs)
        trained = 2.0 * adapter_parameters(self, lora) * tokens
        return passes * (self.forward_flops(tokens, targets, pairs) + trained) - self.forward_flops(tokens, targets, 0)


def num_scalars(weights: Weights) -> int:
    return sum(map(math.prod, weights.values()))


def adapted(sizes: DecoderSizes, lora: LoraConfig) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the shapes of the projections that have an adapter, each with its number of layers."""
    weights = sizes.layer_weights(is_sparse=False)
    return [
        (sizes.num_attention_layers, weights[f"self_attn.{target}.weight"])
        if target in ATTENTION
        else (sizes.num_layers, weights[f"mlp.{target}.weight"])
        for target in lora.targets
    ]


def adapter_parameters(sizes: DecoderSizes, lora: LoraConfig) -> int:
    return lora.rank * sum(num * sum(shape) for num, shape in adapted(sizes, lora))


def sizes_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `DecoderSizes` of a parsed Hugging Face `config.json`. Raises ConfigError."""
    hidden_size, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    head_dim = _HEAD_DIMS.get(config.get("model_type", ""), hidden_size // num_heads)
    if not isinstance(tied := config.get("tie_word_embeddings") or False, bool):
        raise ConfigError(f"config.json: `tie_word_embeddings` = {tied!r}; true or false is needed")
    return {
        "hidden_size": hidden_size,
        "num_layers": count(config, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": count(config, "num_key_value_heads", default=num_heads),
        "head_dim": count(config, "head_dim", default=head_dim),
        "intermediate_size": _feed_forward_width(config),
        "vocab_size": count(config, "vocab_size"),
        "max_position_embeddings": _context(config),
        "tie_embeddings": tied,
    }


def _feed_forward_width(config: Mapping[str, Any]) -> int:
    """Returns `intermediate_size`. The mixtures of Qwen 3.5 have no layer without experts, and so no such key."""
    is_absent = config.get("model_type") == "qwen3_5_moe_text" and config.get("intermediate_size") is None
    return count(config, "moe_intermediate_size" if is_absent else "intermediate_size")


def rope_of(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns key and value of the settings of the rotation: transformers 5 writes `rope_parameters`, 4 `rope_scaling`.
    Raises ConfigError."""
    tables = {key: config[key] for key in _ROPES if config.get(key) not in (None, {})}
    for key, rope in tables.items():
        if not isinstance(rope, dict):
            refuse(key, rope, "a table of names and values is needed")
        if "full_attention" in rope or "sliding_attention" in rope:
            refuse(key, rope, "one for each type of layer is not supported; write its values without the type")
        same_value({f"{key}.{name}": rope.get(name) for name in _TYPES}, *(f"{key}.{name}" for name in _TYPES))
    if len(tables) < len(_ROPES):
        return next(iter(tables.items()), (_ROPES[0], {}))
    older, newer = (_renamed(tables[key]) for key in _ROPES)
    for name in sorted((older.keys() | newer.keys()) - {"rope_theta"} | (older.keys() & newer.keys())):
        if older.get(name) != newer.get(name):
            refuse(f"{_ROPES[1]}.{name}", newer.get(name), f"{_ROPES[0]} has {older.get(name)!r}; give one of them")
    return _ROPES[1], older | newer


def _renamed(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rope's table with the newer name of its type, without null values."""
    renamed = {name: value for name, value in rope.items() if value is not None and name not in _TYPES}
    return renamed | {"rope_type": _kind(rope)}


def _kind(rope: Mapping[str, Any]) -> Any:
    return next((rope[name] for name in _TYPES if rope.get(name) is not None), "default")


def rope_kind(config: Mapping[str, Any]) -> str:
    """Returns the type of the rotation. Raises ConfigError."""
    key, rope = rope_of(config)
    if not isinstance(kind := _kind(rope), str):
        refuse(f"{key}.rope_type", kind, "a name is needed")
    return kind


def original_context(config: Mapping[str, Any]) -> int:
    """Returns the tokens of the context before it was stretched, from the rope's table or the config.

    Without either it is the stated context.

    Raises:
        ConfigError: the two differ.
    """
    name, (key, rope) = "original_max_position_embeddings", rope_of(config)
    value = same_value({name: config.get(name), f"{key}.{name}": rope.get(name)}, name, f"{key}.{name}")
    return count({name: value}, name, default=count(config, "max_position_embeddings"))


def _context(config: Mapping[str, Any]) -> int:
    """Returns the longest context.

    YaRN makes it `factor` times the original one. Released configs may not say so: Qwen's model cards add the scaling
    and leave `max_position_embeddings`.
    """
    stated, (key, rope) = count(config, "max_position_embeddings"), rope_of(config)
    if rope_kind(config) != "yarn" or rope.get("factor") is None:
        return stated
    stretched = int(positive(f"{key}.factor", rope["factor"]) * original_context(config))
    return count({"max_position_embeddings": max(stated, stretched)}, "max_position_embeddings")


def positive(key: str, value: object) -> float:
    """Returns the number that `value` is. Raises ConfigError: it is not a positive number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"config.json: `{key}` = {value!r}; a positive number is needed")
    return value


def count(config: Mapping[str, Any], *keys: str, default: int | None = None, least: int = 1) -> int:
    """Returns the value of keys with the same meaning, a whole number. Raises ConfigError: it is none, or two keys
    differ."""
    value = default if (stated := same_value(config, *keys)) is None else stated
    if value is None:
        raise ConfigError(f"config.json: `{keys[0]}` is missing; the model's size follows from it")
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_COUNT:
        refuse(
            next((key for key in keys if config.get(key) is not None), keys[0]),
            value,
            f"a whole number from {least} to {MAX_COUNT:,} is needed",
        )
    return value


def uneven_parts(sizes: DecoderSizes, num_ranks: int, *, repeats_kv_heads: bool) -> list[str]:
    """Returns texts that name the parts that `num_ranks` tensor-parallel ranks cannot share evenly, with their numbers.

    Args:
        repeats_kv_heads: whether a key/value head may be on several ranks, as in generators.
    """
    kv_heads = sizes.num_kv_heads
    parts = {
        "attention heads": sizes.num_heads,
        "feed-forward columns": sizes.intermediate_size,
        "tokens in the vocabulary": sizes.vocab_size,
        "key/value heads": num_ranks if repeats_kv_heads and num_ranks % kv_heads == 0 else kv_heads,
    }
    if sizes.delta is not None:
        parts["key heads of delta nets"] = sizes.delta.num_key_heads
    return [f"{size} {name}" for name, size in parts.items() if size % num_ranks]


def uneven_shares(sizes: DecoderSizes, num_ranks: int, tp: int) -> list[str]:
    """Returns texts that name the parts of each expert that `num_ranks` ranks of a trainer with the same experts cannot
    share evenly, with their numbers. Tensor parallelism leaves each expert 1 / `tp` of its columns. A dense model has
    none."""
    if sizes.moe is None:
        return []
    parts = {"columns": sizes.moe.expert_size // tp, "inputs": sizes.hidden_size}
    return [f"{size} {what}" for what, size in parts.items() if size % num_ranks]
