"""Computation of a model in training: what it keeps for backward, and what is fused."""

from __future__ import annotations

import torch

from llamarl.config.schema import TrainerConfig
from llamarl.kernels import fused, products
from llamarl.models.lora import LoraLinear
from llamarl.models.scalar import ScalarModel
from llamarl.models.transformer import Attention, FeedForward, Layer, Projection, RMSNorm, Transformer


def set_compute(model: Transformer | ScalarModel, config: TrainerConfig, device: torch.device) -> bool:
    """Sets a whole model, before it is cut, to the trainer's settings on a device; whether kernels of this package may
    serve."""
    has_own = device.type == "cpu" and config.dtype == "float32"
    if has_own:
        for module in model.modules():
            if isinstance(module, Projection | LoraLinear):
                module.multiply = products.linear
                products.chosen(*module.weight.shape)  # measured at the start
            elif isinstance(module, RMSNorm):
                module.normalize = fused.rms_norm
            elif isinstance(module, Attention):
                module.rotate = fused.rotate
            elif isinstance(module, FeedForward):
                module.activate = fused.silu_mul
    for layer in model.model.layers.children():
        assert isinstance(layer, Layer)
        layer.recompute = config.activation_checkpointing
        if config.compile:
            # Between attention, whose plan differs with every microbatch, and the hooks of tensor parallelism.
            layer.self_attn.heads = torch.compile(layer.self_attn.heads, dynamic=True)
            if isinstance(layer.mlp, FeedForward):  # how many rows an expert has differs, too
                layer.mlp.forward = torch.compile(layer.mlp.forward, dynamic=True)
    return has_own
