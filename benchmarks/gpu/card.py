"""What one card is asked in 15 minutes, in three calls of one command each; rows are written as they come.

    python benchmarks/gpu/card.py pack .gpu-card         # where a package index is: what each call carries
    python benchmarks/gpu/card.py 1 --carried .gpu-card/1    # on the machine with the GPU, then 2 and 3
    python benchmarks/gpu/card.py 1 --device cpu         # a rehearsal at toy size, anywhere

A call begins by keeping what it has brought in `--kept`, outside of the checkout, which the next call replaces.
Each part is a process with a time limit. A part that dies, or is late, costs its own rows. When time is short, parts
are left out in the order of their `dropped`. `benchmarks/gpu/collect.py` makes one result of the rows of all calls.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bars
import check
import real
from check import PARALLEL, PYTEST, ROOT, TESTS, Part, Said

TOY = "{toy}"
"""In a command: options of a rehearsal."""
TOY_SECONDS = "{toy_seconds}"
MOST_MIB = 60.0
"""Of what one call carries beside the checkout."""
WHEELS = {
    1: ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions>=4.16", "tomli-w",
        "math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "gguf", "tqdm"),
    2: ("trl", "datasets", "dill", "multiprocess"),
    3: ("torchmonarch", "pyzmq", "lark", "opentelemetry-api", "clusterscope", "flask", "blinker", "itsdangerous"),
}  # fmt: skip
"""Packages of each call, without their requirements: the machine has torch and what comes with it."""


@dataclass(frozen=True)
class Asked:
    """A part of a call."""

    part: Part
    dropped: int = 0
    """When time is short, those with the highest number are left out first; 0 never is."""


def _runs(name: str, limit_s: int, which: str, *more: str) -> Part:
    command = f"real.py --runs {which} --limit_s {limit_s - 10} --pieces {{kept}}/model --model {{model}}"
    return Part(name, limit_s, " ".join((command, *more, TOY)))


CALLS: dict[int, Sequence[Asked]] = {
    1: (
        Asked(Part("tests", 60, f"{PYTEST} {PARALLEL} {' '.join(TESTS)} tests/parts/cuda/test_sample.py "
                   "tests/parts/cuda/test_products.py")),
        Asked(Part("decode-8b-bfloat16", 40, "decode.py --model 8b --batches 64 256")),
        Asked(Part("decode-8b-fp8", 25, "decode.py --model 8b --dtype fp8 --batches 64")),
        Asked(Part("decode-8b-fp8-kv", 25, "decode.py --model 8b --dtype fp8 --kv_dtype fp8 --batches 64"), 2),
        Asked(Part("decode-8b-int8", 25, "decode.py --model 8b --dtype int8 --batches 64")),
        Asked(Part("sync-ipc", 20, "sync.py --model 3b --transports cuda_ipc")),
        Asked(Part("train-8b", 25, "train.py --model 8b")),
        Asked(Part("train-1b", 20, "train.py --model 1b --checkpointing none")),
        Asked(Part("decode-1b", 20, "decode.py --model 1b --batches 64"), 1),
        Asked(Part("profile-256", 15, "probes.py profile --model 8b --rows 256 --steps decode"), 3),
        Asked(Part("profile-fp8", 15, "probes.py profile --model 8b --dtype fp8 --steps decode"), 4),
        Asked(Part("profile-int8", 15, "probes.py profile --model 8b --dtype int8 --steps decode"), 5),
        Asked(Part("profile-1b", 15, "probes.py profile --model 1b --steps train"), 6),
        Asked(Part("mismatch", 25, "probes.py mismatch"), 7),
    ),
    2: (
        Asked(_runs("asynchronous", 170, "asynchronous")),
        Asked(_runs("synchronous", 60, "synchronous", "--steps 25"), 1),
        Asked(Part("trl", 80, "trl_on_card.py --limit_s 60 --model {model} " + TOY), 2),
    ),
    3: (
        Asked(_runs("processes", 80, "processes", "--steps 40"), 1),
        Asked(Part("sharing", 40, "sharing.py " + TOY_SECONDS), 3),
        Asked(Part("turns-1b", 60, "turns.py --model 1b --steps 8"), 2),
    ),
}  # fmt: skip


def kept_parts(asked: Sequence[Asked], left_s: float) -> list[Part]:
    """Returns the parts for which there is time, in their order."""
    found = list(asked)
    while sum(one.part.limit_s for one in found) > left_s and any(one.dropped for one in found):
        found.remove(max(found, key=lambda one: one.dropped))
    return [one.part for one in found]


def keep(carried: Path | None, kept: Path) -> list[str]:
    """Moves what a call has brought to its place, and unpacks wheels. Returns the names."""
    kept.mkdir(parents=True, exist_ok=True)
    brought = sorted(carried.iterdir()) if carried and carried.is_dir() else []
    for path in brought:
        if path.suffix == ".whl":
            options = ["--no-index", "--no-deps", "--upgrade", "--target", str(kept / "site")]
            subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, str(path)], check=True)
        elif path.suffix == ".xz":
            _restore(path, kept / "site")
        else:
            shutil.copytree(path, kept / path.name, dirs_exist_ok=True)
    return [path.name for path in brought]


def _restore(path: Path, site: Path) -> None:
    """Puts a compressed library in the place that its name says, as `monarch--_rust_bindings.so.xz`."""
    target = site.joinpath(*path.name.removesuffix(".xz").split("--"))
    target.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)


def pack(folder: Path, python: str) -> int:
    """Fills the folders `1` to `3` with what each call carries. Returns 1 if one is too large."""
    real.pack(folder / "model")
    for number, names in WHEELS.items():
        here = folder / str(number)
        here.mkdir(parents=True, exist_ok=True)
        platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "2014")]
        command = [
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--python-version",
            python, *platforms, "--dest", str(here), *names,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        for wheel in here.glob("torchmonarch*.whl"):
            _slim(wheel, here)
    for piece in sorted((folder / "model").iterdir()):  # in two calls: each has a bound
        shutil.move(piece, folder / str(1 + int(piece.name) % 2) / "model" / piece.name)
    (folder / "model").rmdir()
    sizes = [sum(path.stat().st_size for path in (folder / str(number)).rglob("*")) / 2**20 for number in WHEELS]
    for number, mib in zip(WHEELS, sizes, strict=True):
        print(f"{folder / str(number)}: {mib:.1f} MiB (at most {MOST_MIB:g})")
    return int(max(sizes) > MOST_MIB)


def _slim(wheel: Path, folder: Path) -> None:
    """Unpacks Monarch's wheel without programs and tests, and strips and compresses its libraries, which are most of
    it."""
    site = folder / "site"
    shutil.unpack_archive(wheel, site, "zip")
    wheel.unlink()
    for unused in (*site.glob("*.data"), *(site / name for name in ("tests", "examples", "benches"))):
        shutil.rmtree(unused, ignore_errors=True)
    for library in site.rglob("*.so"):
        subprocess.run(["strip", str(library)], check=False)
        name = "--".join(library.relative_to(site).parts)
        with library.open("rb") as source, lzma.open(folder / f"{name}.xz", "wb", preset=6) as file:
            shutil.copyfileobj(source, file)
        library.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=[*map(str, CALLS), "pack"])
    parser.add_argument("pack_to", nargs="?", type=Path, default=ROOT / ".gpu-card", metavar="FOLDER", help="of `pack`")
    parser.add_argument("--python", default="3.12", help="version of Python on the machine with the GPU, for `pack`")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--carried", type=Path, help="folder of what this call has brought")
    parser.add_argument("--kept", type=Path, default=Path("/tmp/llamarl-card"))
    parser.add_argument("--model", type=Path, default=real.MODEL, help="folder where calls 2 and 3 find or make theirs")
    parser.add_argument("--limit_s", type=float, default=540.0, help="seconds of this call at most")
    parser.add_argument("--parts", nargs="+", help="only these")
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT") or ROOT / "runs/gpu-card"))
    options = parser.parse_args()
    if options.call == "pack":
        return pack(options.pack_to, options.python)
    start_s = time.monotonic()
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # past every `finally`, which ends the part
    brought = keep(options.carried, options.kept)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(options.kept / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    options.output.mkdir(parents=True, exist_ok=True)
    said = Said(options.output)
    said.row({"machine": check.described(options.device), "command": sys.argv, "brought": brought})
    asked = [one for one in CALLS[int(options.call)] if options.parts is None or one.part.name in options.parts]
    return call(asked, options, said, options.limit_s - (time.monotonic() - start_s))


def call(asked: Sequence[Asked], options: argparse.Namespace, said: Said, left_s: float) -> int:
    """Runs the parts. Returns 1 if one of them failed."""
    toy = "--steps 2 --prompts 2 --eval 4" if options.device == "cpu" else ""
    seconds = "--seconds 0.5" if options.device == "cpu" else ""

    def told(command: str) -> str:
        return command.replace(TOY, toy).replace(TOY_SECONDS, seconds)

    asked = [replace(one, part=replace(one.part, command=told(one.part.command))) for one in asked]
    parts, deadline_s = kept_parts(asked, left_s), time.monotonic() + left_s
    for name in (one.part.name for one in asked if one.part not in parts):
        said.row({"part": name, "ended": "left out: time is short"})
    for number, part in enumerate(parts):
        later_s = sum(later.limit_s for later in parts[number + 1 :])
        limit_s = max(deadline_s - time.monotonic() - later_s, 1.0)
        print(f"{part.name}: {check.run(part, options, limit_s, said)}", flush=True)
    print("\n".join(bars.table(said.rows)))
    print(said.path)
    ends = [str(row["ended"]) for row in said.rows if "ended" in row]
    return int(any("failure" in row for row in said.rows) or not all(end.startswith(("done", "left")) for end in ends))


if __name__ == "__main__":
    sys.exit(main())
