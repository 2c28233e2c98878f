"""Any layout of a trainer computes what one process computes: losses, log-probs, gradients, weights.

Not covered: GPUs and NCCL, several hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from llamarl.algorithms.losses.gspo import Gspo
from tests.distributed.ranks import Workers, results
from tests.training.layouts import LLAMA, QWEN2, QWEN3, Found, alone, assembled, difference, rank

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture
def run(workers: Workers, tmp_path_factory: pytest.TempPathFactory):
    def run(sizes: dict[str, int], *arguments: Any) -> list[Found]:
        folder = tmp_path_factory.mktemp("meeting")
        folder.chmod(0o700)
        with workers.take(int(np.prod(list(sizes.values())))) as ranks:
            for number, worker in enumerate(ranks):
                worker.start(rank, folder / "meeting", number, sizes, *arguments)
            found = results(ranks)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    return run


def assert_same(found: list[Found], expected: Found) -> None:
    for one in found:
        assert one.skipped == expected.skipped
        for step, wanted in zip(one.metrics, expected.metrics, strict=True):
            for name, value in wanted.items():
                if name != "num_input_tokens":  # packing differs with the shares
                    assert step[name] == pytest.approx(value, rel=2e-5, abs=1e-7), name
        for scores, wanted_scores in zip(one.scores, expected.scores, strict=True):
            for score, wanted_score in zip(scores, wanted_scores, strict=True):
                np.testing.assert_allclose(score, wanted_score, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(one.scores[0][0], expected.scores[0][0], rtol=TOLERANCE)
    for kind in ("gradients", "weights"):
        whole = {name: part for name, (_, _, part) in getattr(expected, kind).items()}
        assert difference(assembled([getattr(one, kind) for one in found]), whole) < TOLERANCE, kind


LAYOUTS = [
    {"fsdp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"fsdp": 2, "tp": 2}, {"pp": 2, "fsdp": 2}, {"fsdp": 2, "cp": 2},
    {"pp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"pp": 3},
]  # fmt: skip


@pytest.mark.parametrize("shape", [LLAMA, QWEN3, QWEN2], ids=lambda shape: shape["family"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "x".join(f"{axis}{size}" for axis, size in sizes.items()))
def test_layout_computes_what_one_process_computes(run, make_groups, sizes: dict, shape: dict) -> None:
    batches = [make_groups(), make_groups(seed=1)]
    assert_same(run(sizes, shape, batches), alone(shape, batches))
