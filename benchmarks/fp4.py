"""What NVFP4 weights cost in log-probabilities: the product of a card that has it, emulated on a CPU.

    python benchmarks/fp4.py runs/base/smollm2 [--sequences 24] [--output benchmarks/results]

NVFP4 (e2m1 values, a float8 e4m3 scale for 16 of them, a float32 scale for a matrix) for the weights of all
projections, with bfloat16 activations or with NVFP4 ones, against bfloat16 weights. int8 and float8 rows, which
generators serve, are measured alike. Text is the task's own: prompts of SVAMP with their answers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from _record import RESULTS, write_result
from tokenizers import Tokenizer
from torch import Tensor

from llamarl.models.attention import causal_attend
from llamarl.models.hf import load_model
from llamarl.models.transformer import Projection, Transformer

ROOT = Path(__file__).parents[1]
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Magnitudes of e2m1."""
MOST, BLOCK = 6.0, 16
BAR_NATS = 0.02
"""Largest mean difference of log-probs between trainer and generator that training at RL's precision takes
(`benchmarks/gpu/bars.py`)."""


def nvfp4(x: Tensor) -> Tensor:
    """Rounds rows as NVFP4 stores them."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    whole = blocks.abs().amax() / (MOST * 448.0)
    scales = (blocks.abs().amax(-1, keepdim=True) / MOST / whole.clamp_min(1e-30)).to(
        torch.float8_e4m3fn
    ).float() * whole
    unit = blocks / scales.clamp_min(1e-30)
    nearest = torch.bucketize(unit.abs(), (LEVELS[1:] + LEVELS[:-1]) / 2)
    return (LEVELS[nearest] * unit.sign() * scales).flatten(-2).to(x.dtype)


def rows_of(dtype: torch.dtype, most: float) -> Callable[[Tensor], Tensor]:
    """Rounds rows with one scale each, as llamarl's 8-bit products do."""

    def rounded(x: Tensor) -> Tensor:
        scales = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / most
        unit = x.float() / scales
        return ((unit.round() if dtype == torch.int8 else unit.to(dtype).float()) * scales).to(x.dtype)

    return rounded


INT8, FP8 = rows_of(torch.int8, 127.0), rows_of(torch.float8_e4m3fn, 448.0)
KINDS: dict[str, tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]] = {
    "int8": (INT8, INT8), "fp8": (FP8, FP8), "nvfp4 weights": (nvfp4, None), "nvfp4": (nvfp4, nvfp4),
}  # fmt: skip
"""How weights and activations are rounded."""


def texts(folder: str, count: int) -> list[np.ndarray]:
    tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
    kinds = ("sums", "differences", "products", "quotients")
    paths = [ROOT / f"examples/real/svamp_{kind}.jsonl" for kind in kinds]
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [np.array(tokenizer.encode(f"{row['question']} {row['answer']}").ids, np.int64) for row in rows[:count]]


@torch.inference_mode()
def logprobs(model: Transformer, sequences: list[np.ndarray]) -> Tensor:
    """Returns log-softmax of all tokens at all places, [N, V]."""
    found = list[Tensor]()
    for ids in sequences:
        tokens = torch.from_numpy(ids)
        hidden = model(tokens[:-1], torch.arange(len(ids) - 1), causal_attend([len(ids) - 1]))
        found.append(model.logits(hidden).float().log_softmax(-1))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, sequences = load_model(options.model, torch.float32, "cpu"), texts(options.model, options.sequences)
    targets = torch.cat([torch.from_numpy(ids[1:]) for ids in sequences])[:, None]
    layers = [module for module in model.model.layers.modules() if isinstance(module, Projection)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(layer.weight.bfloat16().float())
    kept = [layer.weight.detach().clone() for layer in layers]
    exact, rows = logprobs(model, sequences), list[dict[str, float | str]]()
    for name, (of_weights, of_inputs) in KINDS.items():
        with torch.no_grad():
            for layer, weight in zip(layers, kept, strict=True):
                layer.weight.copy_(of_weights(weight) if of_weights else weight)
                layer.multiply = lambda x, w, b, of=of_inputs: F.linear(x if of is None else of(x), w, b)
        apart = logprobs(model, sequences)
        of_targets = (apart.gather(1, targets) - exact.gather(1, targets)).abs()
        kl = (exact.exp() * (exact - apart)).sum(1).mean()
        rows.append({"kind": name, "mean": float(of_targets.mean()), "max": float(of_targets.max()), "kl": float(kl)})
        print(json.dumps(rows[-1]), flush=True)
    figures = {"bar_nats": BAR_NATS, "tokens": len(targets), "rows": rows}
    settings = {"model": Path(options.model).name, "sequences": options.sequences}
    print(write_result("fp4", settings, figures, [], options.output))


if __name__ == "__main__":
    main()
