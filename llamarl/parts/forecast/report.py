"""Plans and simulations as text, as JSON, and as data of the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamarl.observability.files import write_atomically
from llamarl.observability.metrics import duration, number, percent
from llamarl.observability.report import role_of
from llamarl.observability.spans import Span
from llamarl.parts.forecast.hardware import Pool
from llamarl.parts.forecast.plan import Plan
from llamarl.parts.forecast.request import ASYNCHRONOUS, PlanRequest
from llamarl.parts.forecast.simulator.result import Simulation
from llamarl.parts.forecast.solver import fastest_phases, solve

ERROR = 0.25
"""Relative difference of times and costs below which they count as equal: the median error of the planner's steps
against runs, for the worse of two sets of settings (`own_machine` in
`benchmarks/results/prediction-seed0-2026-11-22.json`; 21 % for the other). The simulator's errors there are 2.7 % and
11.2 %. Against the paper the planner is 11 % too fast for 70B and 57 % for 405B."""
BETTER = 1 + ERROR
"""Ratio above which two values count as different. Ratios below its inverse do, too."""
BAR = 40
"""Width of the longest bar in characters."""
SHARES, SPLIT = 24, ("share", "step", "trainer", "generators")
"""Points of a split sweep, and the values of each. The last two are for each phase at its fastest."""
NUM_GENERATORS = 12
"""Number of generators on the page's timeline."""


def choose(synchronous: Plan | None, asynchronous: Plan | None) -> Plan:
    """Returns the plan to run: the asynchronous one if it is faster or cheaper by more than the planner's error and not
    worse in the other, or if no run can use the synchronous one; otherwise the synchronous one.

    Raises:
        ValueError: there is no plan.
    """
    plan = asynchronous or synchronous
    if plan is None:
        raise ValueError("no plan to choose from")
    if not synchronous or not asynchronous or not synchronous.is_runnable:
        return plan
    gains = _gains(synchronous, asynchronous)
    return asynchronous if max(gains) > BETTER and min(gains) >= 1 / BETTER else synchronous


def _gains(synchronous: Plan, asynchronous: Plan) -> tuple[float, float]:
    """Returns the factors by which asynchrony shortens a step and makes it cheaper (free GPUs count by GPU hours)."""
    cost, _ = _costs(synchronous, asynchronous)
    return synchronous.step_s / asynchronous.step_s, cost[0] / cost[1]


def _costs(*plans: Plan) -> tuple[list[float], str]:
    """Returns the cost of a step of each plan, and the unit: dollars, or GPU hours if a GPU has no price."""
    dollars = [plan.dollars_per_step for plan in plans]
    return (dollars, "USD") if all(dollars) else ([plan.gpu_hours_per_step for plan in plans], "GPU-hours")


def verdict(synchronous: Plan | None, asynchronous: Plan | None) -> str:
    """Returns sentences: the placement to use, the gain in time and cost, and which gains are within the planner's
    error."""
    if synchronous is None:
        return "Use the asynchronous plan: the synchronous one fits in no layout."
    if asynchronous is None:
        way = "Use the synchronous plan" if synchronous.is_runnable else "No run can be so"
        is_asked = synchronous.request.max_staleness == 0
        reason = "rollout.max_staleness = 0" if is_asked else "trainer and generators do not fit on separate GPUs"
        return f"{way}: {reason}.{_too_many(synchronous)}"
    at = f" at staleness up to {asynchronous.staleness}"
    compared = f"Asynchronous against synchronous: {_compared(synchronous, asynchronous)}."
    if choose(synchronous, asynchronous) is asynchronous:
        return f"Use the asynchronous plan,{at}. {compared}{_too_many(synchronous)}"
    faster, cheaper = _gains(synchronous, asynchronous)
    if max(faster, cheaper) > BETTER:
        gain, loss = ("faster", "dearer") if faster > cheaper else ("cheaper", "slower")
        reason = f"the asynchronous one is {gain},{at}, and {loss}, so it is for you to choose"
    elif min(faster, cheaper) >= 1 / BETTER:
        reason = f"a tie within the {ERROR:.0%} by which the planner errs"
    else:
        reason = (
            f"it is {1 / faster:.2f} times as fast"
            if faster < 1 / BETTER
            else f"it is {1 / cheaper:.2f} times as cheap"
        )
    return f"Use the synchronous plan: {reason}. {compared}"


