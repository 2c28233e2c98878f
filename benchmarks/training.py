"""What training costs: packed against padded groups, the memory of log-probabilities, and the share of the peak.

    python benchmarks/training.py [--repeats 5]

On a CPU, seconds are processor time of one thread, and variants take turns, so that what else runs here hits all of
them. Peaks of memory are those of a process of its own for each variant, counted from before the call.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
import torch.nn.functional as F
from _record import write_result
from torch import Tensor

from llamarl.algorithms.advantages.group_mean import GroupMean
from llamarl.algorithms.losses._base import LossInputs
from llamarl.algorithms.losses.aipo import Aipo
from llamarl.config import load_sft_config
from llamarl.config.schema import TrainerConfig
from llamarl.data.sources.running_total import RunningTotal
from llamarl.models.hf import new_model
from llamarl.models.lora import add_adapters
from llamarl.models.shape import ModelShape
from llamarl.models.transformer import Transformer
from llamarl.parts.sft.bpe import train_byte_bpe
from llamarl.training import policy
from llamarl.training.cost import step_cost
from llamarl.training.meter import device_seconds, peak_flops
from llamarl.training.optimization import finished
from llamarl.training.packing import to_sample_group
from llamarl.training.trainer import Objective, Trainer
from llamarl.types import FinishReason, Outcome, Prompt, RewardResult, Rollout, RolloutGroup, SampleGroup

CPU = torch.device("cpu")
NUM_GROUPS, GROUP = 16, 8
HEAD = (4096, 512, 128_256)
"""Tokens, hidden size and vocabulary of the log-probabilities."""
BUDGET_BYTES = 1 << 30
NOTES = [
    """Padded: a row for each rollout, as long as the longest of its microbatch of 8,192 tokens; the same loss,
    optimizer and chunked log-probs of response tokens alone. Tokens are those of prompts and responses.""",
    "Share of the peak: forward and backward, no optimizer; the peak is the fastest of five 512 x 512 products.",
    "Memory of the log-probs includes the gradients of head and hidden states, which every path returns.",
]
LLAMA = {"family": "llama", "num_kv_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192}
CPU_SHAPE = LLAMA | {
    "hidden_size": 512, "num_layers": 8, "num_heads": 8, "head_dim": 64, "intermediate_size": 1536,
    "vocab_size": 32_000,
}  # fmt: skip


def group(group_id: int, prompt_T: np.ndarray, lengths: list[int], vocab_size: int) -> RolloutGroup:
    """Random responses of these lengths, every other one right."""
    rng = np.random.default_rng(group_id)
    rollouts = tuple(
        Rollout(
            group_id=group_id,
            index=index,
            finish_reason=FinishReason.STOP,
            columns={
                "token_ids": rng.integers(0, vocab_size, length).astype(np.int32),
                "behavior_logprobs": np.full(length, -np.log(vocab_size), np.float32),
                "policy_versions": np.zeros(length, np.int32),
            },
        )
        for index, length in enumerate(lengths)
    )
    return RolloutGroup(
        group_id=group_id, prompt=Prompt(prompt_id="", text="", token_ids_T=prompt_T, answer=""), rollouts=rollouts,
        results=tuple(RewardResult(outcome=Outcome.SCORE, value=float(n % 2)) for n in range(len(lengths))),
        responses=("",) * len(lengths),
    )  # fmt: skip


def demo_groups() -> tuple[list[RolloutGroup], ModelShape]:
    """A step's worth of the demo's prompts; responses are as long as solutions, whose form the demo's model keeps."""
    config = load_sft_config(Path(__file__).parents[1] / "configs/demo_sft.toml")
    problems = list(RunningTotal(count=2000, first=21_000))
    texts = [f"{row.question}\n{row.metadata['solution']}" for row in problems]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_byte_bpe(texts, Path(folder) / "tokenizer", config.shape.vocab_size)
    chosen = problems[:NUM_GROUPS]
    prompts = tokenizer.encode_batch([f"{row.question}\n" for row in chosen])
    solutions = tokenizer.encode_batch([row.metadata["solution"] for row in chosen])
    shape = ModelShape(
        **config.shape.model_dump(exclude={"vocab_size", "init_std"}), vocab_size=tokenizer.vocab_size,
        tie_embeddings=True, head_dim=config.shape.hidden_size // config.shape.num_heads,
    )  # fmt: skip
    pairs = enumerate(zip(prompts, solutions, strict=True))
    return [group(n, prompt, [len(solution) + 1] * GROUP, shape.vocab_size) for n, (prompt, solution) in pairs], shape


