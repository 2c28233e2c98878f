"""A plan as text."""

from __future__ import annotations

from collections.abc import Callable

from llamarl.forecast.plan import GeneratorPlan, Plan, TrainerPlan
from llamarl.forecast.request import Request

CLOSE = 0.02
"""Step times nearer than this are called equal: the model is not that exact."""


def render(request: Request, synchronous: Plan | None, asynchronous: Plan | None) -> str:
    """Both plans side by side, in detail, and which one to use."""
    lines = [_header(request), "", *_table(synchronous, asynchronous)]
    for name, plan in (("synchronous, colocated", synchronous), ("asynchronous, disaggregated", asynchronous)):
        lines += ["", *(_details(name, plan) if plan else [f"{name}: fits in no layout"])]
    return "\n".join([*lines, "", verdict(synchronous, asynchronous)])


def choose(synchronous: Plan | None, asynchronous: Plan | None) -> Plan:
    """The plan to run: the faster one, and the synchronous one when they are as good as equal.

    Raises:
        ValueError: there is none.
    """
    if asynchronous is None or synchronous is None:
        plan = asynchronous or synchronous
        if plan is None:
            raise ValueError("no plan to choose from")
        return plan
    return asynchronous if asynchronous.step_s < synchronous.step_s * (1 - CLOSE) else synchronous


def verdict(synchronous: Plan | None, asynchronous: Plan | None) -> str:
    """One sentence: which placement, and by how much."""
    if synchronous is None:
        return "Use the asynchronous plan: the synchronous one fits in no layout."
    if asynchronous is None:
        return "Use the synchronous plan: trainer and generators do not fit on GPUs of their own."
    ratio = synchronous.step_s / asynchronous.step_s
    if choose(synchronous, asynchronous) is asynchronous:
        return f"Use the asynchronous plan: {ratio:.2f} times as fast, at staleness up to {asynchronous.staleness}."
    if ratio > 1:
        return f"Use the synchronous plan: asynchrony gains under {CLOSE:.0%} here and costs staleness."
    return f"Use the synchronous plan: it is {1 / ratio:.2f} times as fast as the best asynchronous one."


def _header(request: Request) -> str:
    model, lengths = request.model, request.lengths
    pools = " + ".join(f"{pool.count} x {pool.gpu.name}" for pool in request.pools)
    return (
        f"{model.name}: {model.num_parameters / 1e9:.1f}B parameters on {pools}\n"
        f"step: {request.prompts_per_step} prompts x {request.group_size} responses, prompt {request.prompt_tokens} "
        f"tokens, response {lengths.mean_tokens:.0f} on average, {lengths.limit_tokens} at most"
    )


def _table(*plans: Plan | None) -> list[str]:
    rows: dict[str, Callable[[Plan], str]] = {
        "step time, s": lambda plan: f"{plan.step_s:.2f}",
        "samples per s": lambda plan: f"{plan.samples_per_s:.1f}",
        "GPUs in use": lambda plan: f"{plan.gpus}",
        "staleness": lambda plan: f"{plan.staleness}",
        "trainer busy": lambda plan: f"{plan.trainer.busy_s / plan.step_s:.0%}",
        "generators busy": lambda plan: f"{plan.generator.busy_s / plan.step_s:.0%}",
        "peak GB per GPU": lambda plan: f"{plan.peak_bytes / 1e9:.1f}",
        "$ per 1M samples": lambda plan: f"{plan.dollars_per_million_samples:,.0f}",
    }
    head = f"{'':<18}{'synchronous':>14}{'asynchronous':>14}"
    cells = {name: "".join(f"{show(plan) if plan else '-':>14}" for plan in plans) for name, show in rows.items()}
    return [head, *(f"{name:<18}{text}" for name, text in cells.items())]


def _details(name: str, plan: Plan) -> list[str]:
    trainer, generator = plan.trainer, plan.generator
    return [
        f"{name}; bound by {plan.step_binds}",
        f"  trainer     {trainer.gpus} x {trainer.pool.gpu.name}: {_trainer_layout(trainer)}",
        f"    bound by  {plan.trainer_binds}",
        f"    time, s   {_parts(trainer.time_parts, 1.0)}",
        f"    GB/GPU    {_parts(trainer.memory_parts, 1e9)}",
        f"  generators  {generator.gpus} x {generator.pool.gpu.name}: {_generator_layout(generator)}",
        f"    bound by  {plan.generator_binds}",
        f"    time, s   {_parts(generator.time_parts, 1.0)}",
        f"    GB/GPU    {_parts(generator.memory_parts, 1e9)}",
        *([f"  weight sync {generator.time_parts['sync']:.3g} s, {plan.sync}"] if plan.sync else []),
    ]


def _trainer_layout(trainer: TrainerPlan) -> str:
    layout = f"tp {trainer.tp}, cp {trainer.cp}, pp {trainer.pp}, dp {trainer.dp}"
    return f"{layout}, microbatch {trainer.microbatch_tokens} tokens, bfloat16"


def _generator_layout(generator: GeneratorPlan) -> str:
    layout = f"{generator.replicas} replicas of tp {generator.tp}"
    return f"{layout}, {generator.slots} responses at once each, {generator.precision}"


def _parts(parts: dict[str, float], unit: float) -> str:
    shown = [f"{name} {value / unit:.2f}" for name, value in parts.items() if value / unit >= 0.005]
    return f"{sum(parts.values()) / unit:.2f} = {' + '.join(shown)}"