def _too_many(plan: Plan) -> str:
    """Returns a sentence about a synchronous plan that no run can use."""
    if plan.is_runnable:
        return ""
    kind = plan.trainer.pool.gpu
    return (
        f" The synchronous plan shares {plan.gpus} GPUs of {plan.num_hosts} hosts, and cluster.placement = 'colocated' "
        f"is for one machine of {kind.node_gpus}: it is shown to compare."
    )


def _compared(synchronous: Plan, asynchronous: Plan) -> str:
    """Returns time and cost of a step of both, with their numbers of GPUs."""
    faster, cheaper = _gains(synchronous, asynchronous)
    (theirs, ours), unit = _costs(synchronous, asynchronous)
    pairs = (
        ("as fast", faster, f"{asynchronous.step_s:.4g} s against {synchronous.step_s:.4g} s a step"),
        ("the cost", 1 / cheaper, f"{ours:.3g} against {theirs:.3g} {unit}"),
    )
    said = [f"{how} ({figures})" for what, factor, figures in pairs for how in [_times(factor, what)]]
    both = asynchronous.gpus, synchronous.gpus
    return f"{' at '.join(said)}, on {both[0]} GPUs" + ("" if both[0] == both[1] else f" against {both[1]}")


def _times(factor: float, what: str) -> str:
    is_tie = 1 / BETTER <= factor <= BETTER
    return ("equally fast" if what == "as fast" else "equal cost") if is_tie else f"{factor:.2f} times {what}"


def render_plans(request: PlanRequest, synchronous: Plan | None, asynchronous: Plan | None) -> str:
    """Returns text: the plan to use, then both side by side and in detail."""
    model, lengths = request.model, request.lengths
    pools = " + ".join(f"{pool.count} x {pool.gpu.name}" for pool in request.pools)
    lora = f", adapters of rank {request.lora.rank} trained," if request.lora else ""
    met = f", of which a token meets {size(model.matmul_parameters)}," if model.moe else ""
    head = (
        f"{verdict(synchronous, asynchronous)}\n\n"
        f"{model.name}: {size(model.num_parameters)} parameters{met}{lora} on {pools}\n"
        f"step: {request.prompts_per_step} prompts x {request.group_size} responses, prompt {request.prompt_tokens} "
        f"tokens, response {lengths.mean_tokens:.0f} on average, {lengths.limit_tokens} at most\n\n"
        f"{'':<20}{'synchronous':>14}{'asynchronous':>14}"
    )
    columns = [_column(plan) if plan else {} for plan in (synchronous, asynchronous)]
    lines = [head] + [
        f"{name:<20}" + "".join(f"{column.get(name, '-'):>14}" for column in columns)
        for name in columns[0] or columns[1]
    ]
    for name, plan in (("synchronous, colocated", synchronous), ("asynchronous, disaggregated", asynchronous)):
        lack = "left out by rollout.max_staleness = 0" if request.max_staleness == 0 else "fits in no layout"
        lines += ["", *(_details(name, plan) if plan else [f"{name}: {lack}"])]
    return "\n".join(lines)


def size(parameters: float) -> str:
    """Returns `8.03B`, `494M`."""
    return f"{parameters / 1e9:.3g}B" if parameters >= 1e9 else f"{parameters / 1e6:.3g}M"


def _column(plan: Plan) -> dict[str, str]:
    return {
        "step time, s": f"{plan.step_s:.2f}",
        "samples per s": f"{plan.samples_per_s:.1f}",
        "GPUs in use": f"{plan.gpus}",
        "hosts": f"{plan.num_hosts}",
        "staleness": f"{plan.staleness}",
        "trainer busy": f"{plan.trainer.busy_s / plan.step_s:.0%}",
        "generators busy": f"{plan.generator.busy_s / plan.step_s:.0%}",
        "peak GB per GPU": f"{plan.peak_bytes / 1e9:.1f}",
        "GPU-hours per step": f"{plan.gpu_hours_per_step:.3g}",
        "$ per step": f"{plan.dollars_per_step:.3g}",
        "$ per day": f"{24 * plan.dollars_per_hour:,.0f}",
        "$ per 1M samples": f"{plan.dollars_per_million_samples:,.0f}",
    }


