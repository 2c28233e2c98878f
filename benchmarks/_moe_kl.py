"""Exact KL of a generator to the float32 trainer, over the whole vocabulary, with recorded experts and without, and
what it is made of.

The generator samples through its engine, cache and kernels, and each of its distributions is kept; the trainer's are
computed of the same tokens. With L = log(pi / mu) the KL of mu to pi is the mean over mu of e^L - 1 - L, which is
divided among the parts of L as `llamarl/controller/causes.py` does, here over all tokens and not the sampled ones.

Shape suffixes: N response tokens, V vocabulary, W experts of a token in all layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from llamarl.distributed.mesh import ALONE, CPU
from llamarl.generation.engine import Engine, EngineSettings
from llamarl.generation.model import GeneratorModel, Precision
from llamarl.models.experts import Router
from llamarl.models.hf import new_model
from llamarl.models.quantize import QUANTIZED_DTYPES, dequantize_rows, quantize_rows
from llamarl.models.transformer import Transformer
from llamarl.training.packing import pack, to_sample_group
from llamarl.training.policy import Policy
from llamarl.types import GenerationRequest, Outcome, Prompt, RewardResult, Rollout, RolloutGroup, SamplingParams

MICROBATCH_TOKENS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Rollouts of a generator, and the distributions that they were drawn from."""

    groups: list[RolloutGroup]
    logprobs_N_V: Tensor
    """Float64, in the order of the groups."""


@torch.inference_mode()
def drawn(model: GeneratorModel, prompts: Sequence[Prompt], group_size: int, sampling: SamplingParams) -> Drawn:
    """What the engine samples at temperature 1."""
    engine = Engine(model, EngineSettings(max_running=128, prefill_tokens=2048, kv_bytes=None))
    rows, logits = dict[tuple[int, int], list[Tensor]](), model.logits

    def keep(hidden_N_D: Tensor) -> Tensor:
        found_N_V = logits(hidden_N_D)
        for one, logits_V in zip(engine._rows.sequences, found_N_V.double().log_softmax(-1), strict=True):
            rows.setdefault((one.group.request.group_id, one.index), []).append(logits_V)
        return found_N_V

    model.logits = keep  # type: ignore[method-assign]
    engine.submit([
        GenerationRequest(group_id=number, prompt_token_ids_T=one.token_ids_T, group_size=group_size, sampling=sampling)
        for number, one in enumerate(prompts)
    ])  # fmt: skip
    done = dict[tuple[int, int], Rollout]()
    while engine.has_work:
        done |= {(one.group_id, one.index): one for one in engine.step()}
    groups = [_group(number, prompt, [done[number, index] for index in range(group_size)])
              for number, prompt in enumerate(prompts)]  # fmt: skip
    logprobs_N_V = torch.stack([row for key in sorted(done) for row in rows[key]])
    _check(groups, logprobs_N_V)
    return Drawn(groups=groups, logprobs_N_V=logprobs_N_V)


def _group(number: int, prompt: Prompt, rollouts: list[Rollout]) -> RolloutGroup:
    results = tuple(RewardResult(outcome=Outcome.SCORE, value=0.0) for _ in rollouts)
    return RolloutGroup(
        group_id=number, prompt=prompt, rollouts=tuple(rollouts), results=results, responses=("",) * len(rollouts)
    )


def _check(groups: Sequence[RolloutGroup], logprobs_N_V: Tensor) -> None:
    """Each row is of its token: what the rollout says of it is there."""
    columns = [one.columns for group in groups for one in group.rollouts]
    ids_N, behavior_N = (np.concatenate([one[name] for one in columns]) for name in ("token_ids", "behavior_logprobs"))
    picked_N = logprobs_N_V.gather(1, torch.from_numpy(ids_N).long()[:, None])[:, 0]
    np.testing.assert_allclose(picked_N.numpy(), behavior_N, rtol=0, atol=1e-3)


@torch.no_grad()
def told(model: Transformer, groups: Sequence[RolloutGroup], is_replayed: bool) -> tuple[Tensor, Tensor | None]:
    """The trainer's float32 distributions of all response tokens, as float64, and which experts it took for them, and
    which were recorded, [2, N, W]; None: it has none."""
    policy, found, experts = Policy(model, ALONE), list[Tensor](), list[Tensor]()
    chosen = list[Tensor]()
    routers = [one for one in model.modules() if isinstance(one, Router)]
    hooks = [one.register_forward_hook(lambda _module, _given, answer: chosen.append(answer[0])) for one in routers]
    for microbatch in pack([to_sample_group(one, np.ones(len(one.rollouts))) for one in groups], MICROBATCH_TOKENS):
        inputs = policy.place(microbatch, CPU)
        recorded_N_W = inputs.routes_N_W
        inputs = inputs if is_replayed else replace(inputs, routes_N_W=None)
        hidden_N_D = policy.hidden(inputs, None, False).index_select(0, inputs.predictors_O)
        found.append((hidden_N_D @ model.head_weight_V_D.T).double().log_softmax(-1))
        if recorded_N_W is not None:
            both = torch.cat(chosen, 1).long(), recorded_N_W
            experts.append(torch.stack([one.index_select(0, inputs.predictors_O) for one in both]))
        chosen.clear()
    for hook in hooks:
        hook.remove()
    return torch.cat(found), torch.cat(experts, 1) if experts else None


