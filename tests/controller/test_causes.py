"""Importance ratio, KL and mismatch by cause: parts add up, each is the path integral, a cause alone has all of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llamarl.controller.causes import by_cause, divided, log_ratios
from llamarl.training.probe import CauseProbe
from llamarl.training.result import CauseScores, RoutingEffect
from llamarl.types import CandidateSets

MISMATCH = ("rounding", "quantization", "kernels", "truncation", "kept", "cache")
CAUSES = ("staleness", *MISMATCH)
TOKENS = 50
IS_OVER_KEPT = np.arange(TOKENS) % 2 == 0


def table() -> np.ndarray:
    """Log-probabilities [9, N]: trainer, exactly, rounded, among candidates; generator exactly, by itself, among
    candidates; as it let the token go; as it drew it."""
    return -np.random.default_rng(3).gamma(2.0, 0.5, (9, TOKENS))


def probe_of(table_9_N: np.ndarray, is_over_kept_N: np.ndarray = IS_OVER_KEPT) -> CauseProbe:
    return CauseProbe(
        groups=[], sequences=[], candidates=CandidateSets(temperature=1.0, cutoffs=[]),
        fresh_N=table_9_N[7], behavior_N=table_9_N[8], is_over_kept_N=is_over_kept_N,
    )  # fmt: skip


def scores_of(table_9_N: np.ndarray, recurrent_N: np.ndarray | None = None) -> CauseScores:
    effect = RoutingEffect(agreement=0.75, live_kl=3e-3, replayed_kl=1e-3)
    return CauseScores(logprobs_4_N=table_9_N[:4], recurrent_N=recurrent_N, unserved=0.25, routing=effect, seconds=2.0)


def parts_of(
    table_9_N: np.ndarray, is_over_kept_N: np.ndarray = IS_OVER_KEPT, recurrent_N: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    probe = probe_of(table_9_N, is_over_kept_N)
    return log_ratios(probe, scores_of(table_9_N, recurrent_N), table_9_N[4:7])


def test_parts_add_up_token_by_token() -> None:
    table_9_N = table()
    parts = parts_of(table_9_N)
    assert set(parts) == set(CAUSES)
    np.testing.assert_allclose(sum(parts.values()), table_9_N[3] - table_9_N[8], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("cause", "differ", "kept"),
    [
        ("staleness", (0, 1, 2, 3, 4, 5, 6), False),
        ("rounding", (0, 1, 3), False),
        ("quantization", (0, 1, 2, 3), False),
        ("kernels", (0, 3), False),
        ("kernels", (0, 1, 2, 3, 4), False),
        ("truncation", (3,), False),
        ("truncation", (0, 1, 2, 3, 4, 5), False),
        ("cache", (8,), False),
        ("kept", (8,), True),
    ],
)
def test_a_cause_alone_has_all(cause: str, differ: tuple[int, ...], kept: bool) -> None:
    table_9_N = np.tile(table()[0], (9, 1))
    table_9_N[list(differ)] += np.linspace(-1.0, 1.0, TOKENS)
    log_ratio_N = table_9_N[3] - table_9_N[8]
    found = divided(parts_of(table_9_N, np.full(TOKENS, kept)))
    assert found.pop(f"kl_from_{cause}") == pytest.approx(np.mean(np.exp(log_ratio_N) - 1 - log_ratio_N), rel=1e-12)
    assert found.pop(f"ratio_from_{cause}") == pytest.approx(np.mean(np.exp(log_ratio_N) - 1), rel=1e-12)
    if cause in MISMATCH:
        assert found.pop(f"mismatch_from_{cause}") == pytest.approx(np.mean(np.abs(log_ratio_N)), rel=1e-12)
    assert set(found.values()) == {0.0} and len(found) == 3 * len(CAUSES) - (4 if cause in MISMATCH else 3)


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


def test_the_parts_of_the_mismatch_are_what_is_no_staleness() -> None:
    parts = parts_of(table())
    size = np.mean(np.abs(sum(part_N for cause, part_N in parts.items() if cause != "staleness")))
    found = divided(parts)
    assert math.fsum(found[f"mismatch_from_{cause}"] for cause in MISMATCH) == pytest.approx(size, rel=1e-12)


def test_a_token_of_which_something_is_not_known_does_not_count() -> None:
    table_9_N = table()
    whole = parts_of(table_9_N)
    table_9_N[7, :20] = math.nan
    for cause, part_N in parts_of(table_9_N).items():
        np.testing.assert_array_equal(part_N, whole[cause][20:])
    table_9_N[7] = math.nan
    assert divided(parts_of(table_9_N)) == {}


def test_without_a_second_arithmetic_two_causes_are_one() -> None:
    table_9_N = table()
    table_9_N[4] = math.nan
    parts = parts_of(table_9_N)
    assert set(parts) == {*CAUSES, "precision"} - {"quantization", "kernels"}
    np.testing.assert_allclose(sum(parts.values()), table_9_N[3] - table_9_N[8], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("one_arithmetic", [False, True])
def test_the_form_of_delta_nets_is_a_cause(one_arithmetic: bool) -> None:
    """It takes its part from what hybrids had as quantization or precision. Alone it has all of it."""
    table_9_N, recurrent_N = table(), table()[0][::-1].copy()
    if one_arithmetic:
        table_9_N[4] = math.nan
    parts, without = parts_of(table_9_N, recurrent_N=recurrent_N), parts_of(table_9_N)
    assert parts.keys() - without.keys() == {"chunked_vs_recurrent"}
    np.testing.assert_allclose(sum(parts.values()), table_9_N[3] - table_9_N[8], rtol=1e-12, atol=1e-12)
    other = "precision" if one_arithmetic else "quantization"
    np.testing.assert_allclose(parts["chunked_vs_recurrent"] + parts[other], without[other], rtol=1e-12, atol=1e-12)
    table_9_N = np.tile(table()[0], (9, 1))
    table_9_N[4:] = recurrent_N
    alone = parts_of(table_9_N, recurrent_N=recurrent_N)
    assert [cause for cause, part_N in alone.items() if np.abs(part_N).max() > 1e-12] == ["chunked_vs_recurrent"]


def test_enormous_ratios_stay_finite() -> None:
    table_9_N = np.zeros((9, TOKENS))
    table_9_N[:7, :25], table_9_N[:7, 25:] = 1e4, -1e4
    found = divided(parts_of(table_9_N))
    assert found["kl_from_staleness"] == pytest.approx((math.expm1(20) - 20 + math.expm1(-20) + 20) / 2)


def test_what_router_replay_takes_away_stands_beside_the_causes() -> None:
    """Also where no generator has answered."""
    table_9_N = table()
    said = scores_of(table_9_N)
    found = by_cause(probe_of(table_9_N), said, None)
    assert found.pop("kl_from_routing") == pytest.approx(2e-3)
    assert found == {
        "causes_s": 2.0,
        "unserved": 0.25,
        "routes_agreement": 0.75,
        "kl_live_routes": 3e-3,
        "kl_replayed_routes": 1e-3,
    }
    assert by_cause(probe_of(table_9_N), said, (table_9_N[4:7], 0.5)).items() > {"causes_s": 2.5}.items()