def trainer_of(model: Transformer, device: torch.device = CPU, **config: Any) -> Trainer:
    settings = TrainerConfig(**config)
    if settings.lora:
        add_adapters(model, settings.lora, seed=2, dtype=getattr(torch, settings.dtype))
    return Trainer(model, settings, Objective(loss=Aipo(), advantage=GroupMean(), temperature=1.0), device=device)


def padded_step(trainer: Trainer, samples: list[SampleGroup]) -> None:
    """The same step with a row per rollout, as long as the longest of its microbatch."""
    model, loss, pairs = (
        trainer.model,
        trainer.objective.loss,
        [(g.prompt_token_ids_T, s) for g in samples for s in g.samples],
    )
    lengths = [len(prompt) + len(sample.token_ids_T) for prompt, sample in pairs]
    rows = max(1, trainer.config.microbatch_tokens // max(lengths))
    num_loss_tokens = sum(len(sample.token_ids_T) for _, sample in pairs)
    for start in range(0, len(pairs), rows):
        part, width = pairs[start : start + rows], max(lengths[start : start + rows])
        ids_B_T = torch.zeros(len(part), width, dtype=torch.long)
        predictors, sequence = list[Tensor](), list[Tensor]()
        for row, (prompt, sample) in enumerate(part):
            tokens = np.concatenate((prompt, sample.token_ids_T))
            ids_B_T[row, : len(tokens)] = torch.from_numpy(tokens)
            predictors.append(torch.arange(len(prompt) - 1, len(tokens) - 1) + row * width)
            sequence.append(torch.full((len(sample.token_ids_T),), row))

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor, num_rows: int = len(part)) -> Tensor:
            q, k, v = (x.unflatten(0, (num_rows, -1)).transpose(1, 2) for x in (q, k, v))
            rep = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

        predictors_R = torch.cat(predictors)
        hidden = model(ids_B_T.flatten(), torch.arange(width).repeat(len(part)), attend)[predictors_R]
        targets_R = ids_B_T.flatten()[predictors_R + 1]
        inputs = LossInputs(
            logprobs_N=policy.target_logprobs(hidden, model.head_weight_V_D, targets_R, 1.0),
            behavior_logprobs_N=torch.from_numpy(np.concatenate([s.behavior_logprobs_T for _, s in part])),
            advantages_N=torch.from_numpy(np.concatenate([s.advantages_T for _, s in part])),
            loss_mask_N=torch.ones(len(targets_R), dtype=torch.bool),
            sequence_N=torch.cat(sequence),
            num_sequences=len(part),
        )
        (loss(inputs).loss / num_loss_tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=False)


