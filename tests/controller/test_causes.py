"""Importance ratio and KL by cause: parts add up, each is the path integral, and a cause alone has all of it."""

from __future__ import annotations

import asyncio
import math
from typing import cast

import numpy as np
import pytest

from llamarl.controller.causes import by_cause, divided, log_ratios
from llamarl.controller.replica import Replica
from llamarl.executors.probes import CauseProbe, Probe
from llamarl.training.result import RoutingEffect
from llamarl.types import CandidateSets

CAUSES = ("staleness", "quantization", "kernels", "truncation")


def table(num_tokens: int = 50) -> np.ndarray:
    """Log-probabilities [6, N]: trainer later, then, exactly; generator exactly, by itself, truncated."""
    return -np.random.default_rng(3).gamma(2.0, 0.5, (6, num_tokens))


def parts_of(
    table_6_N: np.ndarray, is_sampled_N: np.ndarray | None = None, kept_N: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    later_N, own_N, exact_N = table_6_N[:3]
    begun = CauseProbe(
        version=1, sequences=[], is_sampled_N=np.ones(len(own_N), bool) if is_sampled_N is None else is_sampled_N,
        candidates=CandidateSets(temperature=1.0, cutoffs=[]), logprobs_N=own_N, exact_logprobs_N=exact_N,
    )  # fmt: skip
    return log_ratios(begun, table_6_N[3:], later_N, kept_N)


def test_parts_add_up_token_by_token() -> None:
    table_6_N = table()
    parts = parts_of(table_6_N)
    assert set(parts) == set(CAUSES)
    np.testing.assert_allclose(sum(parts.values()), table_6_N[0] - table_6_N[5], rtol=1e-12)


@pytest.mark.parametrize(
    ("cause", "differ"), [("staleness", (0,)), ("kernels", (0, 1)), ("quantization", (0, 1, 2)), ("truncation", (5,))]
)
def test_a_cause_alone_has_all(cause: str, differ: tuple[int, ...]) -> None:
    table_6_N = np.tile(table()[0], (6, 1))
    table_6_N[list(differ)] += np.linspace(-1.0, 1.0, 50)
    log_ratio_N = table_6_N[0] - table_6_N[5]
    found = divided(parts_of(table_6_N))
    assert found.pop(f"kl_from_{cause}") == pytest.approx(np.mean(np.exp(log_ratio_N) - 1 - log_ratio_N), rel=1e-12)
    assert found.pop(f"ratio_from_{cause}") == pytest.approx(np.mean(np.exp(log_ratio_N) - 1), rel=1e-12)
    assert set(found.values()) == {0.0} and len(found) == 6


def test_the_generator_s_arithmetic_counts_as_kernels() -> None:
    table_6_N = np.tile(table()[0], (6, 1))
    table_6_N[4:] += 0.1
    parts = parts_of(table_6_N)
    np.testing.assert_allclose(parts["kernels"], -0.1, rtol=1e-12)
    assert not parts["quantization"].any() and not parts["truncation"].any()


def test_parts_are_path_integrals_and_their_sum_is_the_whole() -> None:
    parts = parts_of(table())
    log_ratio_N = np.sum(list(parts.values()), axis=0)
    found, (nodes, weights) = divided(parts), np.polynomial.legendre.leggauss(40)
    path_P_N = np.exp((nodes[:, None] + 1) / 2 * log_ratio_N)
    for cause, part_N in parts.items():
        assert found[f"ratio_from_{cause}"] == pytest.approx(np.mean(part_N * (weights @ path_P_N) / 2), rel=1e-12)
        expected = np.mean(part_N * (weights @ (path_P_N - 1)) / 2)
        assert found[f"kl_from_{cause}"] == pytest.approx(expected, rel=1e-12)
    assert math.fsum(found[f"kl_from_{one}"] for one in CAUSES) == pytest.approx(
        np.mean(np.expm1(log_ratio_N) - log_ratio_N), rel=1e-12
    )


def test_what_was_not_sampled_does_not_count() -> None:
    table_6_N, is_sampled_N = table(), np.arange(50) >= 20
    parts = parts_of(table_6_N, is_sampled_N)
    np.testing.assert_array_equal(parts["staleness"], (table_6_N[0] - table_6_N[1])[20:])
    assert divided(parts_of(table_6_N, np.zeros(50, bool))) == {}


def test_a_mass_that_both_keep_goes() -> None:
    """Of what the sampler left out is left what the trainer leaves out more, or less."""
    table_6_N = table()
    whole, cut = parts_of(table_6_N), parts_of(table_6_N, kept_N=table_6_N[0] + 0.3)
    np.testing.assert_allclose(cut.pop("truncation"), whole.pop("truncation") + 0.3, rtol=1e-12)
    assert all(np.array_equal(cut[cause], whole[cause]) for cause in whole)


def test_without_a_second_arithmetic_two_causes_are_one() -> None:
    table_6_N = table()
    table_6_N[3] = math.nan
    parts = parts_of(table_6_N)
    assert set(parts) == {"staleness", "truncation", "precision"}
    np.testing.assert_allclose(sum(parts.values()), table_6_N[0] - table_6_N[5], rtol=1e-12)


def test_enormous_ratios_stay_finite() -> None:
    table_6_N = np.zeros((6, 2))
    table_6_N[0] = 1e4, -1e4
    found = divided(parts_of(table_6_N))
    assert found["kl_from_staleness"] == pytest.approx((math.expm1(20) - 20 + math.expm1(-20) + 20) / 2)


def test_what_router_replay_takes_away_stands_beside_the_causes() -> None:
    effect = RoutingEffect(agreement=0.75, live_kl=3e-3, replayed_kl=1e-3)
    probe = Probe(sequences=[], logprobs=[], routing=effect)
    found = asyncio.run(by_cause(cast(Replica, None), probe))
    assert found.pop("kl_from_routing") == pytest.approx(2e-3)
    assert found == {"routes_agreement": 0.75, "kl_live_routes": 3e-3, "kl_replayed_routes": 1e-3}
