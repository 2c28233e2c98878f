"""Generators, trainer, critic, reference and reward model on one pretended GPU: they learn what they learn on the CPU.

Not covered: speed, memory, several GPUs, and kernels that a CPU build of torch does not have.
"""

from __future__ import annotations

import pytest

from tests.gpu import runs
from tests.gpu.conftest import Run
from tests.nightly import nightly

SAME = ("reward_mean", "loss", "grad_norm", "extra.value_loss", "extra.critic_grad_norm", "extra.kl_to_reference")


@nightly("starts a whole run; test_memory.py counts the memory of a generator on a pretended GPU")
def test_a_run_says_what_it_says_on_the_cpu(on_gpu: Run) -> None:
    (expected, nothing), (found, asked) = (on_gpu(runs.run, device) for device in ("cpu", "cuda"))
    for one, other in zip(expected, found, strict=True):
        assert {name: other[name] for name in SAME} == pytest.approx(
            {name: one[name] for name in SAME}, rel=1e-4, abs=1e-5
        )
    assert nothing.kernels == 0 < asked.kernels
    waits = {place for place in asked.syncs if place.startswith(("algorithms/", "models/attention", "training/critic"))}
    assert waits == {"training/critic.py:_infer: a copy to the host"}
    saves = [num for place, num in asked.syncs.items() if place.startswith("checkpoint/store.py")]
    assert sum(saves) == 2 < asked.downloads["checkpoint/store.py:__call__"] / 10, "trainer's and critic's, once each"