def kl(mu_N_V: Tensor, pi_N_V: Tensor) -> Tensor:
    """KL(mu || pi) of each token, in nats, [N]."""
    return (mu_N_V.exp() * (mu_N_V - pi_N_V)).sum(-1)


def error(kl_N: Tensor, groups: Sequence[RolloutGroup]) -> float:
    """Standard error of the mean over all tokens, where those of a prompt belong together."""
    tokens_G = torch.tensor([sum(one.num_tokens for one in group.rollouts) for group in groups]).double()
    sums_G = torch.stack([part.sum() for part in kl_N.split(tokens_G.long().tolist())])
    apart_G = sums_G - tokens_G * kl_N.mean()  # of a ratio: Cochran, "Sampling Techniques" (1977), section 6.4
    return float(apart_G.square().sum().sqrt() / tokens_G.sum())


def differ(experts_2_N_W: Tensor, per_token: int) -> float:
    """Share of pairs of token and layer whose experts are others than were recorded."""
    own, recorded = experts_2_N_W.unflatten(2, (-1, per_token)).sort(-1).values
    return float((own != recorded).any(-1).double().mean())


def parts_of_kl(mu_N_V: Tensor, parts: Mapping[str, Tensor]) -> dict[str, float]:
    """KL(mu || mu e^L) per token by part of L = log(pi / mu), in nats; they add up to it."""
    total_N_V = torch.stack([*parts.values()]).sum(0)
    divisor_N_V = torch.where(total_N_V == 0, 1.0, total_N_V)
    weight_N_V = mu_N_V.exp() * (total_N_V.expm1() - total_N_V) / divisor_N_V
    return {name: float((weight_N_V * part_N_V).sum(-1).mean()) for name, part_N_V in parts.items()}


def rounded(model: Transformer, generator: GeneratorModel) -> Transformer:
    """The weights that the generator has, for the trainer's arithmetic."""
    state = dict(model.state_dict())
    for spec in generator.specs():
        if spec.part == "scales":
            continue
        whole = state[spec.name]
        if spec.dtype in QUANTIZED_DTYPES:
            state[spec.name] = dequantize_rows(*quantize_rows(whole, spec.dtype))
        else:
            state[spec.name] = whole.to(getattr(torch, spec.dtype)).float()
    twin = new_model(model.shape, 0, 0.06)
    twin.load_state_dict(state)
    return twin


@dataclass(frozen=True, kw_only=True, slots=True)
class Problems:
    """What is asked."""

    prompts: Sequence[Prompt]
    group_size: int
    sampling: SamplingParams

    def asked(self, model: Transformer, kind: Precision) -> tuple[GeneratorModel, Drawn]:
        """A generator of these weights, and what it samples."""
        generator = GeneratorModel(model.shape, kind, CPU)
        generator.load(model)
        return generator, drawn(generator, self.prompts, self.group_size, self.sampling)


def mismatch(model: Transformer, kind: Precision, problems: Problems) -> dict[str, float]:
    """KL by the same weights, with replay and, of a mixture, without."""
    _, found = problems.asked(model, kind)
    mu_N_V = found.logprobs_N_V
    kl_N = kl(mu_N_V, told(model, found.groups, is_replayed=True)[0])
    figures = {"tokens": float(len(mu_N_V)), "kl": float(kl_N.mean()), "kl_error": error(kl_N, found.groups)}
    if model.shape.moe is None:
        return figures
    live_N_V, experts = told(model, found.groups, is_replayed=False)
    assert experts is not None
    routing_N = kl(mu_N_V, live_N_V) - kl_N
    return figures | {
        "kl_live": float((kl_N + routing_N).mean()),
        "routes_differ": differ(experts, model.shape.moe.experts_per_token),
        "routing_in_ten_tokens": float(routing_N.topk(10).values.sum() / routing_N.sum()),
    }


def by_cause(
    model: Transformer, later: Transformer, kind: Precision, problems: Problems
) -> dict[str, dict[str, float]]:
    """KL of what a generator with the weights of `model` samples to the policy one step later, by cause, with router
    replay and without: of the same tokens."""
    generator, found = problems.asked(model, kind)
    mu_N_V, groups = found.logprobs_N_V, found.groups
    exact_N_V, own_N_V, later_N_V = (
        told(one, groups, is_replayed=True)[0] for one in (rounded(model, generator), model, later)
    )
    live_N_V = told(later, groups, is_replayed=False)[0]
    parts = {
        "staleness": later_N_V - own_N_V, "quantization": own_N_V - exact_N_V, "kernels": exact_N_V - mu_N_V
    }  # fmt: skip
    shares = {
        "on": parts_of_kl(mu_N_V, parts), "off": parts_of_kl(mu_N_V, parts | {"routing": live_N_V - later_N_V})
    }  # fmt: skip
    for name, pi_N_V in (("on", later_N_V), ("off", live_N_V)):
        assert math.isclose(sum(shares[name].values()), float(kl(mu_N_V, pi_N_V).mean()), rel_tol=1e-6, abs_tol=1e-12)
    return shares
