"""`Costs`: durations of a run's operations, from a measured run, a plan, a JSON file, or the defaults."""

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
"""Share of a checkpoint's duration in which the trainer is blocked by copying (measured by
`benchmarks/checkpoint.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Seconds, bytes and counts of a run's operations. The defaults are rounded from the planner for a 70B model on
    H100s with tensor parallelism 8 in bfloat16."""

    generator_gpus: Count = 8
    """GPUs of one generator replica."""
    trainer_gpus: WholeOrNone = 0
    """Default number of trainer GPUs. 0 means as many as all generators have."""
    decode_base_s: Positive = 0.012
    """a: constant seconds of a decode step: reading the weights, launches."""
    decode_per_rollout_s: ZeroOrMore = 5e-5
    """b: additional seconds per rollout in a decode step: KV cache and matrix products."""
    prefill_token_s: ZeroOrMore = 3.5e-5
    """Seconds per prompt token. A prompt is prefilled once per group."""
    train_base_s: ZeroOrMore = 0.2
    """Constant seconds of an optimizer step: optimizer, host."""
    train_token_gpu_s: ZeroOrMore = 1e-3
    """GPU-seconds per trained token, prompts included: forward, backward, recompute, communication."""
    publish_s: ZeroOrMore = 0.5
    """Seconds in which the trainer publishes its weights."""
    adopt_s: ZeroOrMore = 0.6
    """Seconds in which a generator pauses to adopt new weights."""
    probe_s: ZeroOrMore = 0.0
    """Seconds in which a generator computes the log-probabilities of a probe after adopting."""
    save_bytes: ZeroOrMore = 12 * 70.6e9
    """Bytes of a checkpoint: float32 weights and two moments."""
    save_bandwidth: Positive = 0.34e9
    """Bytes per second that each GPU of the trainer writes to disk: copied, hashed, written and flushed by one core
    (measured by `benchmarks/checkpoint.py`). A shared file system may be slower."""
    score_s: ZeroOrMore = 0.02
    """Mean seconds to score one response, exponentially distributed."""
    score_workers: Count = 64
    """Responses that are scored in parallel."""
    score_timeout_s: ZeroOrMore = 10.0
    """Seconds after which the reward gives up on a response, which is then invalid."""
    generator_start_s: ZeroOrMore = 60.0
    """Seconds for a new generator process to load its model."""
    prompt_tokens: Count = 512
    """Length of every prompt."""
    response_tokens: Positive = 1200.0
    """Mean of the lognormal response length, before truncation at `rollout.max_new_tokens`."""
    response_sigma: ZeroOrMore = 0.7
    """Standard deviation of the log of the response length. 0 means equal lengths."""
    response_lengths: tuple[Count, ...] = ()
    """Measured response lengths to draw from instead of the lognormal."""
    measured_groups: tuple[Group, ...] = ()
    """Groups of a real run in the order of their prompts, with (tokens, reward) per response. The simulation uses them
    in order and repeats them, instead of drawing lengths and rewards."""
    skips_equal_rewards: StrictBool = False
    """The trainer skips groups in which all rewards are equal, because their advantages are 0."""
    call_s: ZeroOrMore = 0.0
    """Seconds of latency of a call and its answer together."""
    cores: ZeroOrMore = 0
    """Cores that all executors on `cpu` and the controller share (for a container, its CPU limit). 0 means that every
    executor has its own cores."""
    controller_call_s: ZeroOrMore = 0.0
    """CPU seconds per call in the controller, and per message in executors. Used if `cores` is not 0."""
    controller_rollout_s: ZeroOrMore = 0.0
    """CPU seconds per rollout in the controller, in addition to calls. Blocks the controller."""
    contention: Positive = 1.0
    """Slowdown factor while two threads run concurrently, in addition to sharing `cores`: cold caches, shared memory
    bandwidth, waiting for a core. Each further thread with a core adds the same amount."""

    def decode_s(self, running: np.ndarray) -> np.ndarray:
        """Returns the seconds of a decode step with `running` rollouts."""
        return self.decode_base_s + self.decode_per_rollout_s * running

    def train_s(self, tokens: float, gpus: int | np.ndarray) -> Any:
        """Returns the seconds of an optimizer step on `tokens` tokens and `gpus` GPUs."""
        return self.train_base_s + self.train_token_gpu_s / gpus * tokens

    def save_s(self, gpus: int) -> tuple[float, float]:
        """Returns the seconds in which a checkpoint blocks the trainer, and in which it is written during later
        steps."""
        whole_s = self.save_bytes / (self.save_bandwidth * gpus)
        return BLOCKED_SHARE * whole_s, (1 - BLOCKED_SHARE) * whole_s

    @classmethod
    def from_plan(cls, plan: Plan) -> Costs:
        """Returns costs from the planner's roofline for the plan's layouts, as lines through two points."""
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
        """Loads costs from a JSON object with the fields of this record, or from the `costs` of a profile.

        Missing fields keep their defaults.

        Raises:
            ConfigError: the file cannot be read, or a field is unknown or invalid.
        """
        data = read_json(path, 'write {"decode_base_s": 0.012, ...}')
        if isinstance(data.get("costs"), dict):
            data = data["costs"]
        if "save_s" in data:
            raise ConfigError(f"`costs.save_s` of {path} is gone; give `save_bytes` and `save_bandwidth` instead")
        return make_record(cls, data, "costs", str(path))

    def save(self, path: str | Path) -> None:
        """Writes a file for `load`. Raises OSError."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")
