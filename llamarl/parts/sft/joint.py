"""The joint of fine-tuning: the warm start of a base model."""

from llamarl.parts.sft.base_model import ensure_base_model

__all__ = ["ensure_base_model"]
