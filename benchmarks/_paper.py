"""The step times that LlamaRL (arXiv 2505.24034) and NeMo RL publish, beside what this model predicts for them.

Two constants, `step_overhead_s` and `decode_overhead_s`, are set so that the two rows of the 8B model come out; every
other row is a prediction. The paper does not state lengths that could be checked here, so the workload is an assumption
(`PAPER_WORKLOAD`), the same for all rows, and its influence is part of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from llamarl.parts.forecast.constants import Constants
from llamarl.parts.forecast.hardware import GPUS, Pool
from llamarl.parts.forecast.lengths import Lengths
from llamarl.parts.forecast.plan import Plan
from llamarl.parts.forecast.request import ASYNCHRONOUS, BASELINE, PlanRequest, Rules
from llamarl.parts.forecast.shapes import MODELS
from llamarl.parts.forecast.solver import asynchronous_plan, solve, synchronous_plan
from llamarl.parts.forecast.sync import priced


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A published pair of step times."""

    model: str
    gpus: int
    synchronous_s: float
    asynchronous_s: float


PAPER_ROWS = (
    Row(model="llama3-8b", gpus=256, synchronous_s=22.45, asynchronous_s=8.90),
    Row(model="llama3-70b", gpus=256, synchronous_s=82.32, asynchronous_s=20.67),
    Row(model="llama3-405b", gpus=1024, synchronous_s=635.8, asynchronous_s=59.5),
)
"""Section 7 of the paper. 256 GPUs for the 70B row is an assumption; the text gives 256 and 1,024 for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Work of one step: an assumption where a source does not say."""

    prompts_per_step: int
    group_size: int
    prompt_tokens: int
    mean_response_tokens: float
    sigma: float
    """Log-deviation of the lognormal response length."""
    response_tokens: int
    """Longest response."""


PAPER_WORKLOAD = Workload(
    prompts_per_step=256,
    group_size=8,
    prompt_tokens=200,
    mean_response_tokens=900,
    sigma=0.7,
    response_tokens=4096,
)
"""2,048 responses of about 1,100 tokens with their prompt: what NeMo RL measured for Llama 3.1 8B on math problems with
the same limit (docs/about/performance-summary.md of NVIDIA-NeMo/RL: mean 1,060 to 1,129)."""
MAX_STALENESS = 8
DECODE_OVERHEAD_LIMIT_S = 0.02
"""Longest host time of one decode step that calibration believes."""
CALIBRATION_STEPS = 24
PAPER_CONSTANTS = Constants(weight_copies=1)
"""LlamaRL writes weights into the generator's memory in place."""


def paper_request(row: Row, constants: Constants, workload: Workload = PAPER_WORKLOAD) -> PlanRequest:
    """The row as a request, on H100s."""
    return PlanRequest(
        model=MODELS[row.model],
        prompt_tokens=workload.prompt_tokens,
        lengths=Lengths.lognormal(
            mean_tokens=workload.mean_response_tokens, sigma=workload.sigma, limit_tokens=workload.response_tokens
        ),
        prompts_per_step=workload.prompts_per_step,
        group_size=workload.group_size,
        max_staleness=MAX_STALENESS,
        pools=(Pool(gpu=GPUS["h100-80g"], count=row.gpus),),
        constants=constants,
    )


def predict(request: PlanRequest, rules: Rules) -> Plan:
    """The best plan under `rules` and, when asynchronous, `MAX_STALENESS`. Raises ValueError: nothing fits."""
    pool = request.pools[0]
    plan = solve(request, (pool, pool), rules, request.max_staleness if rules.overlap else 0)
    if plan is None:
        raise ValueError(f"{request.model.name} does not fit on {pool.count} GPUs under {rules}")
    return priced(plan)


