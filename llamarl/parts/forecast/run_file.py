"""Converts a plan to a run file: every choice of the plan becomes a setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llamarl.config import ConfigError, RunConfig, dump_toml, validated
from llamarl.config.cluster import OF_HOSTS
from llamarl.parts.forecast.hardware import CPU, Pool
from llamarl.parts.forecast.plan import Plan
from llamarl.parts.forecast.room import CACHE_SHARE, room_for_cache, with_cache, with_room

AXES = {"fsdp": "dp", "tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep"}
LISTEN = "controller:6700"
"""Placeholder of `cluster.listen` in a planned run on several hosts."""


def run_toml(plan: Plan, *, data_path: str, base: RunConfig | None = None) -> str:
    """Returns the run file. Comments at the top have the expected performance.

    Args:
        data_path: JSONL file of training prompts, for a run without `base`.
        base: run whose other settings are kept.

    Raises:
        ConfigError: a kept setting contradicts the plan, or the run does not fit.
    """
    train = {"name": "jsonl", "path": data_path}
    data: dict[str, Any] = {"name": Path(plan.request.model.name).name, "data": {"train": train}}
    data = base.model_dump(exclude_none=True) if base else data
    for section, settings in planned_settings(plan).items():
        data[section] = data.get(section, {}) | settings
    data["cluster"] = on_hosts(data["cluster"], plan.num_hosts)
    planned = validated(data, RunConfig)
    config = _bounded(plan, planned)
    return expected(plan) + _bounds(plan, planned, config) + "\n" + dump_toml(config)


def _bounded(plan: Plan, config: RunConfig) -> RunConfig:
    """Returns the run with a KV cache that a start accepts, because a start counts more than a synchronous plan. Raises
    ConfigError if one sequence does not fit."""
    pool, shape = plan.trainer.pool, plan.request.model
    is_shared = config.cluster.placement == "colocated" and pool.gpu.name != CPU
    if not is_shared or config.generator.kv_cache_bytes is not None:
        return config
    there, whole = plan.request.usable_bytes(pool), pool.gpu.memory_bytes
    config = with_room(config, shape, there, min(plan.generator.memory_parts["kv"], CACHE_SHARE * there))
    room = room_for_cache(config, shape, there)
    if (needed := there - room) > whole:
        raise ConfigError(
            f"a run of the synchronous plan keeps {needed / 1e9:.1f} GB on each {pool.gpu.name}, which has "
            f"{whole / 1e9:.1f} GB; give more --gpus, or ask `llamarl init`, which looks for what fits"
        )
    return with_cache(config, shape, max(0.0, room))


def _bounds(plan: Plan, planned: RunConfig, config: RunConfig) -> str:
    """Returns a comment on values that are smaller in the run than in its plan. Empty means none."""
    cache, planned_bytes = config.generator.kv_cache_bytes, plan.generator.memory_parts["kv"]
    tokens, planned_tokens = config.trainer.microbatch_tokens, planned.trainer.microbatch_tokens
    if config is planned or cache is None or (cache >= 0.99 * planned_bytes and tokens == planned_tokens):
        return ""
    return (
        "# A start counts more than the plan, such as each process's own memory: keys and values have\n"
        f"# {cache / 1e9:.1f} GB (planned: {planned_bytes / 1e9:.1f}), microbatches {tokens} tokens "
        f"(planned: {planned_tokens}).\n"
    )


def expected(plan: Plan) -> str:
    """Returns a comment on the expected performance of a run."""
    trainer, generator = plan.trainer, plan.generator
    return (
        f"# Planned: {plan.step_s:.2f} s per step, {plan.samples_per_s:.1f} samples/s on {plan.gpus} GPUs,\n"
        f"# {trainer.gpus} x {trainer.pool.gpu.name} for the trainer and {generator.gpus} x {generator.pool.gpu.name} "
        f"for the generators{'' if plan.rules.overlap else ', the same ones in turn'}.\n"
    )


def planned_settings(plan: Plan) -> dict[str, dict[str, Any]]:
    """Returns every choice of a plan, by section. Raises ConfigError if no run can use the plan."""
    _check(plan)
    request, trainer, generator = plan.request, plan.trainer, plan.generator
    return {
        "model": {"path": request.model.path},
        "data": {"max_prompt_tokens": request.prompt_tokens},
        "rollout": {
            "prompts_per_step": request.prompts_per_step,
            "group_size": request.group_size,
            "max_staleness": plan.staleness,
            "max_new_tokens": request.lengths.limit_tokens,
        },
        "generator": {
            "replicas": generator.replicas,
            "tensor_parallel": generator.tp,
            "max_running": generator.slots,
            **_device(generator.pool, generator.precision),
        },
        "trainer": {
            "parallelism": {axis: getattr(trainer, name) for axis, name in AXES.items()},
            "microbatch_tokens": trainer.microbatch_tokens,
            "activation_checkpointing": request.constants.recompute > 0,
            "lora": request.lora.model_dump() if request.lora else None,
            **_device(trainer.pool, "bfloat16"),
        },
        "cluster": {"placement": "disaggregated" if plan.rules.overlap else "colocated"},
    }


def _check(plan: Plan) -> None:
    """Raises ConfigError if no run can use the plan."""
    if not plan.is_runnable:
        most = plan.trainer.pool.gpu.node_gpus
        cause = f"shares {plan.gpus} GPUs, and cluster.placement = 'colocated' is for one machine of {most}"
        raise ConfigError(
            f"the synchronous plan {cause}, and there is no asynchronous one; plan for at most {most} GPUs, or for "
            "more with rollout.max_staleness above 0"
        )


def on_hosts(cluster: dict[str, Any], num_hosts: int) -> dict[str, Any]:
    """Returns the kept cluster settings, changed to `num_hosts` hosts."""
    if num_hosts > 1 and cluster.get("kind", "monarch") != "inline":
        return {"listen": LISTEN} | cluster | {"kind": "hosts", "num_hosts": num_hosts}
    if cluster.get("kind") == "hosts":
        return {name: value for name, value in cluster.items() if name not in OF_HOSTS}
    return cluster


def _device(pool: Pool, dtype: str) -> dict[str, str]:
    """Returns the settings of a device. On a CPU the fastest type depends on the model, so the run's type is kept."""
    return {"device": "cpu"} if pool.gpu.name == CPU else {"device": "cuda", "dtype": dtype}
