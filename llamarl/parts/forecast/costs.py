"""`Costs`: seconds that the work of a run takes, from a measured run, a plan, a JSON file, or the defaults."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, StrictBool

from llamarl.config import ConfigError, make_record, read_json
from llamarl.parts.forecast.candidates import Generators, sum_parts
from llamarl.parts.forecast.generation import steady_parts
from llamarl.parts.forecast.hardware import Count, Positive, ZeroOrMore
from llamarl.parts.forecast.plan import Plan

WholeOrNone = Annotated[int, Field(ge=0, strict=True)]
Group = Annotated[tuple[tuple[WholeOrNone, float], ...], Field(min_length=1)]
"""Tokens and reward of each response."""


BLOCKED_SHARE = 0.05
"""Share of a checkpoint's seconds in which the trainer copies (measured by `benchmarks/checkpoint.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds, bytes and numbers of a run's work. The defaults are a 70B model on H100s, rounded from the planner:
    tensor parallel 8, bfloat16."""

    generator_gpus: Count = 8
    """GPUs of one generator replica."""
    trainer_gpus: WholeOrNone = 0
    """GPUs of the trainer when nobody says how many; 0: as many as all generators have."""
    decode_base_s: Positive = 0.012
    """a: seconds of a decode step, whatever runs: reading the weights, launches."""
    decode_per_rollout_s: ZeroOrMore = 5e-5
    """b: further seconds per rollout in the step: its KV cache, its share of the products."""
    prefill_token_s: ZeroOrMore = 3.5e-5
    """Seconds per prompt token; a prompt is prefilled once for its group."""
    train_base_s: ZeroOrMore = 0.2
    """Seconds of an optimizer step that do not depend on its tokens: optimizer, host."""
    train_token_gpu_s: ZeroOrMore = 1e-3
    """GPU-seconds per trained token, prompts included: forward, backward, recompute, communication."""
    publish_s: ZeroOrMore = 0.5
    """Seconds in which the trainer makes its weights available."""
    adopt_s: ZeroOrMore = 0.6
    """Seconds in which a generator stands still to take new weights over."""
    probe_s: ZeroOrMore = 0.0
    """Seconds in which it computes the log-probabilities of a probe after that."""
    save_bytes: ZeroOrMore = 12 * 70.6e9
    """Bytes of a checkpoint: float32 weights and two moments."""
    save_bandwidth: Positive = 0.34e9
    """Bytes per second that each GPU of the trainer brings to the disk: copied, digested, written and flushed by one
    core (measured by `benchmarks/checkpoint.py`). A file system that all share may be slower."""
    score_s: ZeroOrMore = 0.02
    """Mean seconds to judge one response, exponentially distributed."""
    score_workers: Count = 64
    """Responses judged at the same time."""
    score_timeout_s: ZeroOrMore = 10.0
    """Seconds after which the reward gives a response up; it is then invalid."""
    generator_start_s: ZeroOrMore = 60.0
    """Seconds until a new generator process has loaded its model."""
    prompt_tokens: Count = 512
    """Length of every prompt."""
    response_tokens: Positive = 1200.0
    """Mean of the lognormal response length, before the cut at `rollout.max_new_tokens`."""
    response_sigma: ZeroOrMore = 0.7
    """Log-deviation of the response length; 0 makes all equal."""
    response_lengths: tuple[Count, ...] = ()
    """Measured lengths to draw from instead of the lognormal."""
    measured_groups: tuple[Group, ...] = ()
    """Groups of a real run in the order of their prompts, one (tokens, reward) per response; group g of the simulation
    is the g-th of them, and from the first on again. Instead of drawn lengths and rewards."""
    skips_equal_rewards: StrictBool = False
    """The trainer spends nothing on groups in which all rewards are equal, as their advantages are 0."""
    call_s: ZeroOrMore = 0.0
    """Seconds that a call and its answer are under way."""
    cores: ZeroOrMore = 0
    """Cores of the one machine that all executors on `cpu` and the controller share, or a container's part of them; 0:
    everybody has his own."""
    controller_call_s: ZeroOrMore = 0.0
    """Processor seconds of a call in the controller, and of its messages in executors, where `cores` is not 0."""
    controller_rollout_s: ZeroOrMore = 0.0
    """Processor seconds of a rollout in the controller, beside its calls; nothing else is done meanwhile."""
    contention: Positive = 1.0
    """Factor by which all takes longer while two threads work at once, beyond their shares of `cores`: cold caches,
    memory that they share, waits for a core while another is free. Each further one that has a core adds as much."""

    def decode_s(self, running: np.ndarray) -> np.ndarray:
        """Seconds of a decode step of so many rollouts."""
        return self.decode_base_s + self.decode_per_rollout_s * running

    def train_s(self, tokens: float, gpus: int | np.ndarray) -> Any:
        """Seconds of an optimizer step on so many tokens and GPUs."""
        return self.train_base_s + self.train_token_gpu_s / gpus * tokens

    def save_s(self, gpus: int) -> tuple[float, float]:
        """Seconds of a checkpoint in which the trainer stands still, and in which it is written beside later steps."""
        whole_s = self.save_bytes / (self.save_bandwidth * gpus)
        return BLOCKED_SHARE * whole_s, (1 - BLOCKED_SHARE) * whole_s

    @classmethod
    def from_plan(cls, plan: Plan) -> Costs:
        """Costs by the planner's roofline for the plan's layouts, as lines through two points."""
        request, generator, trainer = plan.request, plan.generator, plan.trainer
        two = np.ones(2, np.int64)
        replicas = Generators(
            tp_L=two * generator.tp,
            replicas_L=two * generator.replicas,
            slots_L=np.array([1, generator.slots]),
            weight_bytes_L=two * generator.weight_bytes,
        )
        one, full = sum_parts(steady_parts(request, generator.pool, replicas))
        slope = (full - one) / max(generator.slots - 1, 1)
        fixed_s = trainer.time_parts["optimizer"]
        publish_s = trainer.time_parts.get("publish", 0.0)
        tokens = request.num_samples * request.lengths.mean_tokens + request.prompts_per_step * request.prompt_tokens
        prompts = request.prompts_per_step * request.prompt_tokens / generator.replicas
        return cls(
            generator_gpus=generator.tp,
            decode_base_s=float(one - slope),
            decode_per_rollout_s=float(slope),
            prefill_token_s=generator.time_parts["prefill"] / prompts,
            train_base_s=fixed_s,
            train_token_gpu_s=(trainer.busy_s - fixed_s - publish_s) * trainer.gpus / tokens,
            publish_s=publish_s,
            adopt_s=generator.time_parts["sync"],
            save_bytes=request.saved_bytes,
            prompt_tokens=request.prompt_tokens,
            response_tokens=request.lengths.mean_tokens,
        )

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """Costs from a JSON object with the fields of this record, or from the `costs` of a profile.

        What is missing keeps its default.

        Raises:
            ConfigError: the file cannot be read, or a field is unknown or impossible.
        """
        data = read_json(path, 'write {"decode_base_s": 0.012, ...}')
        if isinstance(data.get("costs"), dict):
            data = data["costs"]
        if "save_s" in data:
            raise ConfigError(f"`costs.save_s` of {path} is gone; give `save_bytes` and `save_bandwidth` instead")
        return make_record(cls, data, "costs", str(path))

    def save(self, path: str | Path) -> None:
        """Writes what `load` reads. Raises OSError."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
