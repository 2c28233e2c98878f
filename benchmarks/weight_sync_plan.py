"""Plans and estimates of weight sync at cluster scale: how long planning takes, and what a transfer would.

    python benchmarks/weight_sync_plan.py

writes `benchmarks/results/weight_sync_plan-DATE.json`. Nothing is transferred: times follow from bytes and link speeds.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from _record import write_result

from llamarl.parts.forecast.constants import Constants
from llamarl.parts.forecast.hardware import GPUS
from llamarl.parts.forecast.layouts import generator_layout, trainer_layout
from llamarl.parts.forecast.shapes import MODELS
from llamarl.parts.forecast.transfer_time import LinkSpeeds, estimate, fastest
from llamarl.sharding.parallel_layout import ShardLayout
from llamarl.sharding.reshard import ReshardPlan, plan_reshard

H100 = GPUS["h100-80g"]
LINKS = LinkSpeeds(network=H100.network_bandwidth, host=H100.node_bandwidth)
REACHED = Constants().link_efficiency
CHANGED = {"bfloat16": 0.028, "float8_e4m3fn": 0.0025}
TP = 8
SCALES = {"llama3-8b": (16, 128), "llama3-70b": (16, 128), "llama3-405b": (64, 512)}
"""FSDP shards of a trainer with tensor parallel 8, and GPUs of all generators."""
VARIANTS = {
    "bf16, TP 8": ("bfloat16", 8, False),
    "fp8, TP 8": ("float8_e4m3fn", 8, False),
    "fp8, TP 16": ("float8_e4m3fn", 16, False),
    "fp8, TP 32": ("float8_e4m3fn", 32, False),
    "bf16, TP 8, delta": ("bfloat16", 8, True),
    "fp8, TP 8, delta": ("float8_e4m3fn", 8, True),
}
LAYOUTS = {
    "512 trainers, 64 replicas of TP 8": (64, 8, 64),
    "128 trainers, 64 replicas of TP 8": (16, 8, 64),
    "512 trainers of TP 8, 128 replicas of TP 4, fp8 needs full precision for columns": (64, 4, 128),
}
"""FSDP shards, generator tensor parallel, replicas; of 405B."""
PAPER_S = {"llama3-8b": 0.04, "llama3-70b": 1.15, "llama3-405b": 2.31}
PUBLISHED_1T = {"seconds": 1.3, "parameters": 1e12, "trainer_gpus": 256, "generator_gpus": 128, "bytes_per_weight": 1}
NOTES = """\
Estimates, not measurements: each GPU has one adapter of 50 GB/s each way (ConnectX-7, 400 Gb/s) and 450 GB/s each way
to the other 7 of its host (NVLink 4); all links run at once and at full speed (`seconds`) or at the share that the
planner assumes of software (`seconds_reached`); a transfer takes as long as its busiest link. Left out: time per
message, casting and quantizing, congestion in the fabric, other traffic of trainers and generators, verification.
Trainers and generators have hosts of their own. Relays (`p2p`, through host memory) overlap with what they relay. No
transport carries full precision for a receiver to quantize: `weight_sync` refuses such a pair of layouts.
Llama 3.1 shapes with norms. fp8: projections with a float32 scale per row of each rank's part; embedding, head and
norms stay bfloat16. Trainers publish bfloat16 where no 8-bit values travel.
Delta: the changed shares per step are those that a simulation at learning rate 1e-6 gave, 2.8 % of bfloat16 values and
0.25 % of fp8 codes, equal on every link; 2 bytes of place and the value for each change, 4 bytes per 65,536 values. Row
scales are taken to stay: counted with the codes of their rows, so almost not at all.
The paper's (LlamaRL, arXiv 2505.24034) 0.04 s is for 7B, set beside 8B here; its links and layouts are not known here.
1.3 s is what Perplexity published for Kimi-K2 (1T parameters, 256 GPUs in bf16 to 128 in fp8, RDMA writes); `wire_s`
assumes that each of the 128 GPUs holds 1/128 of the weights and has one 50 GB/s adapter: a bound, not a plan.
"""


def main() -> None:
    """Plans, estimates, and writes the file."""
    planning = {"405B, 512 to 512 ranks": _planning(lambda: _layouts("llama3-405b", 64, TP, 64, "bfloat16"))}
    planning["405B, 8,192 to 8,192 ranks"] = _planning(lambda: _layouts("llama3-405b", 1024, TP, 1024, "bfloat16"))
    transfers = [_row(model, name) for model in SCALES for name in VARIANTS]
    of_405b = {row["variant"]: row["seconds"] for row in transfers if row["model"] == "llama3-405b"}
    moved = PUBLISHED_1T["parameters"] * PUBLISHED_1T["bytes_per_weight"] / PUBLISHED_1T["generator_gpus"]
    path = write_result(
        "weight_sync_plan",
        {
            "links": asdict(LINKS),
            "reached_share": REACHED,
            "changed_share": CHANGED,
            "devices_per_host": H100.node_gpus,
            "trainer_tp": TP,
        },
        {
            "planning": planning,
            "transfers": transfers,
            "first_under_1_s": next(name for name, seconds in of_405b.items() if seconds < 1),
            "first_under_0.1_s": next(name for name, seconds in of_405b.items() if seconds < 0.1),
            "layouts_405b": {name: _compare(*layout) for name, layout in LAYOUTS.items()},
            "published_1t": PUBLISHED_1T
            | {
                "bytes_per_gpu_and_s": moved / PUBLISHED_1T["seconds"],
                "wire_s": moved / LINKS.network,
                "times_wire": PUBLISHED_1T["seconds"] * LINKS.network / moved,
            },
        },
        NOTES.splitlines(),
    )
    print(path.read_text(encoding="utf-8"))


def _layouts(name: str, fsdp: int, tp: int, replicas: int, dtype: str) -> tuple[ShardLayout, ShardLayout]:
    model = MODELS[name]
    shapes = model.weights()
    source = trainer_layout(shapes, fsdp=fsdp, tp=TP, dtype="bfloat16")
    destination = generator_layout(
        shapes,
        num_kv_heads=model.num_kv_heads,
        tp=tp,
        replicas=replicas,
        dtype=dtype,
        first_device=source.num_ranks,
    )
    return source, destination


def _planning(layouts: Callable[[], tuple[ShardLayout, ShardLayout]]) -> dict[str, Any]:
    """Time of layouts and plan, of one rank's list of copies, and the most memory that the process has had."""
    start_s, cpu_s = time.perf_counter(), time.thread_time()
    plan = plan_reshard(*layouts())
    wall_s, cpu_s = time.perf_counter() - start_s, time.thread_time() - cpu_s
    start_s = time.perf_counter()
    moves = plan.moves_to(0)
    return {
        "wall_s": wall_s,
        "processor_s": cpu_s,
        "moves_of_one_rank_s": time.perf_counter() - start_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "pieces_stored": sum(len(group.senders_M) for group in plan.groups),
        "moves_of_one_rank": len(moves),
        "senders_of_one_rank": len({move.sender for move in moves}),
    }


