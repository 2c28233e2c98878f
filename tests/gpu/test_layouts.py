"""Layouts of up to 1,024 ranks, a few ranks of each: what they hold, and what planning for them takes.

Not covered: what goes over the wire; the process groups here move nothing.
"""

from __future__ import annotations

import math

import pytest

from tests.gpu import layouts
from tests.gpu.conftest import Run
from tests.nightly import nightly

LAYOUTS = {
    "8B": {"fsdp": 8, "cp": 2, "tp": 4},
    "70B": {"pp": 4, "fsdp": 8, "tp": 8},
    "405B": {"pp": 8, "fsdp": 16, "tp": 8},
}


@nightly("allocates large models on the meta device; models/test_memory.py checks the memory sums")
@pytest.mark.parametrize(("model", "num_ranks"), [("8B", 64), ("70B", 256), ("405B", 1024)])
def test_ranks_hold_what_is_planned(elsewhere: Run, model: str, num_ranks: int) -> None:
    """A few ranks: the first, one in the middle, and the last."""
    assert elsewhere(layouts.misplaced, model, LAYOUTS[model], (0, num_ranks // 2 - 3, num_ranks - 1)) == []


@nightly("allocates large models on the meta device; models/test_memory.py checks the memory sums")
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"fsdp": 8, "ep": 2}, {"fsdp": 4, "ep": 4}, {"pp": 2, "fsdp": 4, "cp": 2, "tp": 2, "ep": 4}],
    ids=str,
)  # fmt: skip
def test_ranks_of_a_mixture_do_too(elsewhere: Run, sizes: dict[str, int]) -> None:
    num_ranks = math.prod(size for axis, size in sizes.items() if axis != "ep")
    assert elsewhere(layouts.misplaced, "experts", sizes, range(num_ranks)) == []


@nightly("allocates large models on the meta device; models/test_memory.py checks the memory sums")
def test_a_plan_for_another_mesh_is_seen(elsewhere: Run) -> None:
    found = elsewhere(layouts.misplaced, "8B", {"fsdp": 16, "tp": 4}, (5,), {"fsdp": 8, "tp": 8})
    assert any("q_proj" in one for one in found) and any("norm" in one for one in found)


@nightly("allocates large models on the meta device; models/test_memory.py checks the memory sums")
def test_planning_for_1024_ranks_is_no_obstacle(elsewhere: Run) -> None:
    found = elsewhere(layouts.planning, "405B", LAYOUTS["405B"], 8)
    assert found["index_s"] < 10 and found["plan_s"] < 10 and found["peak_bytes"] < 2 << 30, found
    assert found["index_parts"] > 100_000 and found["moves_of_some"] > 1000


@nightly("large models without memory; by day training/test_layouts.py gathers layer by layer")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_layers_are_not_whole_between_forward_and_backward(elsewhere: Run, recompute: bool) -> None:
    """FSDP2 frees what it gathers; of float32 weights autocast makes copies, of every layer, which stay."""
    found, copied = (elsewhere(layouts.held, "bfloat16", recompute, mixed) for mixed in (True, False))
    assert max(found["after_forward"], found["before_backward"]) <= found["layer"] < found["layers"] / 4
    assert copied["after_forward"] >= copied["layers"], "the mutant"


@nightly("allocates large models on the meta device; models/test_memory.py checks the memory sums")
@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 2, "cp": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_all_ranks_issue_collectives_in_one_order(elsewhere: Run, sizes: dict[str, int]) -> None:
    """Of several groups, as of FSDP, of context ranks and of the norm of gradients. NCCL starts them in that order."""
    first, *others = [elsewhere(layouts.issued, sizes, rank) for rank in range(4)]
    assert len(set(first)) > 2 and len(first) > 10
    assert all(other == first for other in others)


@nightly("allocates large models on the meta device; models/test_memory.py checks the memory sums")
def test_what_a_layer_moves_and_launches_under_fsdp(elsewhere: Run) -> None:
    """Weights in two bytes, gathered for forward and for backward, and gradients in four, once. The additional launches
    copy in and out of what is sent, and views of it."""
    alone, shared = (elsewhere(layouts.traffic, sizes, False) for sizes in ({"fsdp": 1}, {"fsdp": 8}))
    assert alone["gathered"] == alone["reduced"] == 0
    assert shared["gathered"] == pytest.approx(2 * 2 * shared["parameters"], rel=0.01)
    assert shared["reduced"] == pytest.approx(4 * shared["parameters"], rel=0.01)
    assert max(alone["launches"], shared["launches"]) < 180
