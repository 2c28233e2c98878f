"""One card: what a trainer and a generator take of it in turns, counted, and what light weights and moments learn.

    python benchmarks/memory.py [--only sizes|learning] [--seeds 0 1 2] [--steps 60] [--add-to FILE]

Sizes: the recipes for one card of 140 GB and of 24 GB on a pretended GPU (`tests/gpu`), whose tensors have the
published shapes and no values: memory is counted at the peak of a step, and while the generator has its cache.
Learning: the demo for so many steps with each setting, judged on fresh problems, seed by seed in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _record import write_result

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from llamarl.config import RunConfig, load_config  # noqa: E402
from llamarl.models import memory  # noqa: E402
from llamarl.models.shape import ModelShape  # noqa: E402
from tests.gpu import guard  # noqa: E402

CONTEXT_GB = 1.5
"""What processes take of a card before their first tensor, and libraries beside torch."""
CARDS = {"8b_140gb": ("card140_8b", 16_384, 128), "1_7b_24gb": ("card24_1.7b", 4096, 32)}
"""Key -> recipe, tokens of a microbatch, rows of 1,024 tokens in the cache."""
FRESH = "{name = 'running_total', count = 2048, first = 91000}"
HALF = ["--trainer.dtype", "bfloat16", "--trainer.weights", "bfloat16"]
SETTINGS = {
    "float32": [],
    "8bit": ["--trainer.moments", "8bit"],
    "bfloat16": HALF,
    "bfloat16 8bit": [*HALF, "--trainer.moments", "8bit"],
    "float32 2e-5": ["--trainer.learning_rate", "2e-5"],
    "bfloat16 2e-5": [*HALF, "--trainer.learning_rate", "2e-5"],
    "bfloat16 8bit 2e-5": [*HALF, "--trainer.moments", "8bit", "--trainer.learning_rate", "2e-5"],
}


def _counted(shape: ModelShape, config: RunConfig) -> Any:
    """In a process with a pretended GPU, which must be there before torch."""
    from tests.gpu.memories import in_turns

    return in_turns(shape, config)


def sizes() -> dict[str, Any]:
    """Peaks in GB by recipe and moment, and the largest error of the sum that starts are refused by."""
    published = json.loads((ROOT / "tests/models/published.json").read_text())["loads"]
    shapes = {one["name"]: one["config"] for one in published}
    figures, errors = dict[str, Any](), list[float]()
    for key, (recipe, tokens, rows) in CARDS.items():
        config = load_config(str(ROOT / f"configs/{recipe}.toml"))
        shape = ModelShape.from_hf(shapes[config.model.path])
        cache = int(rows * 1024 * memory.kv_token_bytes(shape, 1, 2))
        generator = config.generator.model_copy(update={"kv_cache_bytes": cache, "max_running": rows})
        trainer = config.trainer.model_copy(update={"microbatch_tokens": tokens})
        config = config.model_copy(update={"generator": generator, "trainer": trainer})
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=guard.begin) as pool:
            found = pool.submit(_counted, shape, config).result()
        summed = [sum(found.of_training.values()), sum(found.of_generating.values())]
        errors += [abs(one / there - 1) for one, there in zip(summed, (found.training, found.generating), strict=True)]
        awake = summed[0] + found.of_generating["keys and values"] + 2 * float(memory.served_bytes(shape, 2))
        figures |= {
            f"{key}_training_gb": found.training / 1e9 + CONTEXT_GB,
            f"{key}_generating_gb": found.generating / 1e9 + CONTEXT_GB,
            f"{key}_peak_gb": max(found.training, found.generating) / 1e9 + CONTEXT_GB,
            f"{key}_all_awake_gb": awake / 1e9 + CONTEXT_GB,
            f"{key}_parts_gb": {kind: size / 1e9 for kind, size in found.of_training.items()},
        }
    return figures | {"sum_error": max(errors)}


def learnt(name: str, seed: int, steps: int, output: Path) -> dict[str, Any]:
    """One run's accuracy on fresh problems."""
    run = f"{name.replace(' ', '-')}-{seed}"
    command = [
        sys.executable, "-m", "llamarl", "train", str(ROOT / "configs/demo.toml"), "--name", run, "--output",
        str(output), "--seed", str(seed), "--steps", str(steps), "--data.eval", FRESH, "--eval.max_prompts", "2048",
        "--eval.every_steps", "0", "--screen.kind", "lines", "--checkpoint.every_steps", "0", *SETTINGS[name],
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=1800)
    summary = json.loads((output / run / "summary.json").read_text())
    return {"setting": name, "seed": seed, **{key: summary[key] for key in ("accuracy_before", "accuracy_after")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["sizes", "learning"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--add-to", type=Path, metavar="FILE", help="a result whose other figures are kept")
    options = parser.parse_args()
    figures = dict[str, Any]()
    if options.add_to:
        kept = json.loads(options.add_to.read_text(encoding="utf-8"))
        figures |= {
            key: kept[key] for key in kept if key.endswith("_gb") or key in ("sum_error", "accuracy_after", "rows")
        }
    if options.only != "learning":
        figures |= sizes()
    if options.only != "sizes":
        rows = list[dict[str, Any]]()
        with tempfile.TemporaryDirectory() as folder:
            for seed in options.seeds:
                for name in SETTINGS:
                    rows.append(learnt(name, seed, options.steps, Path(folder)))
                    print(json.dumps(rows[-1]), flush=True)
        of = {name: [row["accuracy_after"] for row in rows if row["setting"] == name] for name in SETTINGS}
        figures |= {"accuracy_after": {name: statistics.mean(found) for name, found in of.items()}, "rows": rows}
    notes = [
        "peak_gb: the fuller of both moments, with 1.5 GB of context; all_awake_gb: by the sum, if nobody slept.",
        "sum_error: largest relative difference of the sum of models/memory.py from what was counted.",
        "accuracy_after: greedy, on 2,048 problems that were not trained on, mean over seeds; 8bit: of moments.",
    ]
    settings = {name: value for name, value in vars(options).items() if name != "add_to"} | {"settings": SETTINGS}
    print(json.dumps({key: value for key, value in figures.items() if key != "rows"}, indent=2))
    print(write_result("memory", settings, figures, notes))


if __name__ == "__main__":
    main()
