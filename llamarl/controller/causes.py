"""Splits the importance ratio of sampled tokens, and the KL to the behavior policy, by cause.

A step that begins with version c trains on a token that a generator sampled with version v. These probabilities of the
token are known:

- b: recorded when it was sampled.
- mu_v: by the generator that sampled it, shortly before it replaced version v, in a forward without a cache.
- mu_c: the same by a generator that serves version c while the step is taken.
- pi and g: by trainer and generator with the weights of version c, over the whole vocabulary. pi' is the trainer's
  probability among the tokens that the sampler drew from.
- pi* and g*: the same in float32 arithmetic.
- rho: pi* with weights rounded to bfloat16 if generators receive bfloat16, else pi* itself.
- rho': rho with delta nets computed token by token, as generators do, and not in chunks; without delta nets rho itself.

Then

    log(pi'_c / b) = [log mu_c - log mu_v]                                          staleness
                   + [log pi*_c - log rho_c]                                        rounding: of weights to bfloat16
                   + [log rho_c - log rho'_c]                                       chunked_vs_recurrent: delta nets
                   + [log rho'_c - log g*_c]                                        quantization: 8-bit weights
                   + [log pi_c - log pi*_c] + [log g*_c - log g_c]                  kernels: both sides' arithmetic
                   + [log g_c - log mu_c] + [log pi'_c - log pi_c]                  truncation: the mass that was kept
                   + [log mu_v - log b]                                             kept, or cache

is an identity for each token. A trainer in bfloat16 computes with rounded weights itself, so its pi* equals rho. The
distance of its float32 master weights from the rounded ones is no cause of the ratio; `unserved` measures it. The last
part is called `kept` if the token read keys and values that older weights had computed
(`generator.kv_on_update = "keep"`), else `cache`: the type of the cache, and the kernels that read it.

A function f of the sum L of these parts a_i is split into a_i f(L) / L. This is the Aumann-Shapley price (Billera and
Heath, "Allocation of shared costs", 1982) and the path integral of Sundararajan et al., "Axiomatic attribution for deep
networks" (2017), equation 1. The shares add up to f(L) exactly. f(L) = e^L - 1 is the ratio's excess over 1, and f(L) =
e^L - 1 - L the estimate of the KL. f(L) = |L| of L without its staleness is the mismatch, which tokens of version c
have too. A negative share offsets other causes.

In all of these the routers of a mixture choose experts for themselves. If experts were recorded, training uses the
recorded ones, and `kl_from_routing` is the difference: the KL to the behavior policy with the trainer's own choice
minus the KL with the recorded one, of the same sequences and weights. It is not part of the sum.

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
    """Has a generator that serves `version` score `probe`. Waits until one serves it, or a newer one.

    Returns:
        [3, N], as `GenerationBackend.score` with candidates, and the seconds it took. None means that all generators
        serve newer versions.
    """
    clock = asyncio.get_running_loop()
    await replicas.changed.until(lambda: any(replica.version >= version for replica in replicas.alive))
    for replica in replicas.alive:
        if max(replica.version, replica.fetching) == version == replica.version:
            start_s = clock.time()
            scored = await replicas.unless_dead(replica, replica.port.score(probe.sequences, probe.candidates))
            return None if scored is None else (np.concatenate(scored, axis=1), clock.time() - start_s)
    return None


def by_cause(probe: CauseProbe, trainer: CauseScores, scored: tuple[np.ndarray, float] | None) -> dict[str, float]:
    """Returns metrics of a step. `scored` is the result of `scored_by_generator`."""
    metrics = {"causes_s": trainer.seconds + (scored[1] if scored else 0.0), "unserved": trainer.unserved}
    if routing := trainer.routing:
        metrics |= {
            "routes_agreement": routing.agreement,
            "kl_live_routes": routing.live_kl,
            "kl_replayed_routes": routing.replayed_kl,
            "kl_from_routing": routing.live_kl - routing.replayed_kl,
        }
    return metrics | (divided(log_ratios(probe, trainer, scored[0])) if scored else {})


def log_ratios(probe: CauseProbe, trainer: CauseScores, generator_3_N: np.ndarray) -> dict[str, np.ndarray]:
    """Returns log(pi'_c / b) by cause, in float64, of the tokens with all probabilities.

    If the generator has no float32 arithmetic, `precision` stands for both quantization and kernels.

    Args:
        generator_3_N: log g*_c, log g_c, log mu_c.
    """
    is_known_N = ~np.isnan(probe.fresh_N)
    table_9_N = np.stack([*trainer.logprobs_4_N, *generator_3_N, probe.fresh_N, probe.behavior_N]).astype(np.float64)
    pi_N, pi_exact_N, rho_N, pi_among_N, g_exact_N, g_N, mu_c_N, mu_v_N, behavior_N = table_9_N[:, is_known_N]
    is_over_kept_N, cached_N = probe.is_over_kept_N[is_known_N], mu_v_N - behavior_N
    parts = {
        "staleness": mu_c_N - mu_v_N,
        "rounding": pi_exact_N - rho_N,
        "truncation": g_N - mu_c_N + pi_among_N - pi_N,
        "kept": np.where(is_over_kept_N, cached_N, 0.0),
        "cache": np.where(is_over_kept_N, 0.0, cached_N),
    }
    if trainer.recurrent_N is not None:
        chunked_N, rho_N = rho_N, trainer.recurrent_N[is_known_N].astype(np.float64)
        parts["chunked_vs_recurrent"] = chunked_N - rho_N
    if np.isnan(g_exact_N).any():
        return parts | {"precision": pi_N - g_N - pi_exact_N + rho_N}
    return parts | {"quantization": rho_N - g_exact_N, "kernels": pi_N - pi_exact_N + g_exact_N - g_N}


def divided(parts: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns each cause's share of the mean KL, of the mean ratio's excess over 1, and of the mean mismatch. Returns
    nothing if there are no tokens."""
    total_N = np.sum(list(parts.values()), axis=0)
    if not total_N.size:
        return {}
    is_none_N, clamped_N = total_N == 0, np.clip(total_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    excess_N, divisor_N = np.expm1(clamped_N), np.where(is_none_N, 1.0, total_N)
    kl_N, ratio_N = (excess_N - clamped_N) / divisor_N, np.where(is_none_N, 1.0, excess_N / divisor_N)
    sign_N, metrics = np.sign(total_N - parts["staleness"]), dict[str, float]()
    for cause, part_N in parts.items():
        metrics[f"kl_from_{cause}"] = float(np.mean(part_N * kl_N))
        metrics[f"ratio_from_{cause}"] = float(np.mean(part_N * ratio_N))
        if cause != "staleness":
            metrics[f"mismatch_from_{cause}"] = float(np.mean(part_N * sign_N))
    return metrics