def _row(model: str, variant: str) -> dict[str, Any]:
    dtype, tp, is_delta = VARIANTS[variant]
    fsdp, gpus = SCALES[model]
    plan, transfer, reason = fastest(*_layouts(model, fsdp, tp, gpus // tp, dtype), LINKS)
    found = estimate(plan, LINKS, CHANGED) if is_delta else transfer
    return {
        "model": model,
        "variant": variant,
        "trainers": f"FSDP {fsdp} x TP {TP}",
        "generators": f"{gpus // tp} replicas of TP {tp}",
        "why": reason,
        **asdict(found),
        "seconds_reached": found.seconds / REACHED,
        "paper_s": PAPER_S[model],
        "paper_over_reached": PAPER_S[model] * REACHED / found.seconds,
        "parameters_by_type_on_the_wire": _types(plan),
    }


def _compare(fsdp: int, tp: int, replicas: int) -> dict[str, Any]:
    """Direct and relayed, bf16 and fp8."""
    found: dict[str, Any] = {}
    for dtype in ("bfloat16", "float8_e4m3fn"):
        layouts = _layouts("llama3-405b", fsdp, tp, replicas, dtype)
        for route, is_relayed in (("direct", False), ("relayed", True)):
            plan = plan_reshard(*layouts)
            found[f"{dtype}, {route}"] = asdict(estimate(plan, LINKS, is_relayed=is_relayed)) | {"types": _types(plan)}
        found[f"{dtype}, chosen"] = fastest(*layouts, LINKS)[2]
    return found


def _types(plan: ReshardPlan) -> dict[str, int]:
    """Parameters by type on the wire."""
    travels = Counter[str]()
    for group in plan.groups:
        travels[group.dtype] += len(group.names)
    return dict(travels)


if __name__ == "__main__":
    main()
