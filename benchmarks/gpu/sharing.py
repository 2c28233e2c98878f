"""What two processes lose that share one card: products and copies, alone and at the same time.

python benchmarks/gpu/sharing.py [--device cuda:0] [--seconds 3]

Products stand for training and copies for decoding, which reads weights. With time slices the two shares add up to 1.
CUDA MPS lets kernels of both run at once. The second measurement starts an own MPS daemon, if the machine has one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from shapes import say

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from llamarl.run.placement import MPS_FOLDER, has_mps  # noqa: E402 - found by the line above

WORKS = ("products", "copies")
DAEMON = "nvidia-cuda-mps-control"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--work", choices=WORKS, help="what a process of the measurement does")
    options = parser.parse_args()
    if options.work:
        work(options)
        return
    say({"run": "sharing", "device": options.device, "mps": has_mps()}, lambda: measured(options))
    if not has_mps() and shutil.which(DAEMON) and options.device != "cpu":
        with daemon():
            say({"run": "sharing", "device": options.device, "mps": True}, lambda: measured(options))


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Rates of both works alone and together, and the sum of the shares that each has of its own rate."""
    alone = {name: rates(options, [name])[name] for name in WORKS}
    both = rates(options, WORKS)
    figures = {f"{name}_alone": alone[name] for name in WORKS} | {f"{name}_together": both[name] for name in WORKS}
    return figures | {"sum_of_shares": sum(both[name] / alone[name] for name in WORKS)}


def rates(options: argparse.Namespace, names: tuple[str, ...] | list[str]) -> dict[str, float]:
    """Repetitions per second of each work, which begin together."""
    command = [sys.executable, __file__, "--device", options.device, "--seconds", str(options.seconds), "--work"]
    started = {
        name: subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for name in names
    }
    try:
        for one in started.values():
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n", "a process has not begun"
        for one in started.values():
            assert one.stdin is not None
            one.stdin.close()
        return {name: json.loads(one.stdout.read()) for name, one in started.items() if one.stdout is not None}
    finally:
        for one in started.values():
            one.kill()
            one.wait()


def work(options: argparse.Namespace) -> None:
    """Works for a time, once standard input is closed. Prints repetitions per second."""
    is_gpu, device = options.device != "cpu", torch.device(options.device)
    side = 8192 if is_gpu else 256
    one = torch.randn(side, side, device=device, dtype=torch.bfloat16 if is_gpu else torch.float32)
    other = torch.empty_like(one)

    def repeat() -> None:
        if options.work == "products":
            torch.matmul(one, one, out=other)
        else:
            other.copy_(one)
        if is_gpu:
            torch.cuda.synchronize(device)

    repeat()
    print("ready", flush=True)
    sys.stdin.read()
    began_s, count = time.monotonic(), 0
    while time.monotonic() - began_s < options.seconds:
        repeat()
        count += 1
    print(json.dumps(count / (time.monotonic() - began_s)))


@contextmanager
def daemon() -> Iterator[None]:
    """An MPS daemon of this process, which its children use."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {MPS_FOLDER: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run([DAEMON, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([DAEMON], input="quit\n", text=True, check=False)
            del os.environ[MPS_FOLDER], os.environ["CUDA_MPS_LOG_DIRECTORY"]


if __name__ == "__main__":
    main()
