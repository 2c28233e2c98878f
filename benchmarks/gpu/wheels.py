"""A folder of what `check.py` takes along to a machine without a network: wheels, stripped, and the demo's base model.

    python benchmarks/gpu/wheels.py .gpu-wheels [--python 3.12] [--cuda 13] [--present torch numpy ...]
    make gpu-check WHEELS=.gpu-wheels                                  # there

Together with the checkout it is to be below 40 MiB. NIXL leaves its kernels for mixtures of experts at home, and
plugins for storage; what UCX needs between GPUs stays.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS = (
    "nixl-cu{cuda}", "math-verify", "latex2sympy2-extended", "antlr4-python3-runtime", "pydantic", "pydantic-core",
    "annotated-types", "typing-inspection", "typing-extensions>=4.16", "tomli-w", "gguf", "tqdm",
)  # fmt: skip
STRIPPED = (
    "nixl_ep_cu", "libucx_perftest", "plugin_GPUNETIO", "plugin_INFINIA", "plugin_GUSLI", "plugin_OBJ",
    "plugin_LIBFABRIC", "plugin_AZURE_BLOB", "plugin_GDS", "plugin_HF3FS", "plugin_POSIX", ".scripts/",
)  # fmt: skip
"""Parts of the names of files that nobody here opens."""
BOUND_MIB = 40.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--cuda", default="13", help="major version of its torch")
    parser.add_argument("--present", nargs="*", default=(), help="packages that it has")
    options = parser.parse_args()
    names = [one.format(cuda=options.cuda) for one in WHEELS]
    wanted = [one for one in names if one.partition(">=")[0] not in options.present]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)] + ["manylinux2014_x86_64"]
    subprocess.run(
        [
            sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps",
            "--only-binary=:all:", "--python-version", options.python, "--implementation", "cp",
            *(f"--platform={platform}" for platform in platforms), "--dest", str(options.folder), *wanted,
        ],
        check=True,
    )  # fmt: skip
    for wheel in options.folder.glob("nixl*.whl"):
        strip(wheel, STRIPPED)
    base = options.folder / "base"
    if not base.exists():
        config = str(ROOT / "configs/demo_sft.toml")
        subprocess.run([sys.executable, "-m", "llamarl", "sft", config, "--output", str(base)], cwd=ROOT, check=True)
    mib = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file()) / 2**20
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    mib += sum((ROOT / name).stat().st_size for name in filter(None, tracked.split("\0"))) / 2**20
    print(f"{options.folder} and the checkout: {mib:.1f} MiB (at most {BOUND_MIB:g})")
    return int(mib > BOUND_MIB)


def strip(wheel: Path, patterns: Iterable[str]) -> None:
    """Leaves files out whose names hold one of these, from the wheel's record too."""
    kept = wheel.with_suffix(".kept")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as target:
        for info in source.infolist():
            if any(pattern in info.filename for pattern in patterns):
                continue
            content = source.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not any(one in line for one in patterns)).encode()
            target.writestr(info, content, zipfile.ZIP_DEFLATED)
    kept.replace(wheel)


if __name__ == "__main__":
    sys.exit(main())
