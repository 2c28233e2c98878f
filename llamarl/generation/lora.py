"""`AdapterMerger`: a generator that receives adapters and serves the frozen model with them merged in.

Merging costs a pass over the weights per version, in the background. Decoding then costs what it costs without
adapters, in every precision.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llamarl.config.roles import LoraConfig
from llamarl.generation.model import GeneratorModel, device_stream, part_reader
from llamarl.models.hf import Read
from llamarl.models.lora import A, B, adapted_weights, adapter_of, merged
from llamarl.models.quantize import QUANTIZED_DTYPES, quantize_rows
from llamarl.models.transformer import Transformer
from llamarl.sharding.box import Box
from llamarl.weight_sync.layout import TensorSpec


class AdapterMerger:
    """One rank's: takes the place of `GeneratorModel.specs` and `GeneratorModel.hold`."""

    def __init__(self, model: GeneratorModel, base: Transformer, config: LoraConfig, read: Read | None = None) -> None:
        """
        Args:
            model: serves, and has loaded `base`.
            base: whole; or on the meta device, with `read` for its weights.
        """
        self._model, self._scale = model, config.scale
        model.merges = True
        self._targets = {spec.name: spec for spec in model.specs() if spec.part == "values"}
        self._frozen, specs = dict[str, Tensor](), list[TensorSpec]()
        read = read or part_reader(dict(base.named_parameters()))
        for name, (num_outputs, num_inputs) in adapted_weights(base.shape, config):
            box, rank = self._targets[name].box, config.rank
            self._frozen[name] = _smallest(read(name, box)).to(model.device, copy=True)
            module = name.removesuffix("weight")
            shapes = {A: (rank, num_inputs), B: (num_outputs, rank)}
            boxes = {
                A: Box((0, box.starts[1]), (rank, box.stops[1])),
                B: Box((box.starts[0], 0), (box.stops[0], rank)),
            }
            specs += [
                TensorSpec(name=f"{module}{kind}", global_shape=shapes[kind], box=boxes[kind], dtype="float32")
                for kind in (A, B)
            ]
        self._specs = tuple(specs)

    def specs(self) -> tuple[TensorSpec, ...]:
        """Tensors that this rank wants to receive: its part of each adapter."""
        return self._specs

    @torch.no_grad()
    def hold(self, adapters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Merges adapters into what `GeneratorModel.use` takes; see `GeneratorModel.hold`. Raises NonFiniteWeights."""
        spare = self._model.spare(whole=True)
        with device_stream(self._model.device):
            for name, frozen in self._frozen.items():
                a_R_I, b_O_R = (one.to(frozen.device) for one in adapter_of(adapters, name))
                weight_O_I, spec = merged(frozen, a_R_I, b_O_R, self._scale), self._targets[name]
                if spec.dtype in QUANTIZED_DTYPES:
                    quantize_rows(weight_O_I, spec.dtype, out=(spare[name], spare[f"{name}.scale"]))
                else:
                    spare[name].copy_(weight_O_I)
        return self._model.hold(spare)


def _smallest(weight: Tensor) -> Tensor:
    """The weight in bfloat16 where that loses nothing, as with checkpoints that are saved in it."""
    half = weight.bfloat16()
    return half if torch.equal(half.to(weight.dtype), weight) else weight