def calibrate(workload: Workload = PAPER_WORKLOAD) -> Constants:
    """Constants for which both 8B rows come out.

    `step_overhead_s` adds to the synchronous step and changes none of its layouts, so that row gives it for any
    `decode_overhead_s`; the asynchronous row then fixes that by bisection: more of it leaves less for the step.

    Raises:
        ValueError: no two such constants explain the rows under this workload.
    """
    row = PAPER_ROWS[0]

    def constants(decode_overhead_s: float) -> Constants:
        alone = replace(PAPER_CONSTANTS, decode_overhead_s=decode_overhead_s, step_overhead_s=0.0)
        rest_s = row.synchronous_s - predict(paper_request(row, alone, workload), BASELINE).step_s
        return replace(alone, step_overhead_s=max(0.0, rest_s))

    def is_slow(decode_overhead_s: float) -> bool:
        request = paper_request(row, constants(decode_overhead_s), workload)
        return predict(request, ASYNCHRONOUS).step_s > row.asynchronous_s

    low, high = 0.0, DECODE_OVERHEAD_LIMIT_S
    while high > 1e-4 and not constants(high).step_overhead_s:
        high /= 1.1
    if not is_slow(low) or is_slow(high):
        raise ValueError(f"the 8B rows need constants outside 0 to {high:.2g} s per decode step with {workload}")
    for _ in range(CALIBRATION_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_slow(middle) else (low, middle)
    return constants((low + high) / 2)


SWITCHES = (
    ("memory split", {"own_memory": True}),
    ("parallelism", {"own_parallelism": True}),
    ("precision", {"own_precision": True}),
    ("overlap", {"overlap": True}),
    ("stragglers", {"partial_rollouts": True}),
    ("weight sync", {"direct_sync": True}),
)
"""Order in which the freedoms of the asynchronous system are switched on; another order shares the gain differently."""


def decompose(request: PlanRequest) -> dict[str, float]:
    """Factor by which each switch shortens the step, in the order of `SWITCHES`; the product is the whole speed-up."""
    rules = BASELINE
    before_s = predict(request, rules).step_s
    factors: dict[str, float] = {}
    for name, change in SWITCHES:
        rules = replace(rules, **change)
        after_s = predict(request, rules).step_s
        factors[name] = before_s / after_s
        before_s = after_s
    return factors


PEER_ROWS = (
    (Row(model="llama3-8b", gpus=16, synchronous_s=97.7, asynchronous_s=74.6), (256, 8, 150, 940.0, 4096)),
    (Row(model="qwen3-235b-a22b", gpus=256, synchronous_s=math.nan, asynchronous_s=241.0), (32, 16, 150, 5540.0, 8192)),
    (Row(model="qwen3-235b-a22b", gpus=128, synchronous_s=506.0, asynchronous_s=math.nan), (32, 16, 150, 5540.0, 8192)),
)
"""NeMo RL 0.4 on H100, bf16 generation, one step off policy (NVIDIA-NeMo/RL docs/about/performance-summary.md), with
(prompts, group, prompt tokens, mean response, limit). Prompt and response are split by assumption, their sum is given.
Its steps also score log-probs twice (policy and reference), which this model leaves out."""


def peer_errors(constants: Constants) -> dict[str, float]:
    """Relative error of the step time for each of `PEER_ROWS`, for the best plan with bf16 generation."""
    errors: dict[str, float] = {}
    for row, (prompts, group, prompt, mean, limit) in PEER_ROWS:
        workload = Workload(
            prompts_per_step=prompts,
            group_size=group,
            prompt_tokens=prompt,
            mean_response_tokens=mean,
            sigma=0.7,
            response_tokens=limit,
        )
        request = paper_request(row, constants, workload)
        gpu = replace(request.pools[0].gpu, fp8_flops=0.0)
        request = replace(request, max_staleness=1, pools=(Pool(gpu=gpu, count=row.gpus),))
        for kind, published_s, planner in (
            ("sync", row.synchronous_s, synchronous_plan),
            ("async", row.asynchronous_s, asynchronous_plan),
        ):
            plan = None if math.isnan(published_s) else planner(request)
            if plan:
                errors[f"{row.model}/{row.gpus}/{kind}"] = priced(plan).step_s / published_s - 1
    return errors
