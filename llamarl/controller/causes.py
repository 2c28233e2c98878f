"""Why a sampled token is as likely as it is under the policy that learns from it: the importance ratio, and the KL to
the behavior policy, split by cause.

A token of a step that begins with version c was drawn by a generator with version v. Let b be its recorded probability,
mu_v that of a forward which reads no cache, by the generator as it let the token go, and mu_c the same by a generator
that serves c while the step is taken. Generator (g) and trainer (pi) score it by the weights of version c, among all
tokens and, primed, among those from which the sampler drew; * means float32 arithmetic. rho is pi* by weights that are
rounded to bfloat16, where the generator gets those, else pi* itself. With these,

    log(pi'_c / b) = [log mu_c - log mu_v]                                          staleness
                   + [log pi*_c - log rho_c]                                        rounding: of weights to bfloat16
                   + [log rho_c - log g*_c]                                         quantization: 8-bit weights
                   + [log pi_c - log pi*_c] + [log g*_c - log g_c]                  kernels: both sides' arithmetic
                   + [log g_c - log mu_c] + [log pi'_c - log pi_c]                  truncation: the mass that was kept
                   + [log mu_v - log b]                                             kept, or cache

is an identity, token by token, of what the step learns from. A trainer in bfloat16 computes with rounded weights
itself, so its pi* is rho. How far its float32 master weights are ahead of the rounded ones is no cause of the ratio;
`unserved` measures it. The last part is `kept` where keys and values were read
that older weights had computed (`generator.kv_on_update = "keep"`), else `cache`: the type of the cache, and kernels
that read it. A function f of the sum L of such parts a_i is divided by a_i f(L) / L, which is the
Aumann-Shapley price (Billera and Heath, "Allocation of shared costs", 1982) and the path integral of Sundararajan et
al., "Axiomatic attribution for deep networks" (2017), equation 1, from no cause to all: parts add up to f(L) exactly.
f(L) = e^L - 1 is the ratio's excess, f(L) = e^L - 1 - L the estimate of the KL; f(L) = |L|, of L without its staleness,
is the mismatch: tokens of version c have nothing else. A part is negative where it makes up for others.

A mixture's routers choose for themselves in all of these. Where experts were recorded, training computes with those,
and `kl_from_routing` is what that takes away: the KL to the behavior policy with the trainer's own choice minus the KL
with the recorded one, of the same sequences, by the weights with which the step began to learn from them. It is no
further part of the sum.

Shape suffix: N tokens but the first of each of several sequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from llamarl.algorithms.kl import MAX_LOG_RATIO
from llamarl.controller.flight import Replicas
from llamarl.training.probe import CauseProbe
from llamarl.training.result import CauseScores


async def scored_by_generator(probe: CauseProbe, replicas: Replicas, version: int) -> tuple[np.ndarray, float] | None:
    """Has a generator score `probe` by the weights of `version`, with which a step begins: [3, N], as
    `GenerationBackend.score` with candidates, and the seconds that it took. Waits until one serves them, which the
    adoption loops unblock. None: all that are left have gone on."""
    clock = asyncio.get_running_loop()
    await replicas.changed.until(lambda: any(one.version >= version for one in replicas.alive))
    for replica in replicas.alive:
        if max(replica.version, replica.fetching) == version == replica.version:
            start_s = clock.time()
            scored = await replicas.unless_dead(replica, replica.port.score(probe.sequences, probe.candidates))
            return None if scored is None else (np.concatenate(scored, axis=1), clock.time() - start_s)
    return None


def by_cause(probe: CauseProbe, said: CauseScores, scored: tuple[np.ndarray, float] | None) -> dict[str, float]:
    """Metrics of the step; `scored` is what a generator says."""
    found = {"causes_s": said.seconds + (scored[1] if scored else 0.0), "unserved": said.unserved}
    if of := said.routing:
        found |= {"routes_agreement": of.agreement, "kl_live_routes": of.live_kl, "kl_replayed_routes": of.replayed_kl}
        found["kl_from_routing"] = of.live_kl - of.replayed_kl
    return found | (divided(log_ratios(probe, said.logprobs_4_N, scored[0])) if scored else {})


def log_ratios(probe: CauseProbe, trainer_4_N: np.ndarray, generator_3_N: np.ndarray) -> dict[str, np.ndarray]:
    """log(pi'_c / b) by cause, float64, of the tokens of which all is known.

    Where the generator knows no second arithmetic, quantization and kernels are one: `precision`.

    Args:
        trainer_4_N: log pi_c, log pi*_c, log rho_c, log pi'_c.
        generator_3_N: log g*_c, log g_c, log mu_c.
    """
    is_known_N = ~np.isnan(probe.fresh_N)
    table_9_N = np.stack([*trainer_4_N, *generator_3_N, probe.fresh_N, probe.behavior_N]).astype(np.float64)
    own_N, exact_N, rounded_N, among_N, *generator, fresh_N, behavior_N = table_9_N[:, is_known_N]
    of_exact_N, of_own_N, of_among_N = generator
    is_over_kept_N, cached_N = probe.is_over_kept_N[is_known_N], fresh_N - behavior_N
    parts = {
        "staleness": of_among_N - fresh_N,
        "rounding": exact_N - rounded_N,
        "truncation": of_own_N - of_among_N + among_N - own_N,
        "kept": np.where(is_over_kept_N, cached_N, 0.0),
        "cache": np.where(is_over_kept_N, 0.0, cached_N),
    }
    if np.isnan(of_exact_N).any():
        return parts | {"precision": own_N - of_own_N - parts["rounding"]}
    return parts | {"quantization": rounded_N - of_exact_N, "kernels": own_N - exact_N + of_exact_N - of_own_N}


def divided(parts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Each cause's part of the mean KL, of the mean ratio's excess over 1, and of the mean mismatch; nothing without
    tokens."""
    total_N = np.sum(list(parts.values()), axis=0)
    if not total_N.size:
        return {}
    is_none_N, clamped_N = total_N == 0, np.clip(total_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess_N, divisor_N = np.expm1(clamped_N), np.where(is_none_N, 1.0, total_N)
    kl_N, ratio_N = (excess_N - clamped_N) / divisor_N, np.where(is_none_N, 1.0, excess_N / divisor_N)
    sign_N, found = np.sign(total_N - parts["staleness"]), dict[str, float]()
    for cause, part_N in parts.items():
        found[f"kl_from_{cause}"] = float(np.mean(part_N * kl_N))
        found[f"ratio_from_{cause}"] = float(np.mean(part_N * ratio_N))
        if cause != "staleness":
            found[f"mismatch_from_{cause}"] = float(np.mean(part_N * sign_N))
    return found
