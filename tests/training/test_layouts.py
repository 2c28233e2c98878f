"""Any layout of a trainer computes what one process computes: losses, log-probs, gradients, weights.

Not covered: GPUs and NCCL, several hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from llamarl.algorithms.losses.gspo import Gspo
from tests.distributed.ranks import Workers, results
from tests.training.layouts import LLAMA, QWEN2, QWEN3, Found, alone, assembled, difference, distance, rank

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


def assert_same(found: list[Found], expected: Found, tolerance: float) -> None:
    for one in found:
        assert one.skipped == expected.skipped
        for step, wanted in zip(one.metrics, expected.metrics, strict=True):
            for name, value in wanted.items():
                if name != "num_input_tokens":  # packing differs with the shares
                    assert step[name] == pytest.approx(value, rel=2 * tolerance, abs=tolerance / 100), name
        for before, after in zip(one.scores, expected.scores, strict=True):
            np.testing.assert_allclose(np.concatenate(before), np.concatenate(after), rtol=10 * tolerance)
    gradients, weights = (
        [
            {name: part for name, (_, _, part) in getattr(expected, kind).items()},
            assembled([getattr(o, kind) for o in found]),
        ]
        for kind in ("gradients", "weights")
    )
    assert difference(*gradients) < tolerance
    assert distance(*weights) < tolerance


LAYOUTS = [
    {"fsdp": 2}, {"tp": 2}, {"cp": 2}, {"pp": 2}, {"fsdp": 2, "tp": 2}, {"pp": 2, "fsdp": 2}, {"fsdp": 2, "cp": 2},
    {"pp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"pp": 3},
]  # fmt: skip


@pytest.mark.parametrize("shape", [LLAMA, QWEN3, QWEN2], ids=lambda shape: shape["family"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "x".join(f"{axis}{size}" for axis, size in sizes.items()))
def test_layout_computes_what_one_process_computes(run, make_groups, sizes: dict, shape: dict) -> None:
    batches = [make_groups(), make_groups(seed=1)]
    tolerance = TOLERANCE if shape["dtype"] == torch.float32 else 1e-11
    assert_same(run(sizes, shape, batches), alone(shape, batches), tolerance)
