"""`DecoderShape`: parameters, arithmetic and key/value bytes of a model, by Hugging Face config or built-in name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamarl.config import ConfigError, did_you_mean, read_json
from llamarl.config.decoder import DecoderSizes, count, sizes_from_hf
from llamarl.hub.fetch import cached, small_files
from llamarl.hub.names import hub_name


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape(DecoderSizes):
    """Sizes of a model that the planner uses, dense or a mixture of experts."""

    name: str
    num_experts: int = 1
    """Feed-forward blocks per layer; 1 is dense."""
    experts_per_token: int = 1

    @property
    def attention_parameters(self) -> int:
        """Query, key, value and output projections of one layer."""
        return 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Gate, up and down projections of one expert in one layer."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """All weights of one layer; the norms are left out (under 0.01 %)."""
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        return self.attention_parameters + self.num_experts * self.expert_parameters + router

    @property
    def num_parameters(self) -> int:
        """Scalars in all weights, norms left out; a tied head counts once."""
        return self.num_layers * self.layer_parameters + (2 - self.tie_embeddings) * self.vocab_size * self.hidden_size

    @property
    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: active experts and the output head, not the embedding look-up."""
        layer = self.attention_parameters + self.experts_per_token * self.expert_parameters
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    def weights(self, *, norms: bool) -> dict[str, tuple[int, ...]]:
        """Name (Hugging Face) and shape of every weight. The experts of a mixture stand below each other in one matrix.

        Args:
            norms: list them too; `num_parameters` leaves them out.
        """
        hidden, query, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        wide, narrow = self.num_experts * self.intermediate_size, self.num_experts * hidden
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (narrow, self.intermediate_size),
        }
        layer |= {"mlp.gate": (self.num_experts, hidden)} if self.num_experts > 1 else {}
        layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)} if norms else {}
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for number in range(self.num_layers):
            found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        found |= {"model.norm.weight": (hidden,)} if norms else {}
        return found | ({} if self.tie_embeddings else {"lm_head.weight": (self.vocab_size, hidden)})

    @property
    def kv_width(self) -> int:
        """Scalars of one layer's keys and values per token."""
        return 2 * self.num_kv_heads * self.head_dim

    def attention_flops(self, context_tokens: float) -> float:
        """FLOPs of the score and value products of one token over `context_tokens`, forward, all layers.

        2 products x 2 FLOPs x layers x query width x context (Kaplan et al., arXiv 2001.08361, table 1).
        """
        return 4.0 * self.num_layers * self.num_heads * self.head_dim * context_tokens

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "config.json") -> DecoderShape:
        """The decoder that a parsed `config.json` describes. Raises ConfigError: a key is missing."""
        num_experts = count(config, "num_local_experts", "num_experts", "n_routed_experts", default=1)
        if num_experts == 1:
            return cls(name=name, **sizes_from_hf(config))
        width = count(config, "moe_intermediate_size", "intermediate_size")
        return cls(
            name=name,
            num_experts=num_experts,
            experts_per_token=count(config, "num_experts_per_tok"),
            **sizes_from_hf({**config, "intermediate_size": width}),
        )


_COLUMNS = (
    *("name", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "num_experts", "experts_per_token"),
)
_TABLE: tuple[tuple[Any, ...], ...] = (
    # Llama 3.1 (arXiv 2407.21783, table 3)
    ("llama3-8b", 4096, 32, 32, 8, 128, 14_336, 128_256, 131_072, 1, 1),
    ("llama3-70b", 8192, 80, 64, 8, 128, 28_672, 128_256, 131_072, 1, 1),
    ("llama3-405b", 16_384, 126, 128, 8, 128, 53_248, 128_256, 131_072, 1, 1),
    # huggingface.co/mistralai/Mixtral-8x7B-v0.1, config.json
    ("mixtral-8x7b", 4096, 32, 32, 8, 128, 14_336, 32_000, 32_768, 8, 2),
    # huggingface.co/Qwen/Qwen3-235B-A22B, config.json
    ("qwen3-235b-a22b", 4096, 94, 64, 4, 128, 1536, 151_936, 40_960, 128, 8),
)
MODELS = {row[0]: DecoderShape(**dict(zip(_COLUMNS, row, strict=True))) for row in _TABLE}
"""Built-in shapes."""


def find_model(name: str) -> DecoderShape:
    """A built-in shape, or that of a Hugging Face folder or `config.json`. Raises ConfigError."""
    if name in MODELS:
        return MODELS[name]
    path, of_hub = Path(name), hub_name(name)
    if of_hub and (found := cached(of_hub, choose=small_files)):
        path = found.folder
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file() and of_hub:
        cause = f"`--model {name}` is not in this machine's cache of the Hub, and nothing is fetched here"
        raise ConfigError(f"{cause}; fetch its config: hf download {of_hub.repo} config.json")
    if not path.is_file():
        hint = did_you_mean(name, MODELS, f"give one of {', '.join(MODELS)} or a Hugging Face folder")
        raise ConfigError(f"`--model {name}` is neither a built-in shape nor a file; {hint}")
    try:
        return DecoderShape.from_hf(read_json(path, "give the config.json of a Hugging Face model"), name)
    except ConfigError as error:
        raise ConfigError(f"`--model {name}`: {error}") from None
