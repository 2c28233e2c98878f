"""Settings of a supervised warm start (`llamarl sft`): makes a small base model from scratch, tokenizer included."""

from __future__ import annotations

from pydantic import Field, model_validator

from llamarl.config.ref import Ref
from llamarl.config.section import FilePath, Section

DENSE = ("llama", "mistral", "qwen2", "qwen3")
TABLES = ("qwen3_moe", "mixtral", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Mixtures of experts and hybrids, which need further keys."""


class ShapeConfig(Section):
    """Shape of a model made from scratch."""

    family: str | Ref = "llama"
    """Architecture. A mixture of experts or a hybrid is a table with its keys of `config.json`: `{name = "qwen3_moe",
    num_experts = 8, num_experts_per_tok = 2, ...}`. An auxiliary loss balances experts."""
    hidden_size: int = Field(default=128, ge=1, le=1 << 16)
    """Width, D."""
    num_layers: int = Field(default=3, ge=1, le=1 << 10)
    """Decoder layers."""
    num_heads: int = Field(default=4, ge=1, le=1 << 10)
    """Query heads, H."""
    num_kv_heads: int = Field(default=2, ge=1, le=1 << 10)
    """Key/value heads."""
    intermediate_size: int = Field(default=384, ge=1, le=1 << 18)
    """Width of the MLP. In a mixture: of its dense layers; in `mixtral`: of an expert."""
    vocab_size: int = Field(default=331, ge=260, le=1 << 20)
    """Maximum size of the tokenizer's vocabulary. The minimum holds 256 bytes and the special tokens."""
    max_position_embeddings: int = Field(default=512, ge=1, le=1 << 20)
    """Context, in tokens."""
    init_std: float = Field(default=0.06, gt=0)
    """Standard deviation of initial weights."""

    @model_validator(mode="after")
    def _known_family(self) -> ShapeConfig:
        name, known = (self.family.name, TABLES) if isinstance(self.family, Ref) else (self.family, DENSE)
        if name not in known:
            raise ValueError(
                f"shape.family = {name!r} cannot be made from scratch; use one of {', '.join(DENSE)}, or "
                f"{{name = NAME, ...}} with one of {', '.join(TABLES)} and its keys in config.json"
            )
        return self


class SftConfig(Section):
    """A warm start."""

    output: FilePath
    """Hugging Face folder to write. Relative paths begin at the working folder."""
    source: Ref
    """Problem source with worked solutions, for example `{name = "running_total", error_rate = 0.65}`."""
    template: str = "{question}\n"
    """Prompt text, as in the later run."""
    seed: int = 0
    """Seeds data and weights."""
    shape: ShapeConfig = ShapeConfig()
    steps: int = Field(default=300, ge=1)
    """Optimizer steps."""
    rows: int = Field(default=8, ge=1, le=1 << 16)
    """Rows per step. A step trains on up to `rows * row_tokens` tokens."""
    row_tokens: int = Field(default=256, ge=1, le=1 << 20)
    """Longest document, in tokens."""
    muon_learning_rate: float = Field(default=0.02, gt=0)
    """Peak learning rate of Muon, for matrices of layers."""
    adamw_learning_rate: float = Field(default=0.008, gt=0)
    """Peak learning rate of AdamW, for embeddings and norms."""
    threads: int = Field(default=1, ge=1, le=1 << 10)
    """CPU threads; small models gain little from more."""
