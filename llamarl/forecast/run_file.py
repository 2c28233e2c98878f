"""A plan as a run file that `llamarl.config.load_config` accepts."""

from __future__ import annotations

from typing import Any

from llamarl.config import RunConfig, dump_toml
from llamarl.forecast.hardware import BF16
from llamarl.forecast.plan import Plan


def run_toml(plan: Plan, *, model_path: str, data_path: str, base: RunConfig | None = None) -> str:
    """The run file. What the run's settings cannot say yet (layout, 8-bit weights) stands above it as comments.

    Args:
        model_path: Hugging Face folder of the run.
        data_path: JSONL file of training prompts.
        base: a run whose other settings are kept.
    """
    request, trainer, generator = plan.request, plan.trainer, plan.generator
    data = base.model_dump(exclude_none=True) if base else _new_run(plan, model_path, data_path)
    _update(
        data,
        rollout={
            "prompts_per_step": request.prompts_per_step,
            "group_size": request.group_size,
            "max_staleness": plan.staleness,
            "max_new_tokens": request.lengths.limit_tokens,
        },
        generator={
            "replicas": generator.replicas,
            "max_running": generator.slots,
            "dtype": "bfloat16",
            "device": "cuda",
        },
        trainer={"microbatch_tokens": trainer.microbatch_tokens, "dtype": "bfloat16", "device": "cuda"},
        cluster={"placement": "disaggregated" if plan.rules.overlap else "colocated"},
    )
    return _comments(plan) + dump_toml(RunConfig.model_validate(data))


def _new_run(plan: Plan, model_path: str, data_path: str) -> dict[str, Any]:
    return {
        "name": plan.request.model.name,
        "model": {"path": model_path},
        "data": {
            "train": {"name": "jsonl", "path": data_path},
            "max_prompt_tokens": plan.request.prompt_tokens,
        },
    }


def _update(data: dict[str, Any], **sections: dict[str, Any]) -> None:
    for name, settings in sections.items():
        data[name] = data.get(name, {}) | settings


def _comments(plan: Plan) -> str:
    trainer, generator = plan.trainer, plan.generator
    layout = f"tensor {trainer.tp}, context {trainer.cp}, pipeline {trainer.pp}, data (FSDP) {trainer.dp}"
    lines = [
        f"Planned: {plan.step_s:.2f} s per step, {plan.samples_per_s:.1f} samples/s on {plan.gpus} GPUs.",
        f"Trainer: {trainer.gpus} x {trainer.pool.gpu.name}, {layout}.",
        f"Generators: {generator.gpus} x {generator.pool.gpu.name}, tensor {generator.tp} each, {generator.precision}.",
        "A run file has no settings for these layouts yet: they are comments, and only what follows takes effect.",
    ]
    if generator.weight_bytes != BF16:
        lines.append("`generator.dtype` knows no fp8 yet: bfloat16 is written, which is slower than planned.")
    return "".join(f"# {line}\n" for line in lines) + "\n"
