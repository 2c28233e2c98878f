"""What publishing and adopting ask of a pretended GPU. Runs where `guard.begin` has been called."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llamarl.config.roles import LoraConfig
from llamarl.distributed.mesh import ALONE
from llamarl.executors.generator import Adopter
from llamarl.generation.model import AdapterMerger, GeneratorModel, Precision
from llamarl.models.hf import new_model
from llamarl.models.lora import adapted_weights, adapter_of, add_adapters, merged
from llamarl.models.shape import ModelShape
from llamarl.training.parallel import Sharding, parallelize
from llamarl.training.policy import Policy
from llamarl.weight_sync.base import plan_writers
from llamarl.weight_sync.layout import lay_out
from llamarl.weight_sync.select import publisher_class
from tests.gpu.engines import SIZES
from tests.gpu.pretend import GPU, Ledger, ledger, values_of


@dataclass
class Synced:
    """Some versions from a trainer to a generator, both on the device."""

    apart: list[float] = field(default_factory=list)
    """Largest difference between logits and those of a generator that was loaded with the version."""
    published: Ledger = field(default_factory=Ledger)
    """The last version."""
    adopted: Ledger = field(default_factory=Ledger)
    used: Ledger = field(default_factory=Ledger)
    num_tensors: int = 0
    num_bytes: int = 0
    """Of the tensors that a generator wants."""


def sync(precision: Precision, options: dict[str, Any]) -> Synced:
    """
    Args:
        options: `transport`, by default shared memory; `delta` and `lora`, by default without.
    """
    transport, delta = options.get("transport", "shared_memory"), options.get("delta", False)
    shape = ModelShape(**SIZES, family="qwen2", tie_embeddings=False)
    config = LoraConfig(rank=4) if "lora" in options else None
    base, served = new_model(shape, 3, 0.2), GeneratorModel(shape, precision, GPU)
    sharding = _trained(shape, config)
    served.load(base)
    receiver = AdapterMerger(served, base, config) if config else served
    layout = lay_out(receiver.specs())
    found = Synced(num_tensors=len(layout.specs), num_bytes=sum(spec.num_bytes for spec in layout.specs))
    (plan,) = plan_writers([layout], [list(sharding.specs.values())])
    with tempfile.TemporaryDirectory() as folder:
        publisher = publisher_class(transport)(plan, lambda value: [value], Path(folder), delta=delta, device=GPU)
        adopter = Adopter(receiver.specs(), served.use, delta=delta, hold=receiver.hold, room=served.room)
        for version in range(1, 4):
            with torch.no_grad():
                for weight in sharding.weights.values():
                    weight[::5].add_(0.01)
            with ledger() as found.published:
                address = publisher.publish(version, sharding.weights, (version - 1,))
            with ledger() as found.adopted:
                adopter.begin(version, address)
                adoption = adopter.poll(240.0)
            assert adoption is not None and adoption.outcome == "adopted", adoption
            with ledger() as found.used:
                adopter.use(version)
            found.apart.append(_apart(shape, precision, served, base, sharding, config))
        adopter.close()
        publisher.close()
    return found


def _trained(shape: ModelShape, config: LoraConfig | None) -> Sharding:
    model = new_model(shape, 3, 0.2)
    if config:
        add_adapters(model, config, 0)
    return parallelize(Policy(model, ALONE), model, ALONE, GPU)


def _apart(
    shape: ModelShape, precision: Precision, served: GeneratorModel, base: torch.nn.Module, sharding: Sharding,
    config: LoraConfig | None,
) -> float:  # fmt: skip
    """Of the model that serves and one that has just been loaded."""
    trained = {name: values_of(weight.detach()) for name, weight in sharding.weights.items()}
    weights: dict[str, Tensor] = dict(base.named_parameters()) | trained
    if config:
        for name, _ in adapted_weights(shape, config):
            weights[name] = merged(weights[name].detach(), *adapter_of(trained, name), config.scale)
    fresh = GeneratorModel(shape, precision, GPU)
    fresh.load(weights)
    ids, positions = torch.arange(1, 6, device=GPU), torch.arange(5, device=GPU)
    one, other = (values_of(model.logits(model(ids, positions, lambda layer, q, k, v: q))) for model in (served, fresh))
    return float((one - other).abs().max())