def _details(name: str, plan: Plan) -> list[str]:
    trainer, generator = plan.trainer, plan.generator
    trained = f"tp {trainer.tp}, cp {trainer.cp}, pp {trainer.pp}, dp {trainer.dp}"
    trained += f", ep {trainer.ep}" if plan.request.model.moe else ""
    trained += f", microbatch {trainer.microbatch_tokens} tokens, bfloat16"
    replicas = f"{generator.replicas} replica{'s' * (generator.replicas > 1)} of tp {generator.tp}"
    generated = f"{replicas}, {generator.slots} responses at once each, "
    lines = [f"{name}; bound by {plan.step_binds}"]
    full = f"; memory size caps its {generator.slots} slots" if generator.memory_full else ""
    for role, one, layout, cap in (
        ("trainer    ", trainer, trained, ""),
        ("generators ", generator, generated + generator.precision, full),
    ):
        lines += [
            f"  {role} {one.gpus} x {one.pool.gpu.name}: {layout}",
            f"    bound by  {one.binds}{cap}",
            f"    time, s   {_parts(one.time_parts, 1.0)}",
            f"    GB/GPU    {_parts(one.memory_parts, 1e9)}",
        ]
    return [*lines, *([f"  weight sync {generator.time_parts['sync']:.3g} s, {plan.sync}"] if plan.sync else [])]


def _parts(parts: dict[str, float], unit: float) -> str:
    shown = [f"{name} {value / unit:.2f}" for name, value in parts.items() if value / unit >= 0.005]
    return f"{sum(parts.values()) / unit:.2f} = {' + '.join(shown)}"


def summary(simulation: Simulation) -> dict[str, Any]:
    """Returns flat JSON. All values except the last four are functions of settings and seed."""
    steps_s, accounts, split = simulation.step_s, simulation.accounts, simulation.split
    known = len(steps_s) > 0
    return {
        "end": simulation.end,
        "gpus": split.gpus,
        "trainer_gpus": split.trainer_gpus,
        "generator_replicas": split.replicas,
        "steps": len(simulation.steps),
        "groups": simulation.num_groups,
        "virtual_s": simulation.virtual_s,
        "step_s_mean": float(steps_s.mean()) if known else None,
        **{f"step_s_p{q}": float(np.percentile(steps_s, q)) if known else None for q in (10, 50, 90, 99, 100)},
        "samples_per_s": sum(simulation.staleness.values()) / simulation.virtual_s if simulation.virtual_s else None,
        "staleness_mean": simulation.staleness_mean,
        "staleness_max": max(simulation.staleness, default=0),
        "staleness_bound": simulation.staleness_bound,
        **{f"staleness.{value}": count for value, count in simulation.staleness.items()},
        **{f"idle_share.{role}": 1 - busy for role, busy in accounts.role_share.items()},
        "overlap_share": accounts.overlap_share,
        "verdict": str(simulation.verdict),
        **simulation.counts,
        "invalid_share": float(np.mean([step.invalid_share for step in simulation.steps])) if known else None,
        "wall_s": simulation.wall_s,
        "cpu_s": simulation.cpu_s,
        "controller_ms_per_group": simulation.controller_s_per_group * 1e3,
        "controller_groups_per_s": 1 / simulation.controller_s_per_group if simulation.num_groups else None,
    }


