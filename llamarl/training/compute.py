"""Computation of a model in training: what it keeps for backward, and what is fused."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn

from llamarl.config.schema import TrainerConfig
from llamarl.kernels import fused, half, products
from llamarl.models.lora import LoraLinear
from llamarl.models.scalar import ScalarModel
from llamarl.models.transformer import Attention, FeedForward, Layer, Projection, RMSNorm, Transformer


def set_compute(model: Transformer | ScalarModel, config: TrainerConfig, device: torch.device) -> bool:
    """Sets a whole model, before it is cut, to the trainer's settings on a device; whether kernels of this package may
    serve."""
    on_cpu = device.type == "cpu"
    if on_cpu and config.dtype == "float32":
        _set_products(model, lambda: products.linear)
        if not config.compile:  # which would not see what they do
            _set_operations(model, fused)
        for module in model.modules():
            if isinstance(module, Projection | LoraLinear):
                products.chosen(*module.weight.shape)  # measured at the start
    elif uses_halves(config, device):
        half.prepare(device)
        _set_products(model, half.Product)
        if on_cpu:
            _set_operations(model, fused)
        else:
            _set_operations(model.model.layers, half)  # a critic's head takes a norm that was not rounded
    for layer in model.model.layers.children():
        assert isinstance(layer, Layer)
        layer.recompute = config.activation_checkpointing
        if config.compile:
            # Between attention, whose plan differs with every microbatch, and the hooks of tensor parallelism.
            layer.self_attn.heads = torch.compile(layer.self_attn.heads, dynamic=True)
            if isinstance(layer.mlp, FeedForward):  # how many rows an expert has differs, too
                layer.mlp.forward = torch.compile(layer.mlp.forward, dynamic=True)
    return on_cpu and (config.dtype == "float32" or uses_halves(config, device))


def uses_halves(config: TrainerConfig, device: torch.device) -> bool:
    """The operations of `kernels/half.py` serve."""
    return device.type in ("cpu", "cuda") and config.dtype == "bfloat16" and not config.compile


def _set_products(model: nn.Module, multiply: Callable[[], Callable[..., Tensor]]) -> None:
    for module in model.modules():
        if isinstance(module, Projection | LoraLinear):
            module.multiply = multiply()


def _set_operations(model: nn.Module, own: ModuleType) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.normalize = own.rms_norm
        elif isinstance(module, Attention):
            module.rotate = own.rotate
        elif isinstance(module, FeedForward):
            module.activate = own.silu_mul


def copying(model: Transformer | ScalarModel) -> list[half.Product]:
    """Products that keep copies of weights, which must be forgotten after every step of an optimizer: `half.forget`."""
    products = [module.multiply for module in model.modules() if isinstance(module, Projection | LoraLinear)]
    return [one for one in products if isinstance(one, half.Product)]