def in_turn(
    variants: dict[str, Callable[[], object]], repeats: int, device: torch.device = CPU
) -> dict[str, list[float]]:
    """Seconds of each, after a first round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(repeats + 1):
        for name, work in variants.items():
            start_s = device_seconds(device)
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number:
                times[name].append(device_seconds(device) - start_s)
    return times


def packing(repeats: int) -> dict[str, Any]:
    groups, shape = demo_groups()
    packed, padded = (trainer_of(new_model(shape, seed=1, std=0.05)) for _ in range(2))
    samples = [to_sample_group(one, GroupMean()(np.arange(GROUP) % 2.0, np.ones(GROUP, bool))) for one in groups]
    times = in_turn({"packed": lambda: packed.step(groups), "padded": lambda: padded_step(padded, samples)}, repeats)
    worst = max(
        float((a - b).detach().abs().max())
        for a, b in zip(packed.model.parameters(), padded.model.parameters(), strict=True)
    )
    num_tokens = sum(len(one.prompt.token_ids_T) + r.num_tokens for one in groups for r in one.rollouts)
    return {
        "tokens": num_tokens,
        "packed_tokens_per_s": num_tokens / statistics.median(times["packed"]),
        "padded_tokens_per_s": num_tokens / statistics.median(times["padded"]),
        "ratio": statistics.median(b / a for a, b in zip(times["packed"], times["padded"], strict=True)),
        "weights_differ_by": worst,
    }


def memory_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def head_once(kind: str, budget_bytes: int) -> dict[str, float]:
    """Forward and backward of the log-probabilities, by one path."""
    num_tokens, hidden_size, vocab_size = HEAD
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator).requires_grad_()
    head = torch.randn(vocab_size, hidden_size, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(vocab_size, (num_tokens,), generator=generator)
    (hidden[:8].detach() @ head[:64].detach().T).sum().item()  # loads the library
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory_kib("VmRSS")
    if budget_bytes:
        size = memory_kib("VmSize") * 1024 + budget_bytes
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    start_s = device_seconds(CPU)
    if kind == "plain":
        values = (hidden @ head.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    else:
        policy.TILE_LOGITS = int(kind)
        values = policy.target_logprobs(hidden, head, targets, 1.0)
    values.sum().backward()
    return {"s": device_seconds(CPU) - start_s, "peak_mib": (memory_kib("VmHWM") - before) / 1024}


def in_process(kind: str, budget_bytes: int = 0) -> dict[str, float] | str:
    command = [sys.executable, __file__, "--head", kind, "--budget", str(budget_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def head(repeats: int) -> dict[str, Any]:
    kinds = ["plain", *(str(1 << bits) for bits in (23, 25))]
    rows: dict[str, list[Any]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind in kinds:
            rows[kind].append(in_process(kind))
            print(kind, rows[kind][-1], flush=True)
    figures: dict[str, Any] = {}
    for kind in kinds:
        name = kind if kind == "plain" else f"tiles_of_2^{int(kind).bit_length() - 1}"
        figures[name] = {
            "s": statistics.median(row["s"] for row in rows[kind]),
            "peak_mib": statistics.median(row["peak_mib"] for row in rows[kind]),
            "time_ratio": statistics.median(
                row["s"] / plain["s"] for row, plain in zip(rows[kind], rows["plain"], strict=True)
            ),
            "memory_ratio": statistics.median(
                row["peak_mib"] / plain["peak_mib"] for row, plain in zip(rows[kind], rows["plain"], strict=True)
            ),
        }
    chosen = str(policy.TILE_LOGITS)
    within = {kind: in_process(kind, BUDGET_BYTES) for kind in ("plain", chosen)}
    return figures | {"tile_in_use": int(chosen), "within_1_gib": within}


def share_of_peak(shape: ModelShape, device: torch.device, dtype: str, repeats: int) -> dict[str, Any]:
    """Forward and backward of 2,048 packed tokens without the optimizer."""
    num_tokens = 2048
    prompt_T = np.zeros(num_tokens // 8, np.int32)
    groups = [group(n, prompt_T, [num_tokens // 8] * 3, shape.vocab_size) for n in range(2)]
    samples = [to_sample_group(one, np.ones(3)) for one in groups]
    variants = {
        "plain": {},
        "activation_checkpointing": {"activation_checkpointing": True},
        "compile": {"compile": True},
        "lora": {"lora": {"rank": 16}},
    }
    trainers = dict[str, Trainer]()
    for name, config in variants.items():
        trainers[name] = trainer_of(new_model(shape, seed=1, std=0.02), device, dtype=dtype, **config)
    work = {name: lambda one=one: finished(one.accumulate(samples, 1)) for name, one in trainers.items()}
    times = in_turn(work, repeats, device)
    peak = peak_flops(TrainerConfig(dtype=dtype), device)
    flops = {name: step_cost(shape, samples, one.config.lora).flops for name, one in trainers.items()}
    trained = {name: sum(weight.numel() for weight in one.sharding.weights.values()) for name, one in trainers.items()}
    found = {
        name: {
            "s": statistics.median(some),
            "mfu": flops[name] / statistics.median(some) / peak,
            "gradient_and_moment_bytes": 3 * 4 * trained[name],
        }
        for name, some in times.items()
    }
    return {"parameters": shape.num_parameters, "tokens": num_tokens, "peak_tflops_measured": peak / 1e12, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--head", help=argparse.SUPPRESS)
    parser.add_argument("--budget", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.head:
        print(json.dumps(head_once(options.head, options.budget)))
        return
    settings = {"repeats": options.repeats, "head": HEAD, "groups": NUM_GROUPS, "group_size": GROUP}
    figures = {"packing": packing(4 * options.repeats)}
    print(json.dumps(figures), flush=True)
    figures["share_of_peak"] = share_of_peak(ModelShape(**CPU_SHAPE), CPU, "float32", options.repeats)
    print(json.dumps(figures["share_of_peak"]), flush=True)
    figures["head"] = head(options.repeats)
    print(json.dumps(figures["head"], indent=1))
    print(write_result("training", settings, figures, [" ".join(note.split()) for note in NOTES]))


if __name__ == "__main__":
    main()
