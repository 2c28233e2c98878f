"""The effect of router replay: how often the trainer's routers would choose the recorded experts, and the KL to the
behavior policy with their choice and with the recorded experts.

Both are measured at the same positions, which predict sampled tokens. Other tokens of a prompt, and tokens that an
environment wrote, are replayed too. If a router chooses otherwise for them, log-probabilities of sampled tokens change
by attention only, and in the last layer not at all.

Shape suffixes: N packed tokens, P positions that predict sampled tokens, R targets, K experts of a token in one layer,
W in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from llamarl.algorithms.kl import MAX_LOG_RATIO
from llamarl.models.transformer import Layer, Transformer
from llamarl.training.packing import NOT_RECORDED, pack, to_sample_group
from llamarl.training.policy import Inputs
from llamarl.training.probe import WHOLE_TOKENS
from llamarl.training.result import RoutingEffect
from llamarl.training.trainer import Trainer
from llamarl.types import RolloutGroup, SampleGroup, TrainSample


@torch.no_grad()
def routing_of(trainer: Trainer, groups: Sequence[RolloutGroup], half: bool) -> RoutingEffect | None:
    """Returns the effect on sampled tokens of each group's first rollout, by the weights in use, on every rank. None
    means that nothing was recorded."""
    samples = [cut for group in groups if (cut := _first(group)) is not None]
    microbatches = pack(samples, sum(len(sample.prompt_token_ids_T) + WHOLE_TOKENS for sample in samples))
    if not microbatches or microbatches[0].routes_N_W is None:
        return None
    (microbatch,) = microbatches
    inputs, shape = trainer.policy.place(microbatch, trainer.device), trainer.policy.hidden_shape(microbatch)
    log_ratios = list[np.ndarray]()
    is_sampled_R = microbatch.loss_mask_R
    predictors_P = inputs.predictors_O[torch.from_numpy(is_sampled_R).to(trainer.device)[inputs.index_O]]
    with _agreed(trainer.model, inputs, predictors_P) as counts:
        for routed in (replace(inputs, routes_N_W=None), inputs):
            logprobs_R = trainer.pipeline.infer(shape, _forward(trainer, routed, half))
            known = trainer.mesh.exchange(logprobs_R.cpu().numpy() if trainer.mesh.pp.is_last else None)[-1]
            log_ratios.append((known - microbatch.behavior_logprobs_R)[is_sampled_R].astype(np.float64))
            counts.is_open = False
    trainer.reshard()
    agreed, num_pairs = np.sum(trainer.mesh.exchange((counts.agreed, counts.all)), axis=0)
    if not num_pairs or not log_ratios[0].size:
        return None
    live, replayed = map(_kl, log_ratios)
    return RoutingEffect(agreement=float(agreed / num_pairs), live_kl=live, replayed_kl=replayed)


def _first(group: RolloutGroup) -> SampleGroup | None:
    """Returns a group with its first rollout only, cut to the tokens of a probe."""
    alone = replace(group, rollouts=group.rollouts[:1], results=group.results[:1], responses=group.responses[:1])
    sample_group = to_sample_group(alone, np.zeros(1), np.array([group.rollouts[0].num_tokens > 0]))
    if not sample_group.samples:
        return None
    columns = {name: values_T[:WHOLE_TOKENS] for name, values_T in sample_group.samples[0].columns.items()}
    return replace(sample_group, samples=(TrainSample(columns=columns),))


def _forward(trainer: Trainer, inputs: Inputs, half: bool) -> Any:
    half = half and trainer.config.dtype == "bfloat16"
    return lambda _, hidden_M_D: trainer.policy(inputs, hidden_M_D, trainer.objective.temperature, half)


def _kl(log_ratio_R: np.ndarray) -> float:
    """Returns KL(behavior || policy), see `sync.mismatch_of`."""
    clamped_R = np.clip(log_ratio_R, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return float(np.mean(np.expm1(clamped_R) - clamped_R))


class _Counts:
    def __init__(self) -> None:
        self.agreed = self.all = 0
        self.is_open = True

    def add(self, used_P_K: Tensor, recorded_P_K: Tensor) -> None:
        if self.is_open:
            is_known_P = (recorded_P_K != NOT_RECORDED).all(1)
            is_same_P = (used_P_K.sort(1).values == recorded_P_K.sort(1).values).all(1)
            self.all += int(is_known_P.sum())
            self.agreed += int((is_same_P & is_known_P).sum())


@contextmanager
def _agreed(model: Transformer, inputs: Inputs, predictors_P: Tensor) -> Iterator[_Counts]:
    """Counts the choices of routers until `is_open` is cleared."""
    assert inputs.routes_N_W is not None
    counts, routes_N_W = _Counts(), inputs.routes_N_W

    def counting(columns: slice) -> Any:
        recorded_P_K = routes_N_W[predictors_P, columns]
        return lambda _module, _inputs, answer: counts.add(answer[0][predictors_P], recorded_P_K)

    layers = [layer for layer in map(_layer, model.model.layers.children()) if layer.columns is not None]
    hooks = [
        cast(nn.Module, layer.mlp.gate).register_forward_hook(counting(cast(slice, layer.columns))) for layer in layers
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _layer(module: nn.Module) -> Layer:
    assert isinstance(module, Layer)
    return module