def render_simulation(simulation: Simulation) -> str:
    """Returns the text of a simulation for the terminal."""
    split, steps_s, found = simulation.split, simulation.step_s, summary(simulation)
    load = simulation.controller_s_per_group * simulation.num_groups / max(simulation.virtual_s, 1e-9)
    facts = {
        "cluster": f"{split.gpus:,} GPUs: {split.trainer_gpus:,} for the trainer, {split.replicas:,} generators of "
        f"{split.generator_gpus}",
        "end": f"{simulation.end} after {len(simulation.steps)} steps, {simulation.num_groups:,} groups and "
        f"{duration(simulation.virtual_s)} of virtual time",
        "idle": ", ".join(f"{role} {percent(1 - busy)}" for role, busy in simulation.accounts.role_share.items()),
        "verdict": found["verdict"],
        "faults": f"{found['deaths']} deaths, {found['joins']} joins; {found['dropped_rollouts']:,} rollouts "
        f"dropped, {found['resubmitted_groups']:,} groups generated again; "
        f"{percent(found['invalid_share'] or 0.0, 2)} of rewards invalid",
        "resumed": f"{found['resumed_rollouts']:,} rollouts went on under newer weights than they began with",
        "controller": f"{number(simulation.controller_s_per_group * 1e3)} ms of one core per group, "
        f"{percent(load, 1)} of a core at this pace; transport comes on top",
        "simulated": f"in {duration(simulation.wall_s)}",
    }
    if len(steps_s):
        marks = "".join(f", p{q} {duration(found[f'step_s_p{q}'])}" for q in (10, 50, 90, 99))
        counts, edges = np.histogram(steps_s, bins=8)
        is_one = steps_s.max() - steps_s.min() < 1e-9 * steps_s.max()
        bars = {} if is_one else {duration(low): int(count) for low, count in zip(edges, counts, strict=False)}
        facts["step time"] = f"mean {duration(found['step_s_mean'])}{marks}, max {duration(steps_s.max())}{_bars(bars)}"
    stale = _bars({f"{value} steps": count for value, count in simulation.staleness.items()})
    facts["staleness"] = f"mean {simulation.staleness_mean:.2f}, proved bound {simulation.staleness_bound}{stale}"
    return "\n".join(f"{name:<12} {text}" for name, text in facts.items())


def _bars(counts: dict[str, int]) -> str:
    most = max(counts.values(), default=1)
    return "".join(
        f"\n  {name:>9}  {'█' * math.ceil(BAR * count / most):<{BAR}}  {count:,}" for name, count in counts.items()
    )


def plan_curves(request: PlanRequest, staleness: int) -> list[dict[str, Any]]:
    """Returns charts for the page: the first pool split at each share, and the speed at each staleness."""
    pool = request.pools[0]
    counts = sorted({round(pool.count * index / SHARES) for index in range(1, SHARES)} - {0, pool.count})
    halves = [tuple(Pool(gpu=pool.gpu, count=one) for one in (count, pool.count - count)) for count in counts]
    split = [
        (trainer.count / pool.count, plan.step_s, *phases)
        for trainer, generator in halves
        if (plan := solve(request, (trainer, generator), ASYNCHRONOUS, staleness))
        and (phases := fastest_phases(request, (trainer, generator), staleness))
    ]
    speed = [
        (bound, plan.samples_per_s)
        for bound in range(1, request.max_staleness + 1)
        if (plan := solve(request, (pool, pool), ASYNCHRONOUS, bound))
    ]
    charts = (
        (f"Seconds per step by the trainer's share of the GPUs, staleness {staleness}", SPLIT, split),
        ("Samples per second by the staleness bound in steps", ("bound", "samples per second"), speed),
    )
    return [{"title": title, "names": names, "rows": rows} for title, names, rows in charts if rows]


def write_forecast(folder: Path, found: dict[str, Any], text: str, charts: Sequence[dict[str, Any]] = ()) -> None:
    """Writes a summary and the page's data of a plan or a simulation. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "summary.json", json.dumps(found, indent=2) + "\n")
    write_atomically(folder / "forecast.json", json.dumps({"text": text, "charts": charts}) + "\n")


def chosen(spans: Mapping[str, list[Span]], num_generators: int) -> dict[str, list[Span]]:
    """Returns trainer, reward and some active generators, evenly spaced, including the first and the last."""
    generators = [name for name, work in spans.items() if role_of(name) == "generator" and work]
    places = np.linspace(0, len(generators) - 1, min(num_generators, len(generators))).astype(int)
    return {name: list(spans[name]) for name in ("trainer", "reward", *(generators[place] for place in places))}


def write_events(path: Path, simulation: Simulation) -> None:
    """Writes spans and the end of the simulation in the format of a run. Raises OSError."""
    (begin_s, end_s), is_whole = simulation.loop_s, simulation.end == "finished"
    end = {"end": "finished"} if is_whole else {"end": "failed", "reason": simulation.end}
    rows = [
        {"kind": "start", "at_s": begin_s},
        {"kind": "spans", "at_s": end_s, "spans": chosen(simulation.spans, NUM_GENERATORS)},
        {"kind": "end", "at_s": end_s} | end,
    ]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
