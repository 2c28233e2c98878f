"""How long a checkpoint keeps the trainer from its next step, and how long it takes in all.

    python benchmarks/checkpoint.py [--mib 512] [--rounds 7] [--folder .]

One rank saves float32 weights and two moments of each. Every round saves twice on the same disk: as the trainer does,
copy first and write beside the next step, and as it was before, safetensors' own writer and a second pass for digests,
during which the trainer stands still. A round's share is the time in `save` and `commit` over the time until the
checkpoint counts. Nothing computes beside the writing here, so it shows what the trainer waits, not what it loses.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from _record import write_result
from safetensors.torch import save_file

from llamarl.checkpoint.folder import describe
from llamarl.checkpoint.store import CheckpointStore
from llamarl.observability.files import sync
from llamarl.weight_sync.layout import TensorSpec

SIDE = 1024
NOTES = [
    "The first save also takes new memory for the copies, page by page; later ones use it again.",
    "`GB/s` counts all bytes of the checkpoint: copy, digest, write, fsync, manifest, rename, removal of the oldest.",
]


def timed_save(
    store: CheckpointStore, step: int, shards: dict[str, tuple[TensorSpec, torch.Tensor]]
) -> tuple[float, float]:
    """Seconds in which the trainer stands still, and until the checkpoint counts."""
    marks = [time.perf_counter()]
    written = store.save(step, shards, {})
    marks.append(time.perf_counter())
    written.result()
    marks.append(time.perf_counter())
    committed = store.commit()
    marks.append(time.perf_counter())
    assert committed is not None
    committed.result()
    return marks[1] - marks[0] + marks[3] - marks[2], time.perf_counter() - marks[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="of weights and moments")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"layers.{n}{moment}" for n in range(options.mib // 12) for moment in ("", ":exp_avg", ":exp_avg_sq")]
    tensors = {name: torch.randn(SIDE, SIDE) for name in names}
    shards = {name: (TensorSpec.whole(name, x.shape, "float32"), x) for name, x in tensors.items()}
    blocked, total, before = list[float](), list[float](), list[float]()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        store = CheckpointStore(Path(folder, "checkpoints"), keep=1)
        for step in range(options.rounds):
            for found, seconds in zip((blocked, total), timed_save(store, step, shards), strict=True):
                found.append(seconds)
            start_s, path = time.perf_counter(), Path(folder, "whole.safetensors")
            save_file(tensors, path)
            describe(path)
            sync(path)
            before.append(time.perf_counter() - start_s)
            path.unlink()
        start_s = time.perf_counter()
        checkpoint, _ = store.load_newest()
        verified_s = time.perf_counter()
        assert checkpoint is not None
        assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in tensors.items())
        read_s = time.perf_counter() - verified_s
    gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
    shares = [part / whole for part, whole in zip(blocked, total, strict=True)]
    figures = {
        "bytes": gigabytes * 1e9,
        "load_average": os.getloadavg()[0],
        "blocked_s": statistics.median(blocked[1:]),
        "total_s": statistics.median(total[1:]),
        "blocked_share": statistics.median(shares[1:]),
        "blocked_share_of_the_first": shares[0],
        "blocked_shares": shares,
        "before_blocked_s": statistics.median(before[1:]),
        "save_gb_per_s": gigabytes / statistics.median(total[1:]),
        "verify_gb_per_s": gigabytes / (verified_s - start_s),
        "read_and_compare_s": read_s,
    }
    print({name: round(value, 3) for name, value in figures.items() if isinstance(value, float)})
    print(write_result("checkpoint", vars(options) | {"folder": str(options.folder)}, figures, NOTES))


if __name__ == "__main__":
    main()
