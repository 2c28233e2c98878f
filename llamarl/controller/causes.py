"""Why a sampled token is as likely as it is under the policy that learns from it: the importance ratio, and the KL to
the behavior policy, split by cause.

Let mu_v be the distribution that a generator with version v draws from, and pi_c the policy in training, c - v steps
later. With what generator (g) and trainer (pi) say of the same tokens, untruncated where nothing is said of it, and *
for float32 arithmetic,

    log(pi_c / mu_v) = [log pi_c - log pi_v]                                        staleness
                     + [log pi*_v - log g*_v]                                       quantization: the weights' rounding
                     + [log pi_v - log pi*_v] + [log g*_v - log g_v]                kernels: both sides' arithmetic
                     + [log g_v - log mu_v]                                         truncation: the mass that was kept

is an identity, token by token. Where the sampler left tokens out, steps count among its candidates alone (cutoffs): the
left side has pi'_c, of those candidates, and truncation + log(pi'_c / pi_c), the mass that the trainer keeps; what both
masses have in common goes. A function f of the sum L of such parts a_i is divided by a_i f(L) / L, which is the
Aumann-Shapley price (Billera and Heath, "Allocation of shared costs", 1982) and the path integral of Sundararajan et
al., "Axiomatic attribution for deep networks" (2017), equation 1, from no cause to all: parts add up to f(L) exactly.
f(L) = e^L - 1 is the ratio's excess, f(L) = e^L - 1 - L the estimate of the KL. A part is negative where it makes up
for others.

A mixture's routers choose for themselves in all of these. Where experts were recorded, training computes with those,
and `kl_from_routing` is what that takes away: the KL to the behavior policy with the trainer's own choice minus the KL
with the recorded one, of the same sequences, by the weights with which the step began to learn from them. It is no
further part of the sum.

Shape suffix: N tokens but the first of each of several sequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from llamarl.algorithms.kl import MAX_LOG_RATIO
from llamarl.executors.probes import CauseProbe, Probe

if TYPE_CHECKING:
    from llamarl.controller.replica import Replica


async def by_cause(replica: Replica, probe: Probe) -> dict[str, float]:
    """Has `replica` score what a new `CauseProbe` brings; for the metrics, where one ends."""
    clock = asyncio.get_running_loop()
    start_s = clock.time()
    if probe.causes:
        scored = await replica.port.score(probe.causes.sequences, probe.causes.candidates)
        replica.causes = probe.causes, np.concatenate(scored, axis=1)
    found = {"causes_s": probe.causes_s + clock.time() - start_s} if probe.causes or probe.later else {}
    if of := probe.routing:
        found |= {"routes_agreement": of.agreement, "kl_live_routes": of.live_kl, "kl_replayed_routes": of.replayed_kl}
        found["kl_from_routing"] = of.live_kl - of.replayed_kl
    if probe.later and replica.causes and replica.causes[0].version == probe.later[0]:
        found |= divided(log_ratios(*replica.causes, *probe.later[1:]))
    return found


def log_ratios(
    begun: CauseProbe, scored_3_N: np.ndarray, later_N: np.ndarray, kept_N: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """log(pi_c / mu_v) of the sampled tokens by cause, float64.

    Where the generator knows no second arithmetic, quantization and kernels are one: `precision`.

    Args:
        later_N: log pi_c.
        kept_N: log pi'_c; None: as `later_N`.
    """
    kept_N = later_N if kept_N is None else kept_N
    table_7_N = np.stack([kept_N, later_N, begun.logprobs_N, begun.exact_logprobs_N, *scored_3_N]).astype(np.float64)
    kept_N, later_N, own_N, exact_N, generator_exact_N, generator_N, sampled_N = table_7_N[:, begun.is_sampled_N]
    parts = {"staleness": later_N - own_N, "truncation": generator_N - sampled_N + kept_N - later_N}
    if np.isnan(generator_exact_N).any():
        return parts | {"precision": own_N - generator_N}
    kernels_N = own_N - exact_N + generator_exact_N - generator_N
    return parts | {"quantization": exact_N - generator_exact_N, "kernels": kernels_N}


def divided(parts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Each cause's part of the mean KL, and of the mean ratio's excess over 1; nothing without tokens."""
    total_N = np.sum(list(parts.values()), axis=0)
    if not total_N.size:
        return {}
    is_none_N, clamped_N = total_N == 0, np.clip(total_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess_N, divisor_N = np.expm1(clamped_N), np.where(is_none_N, 1.0, total_N)
    kl_N, ratio_N = (excess_N - clamped_N) / divisor_N, np.where(is_none_N, 1.0, excess_N / divisor_N)
    found = dict[str, float]()
    for cause, part_N in parts.items():
        found[f"kl_from_{cause}"] = float(np.mean(part_N * kl_N))
        found[f"ratio_from_{cause}"] = float(np.mean(part_N * ratio_N))
    return found
