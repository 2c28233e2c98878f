"""`Plan`: a layout for trainer and generators with predicted times, memory and cost."""

from __future__ import annotations

from dataclasses import dataclass

from llamarl.parts.forecast.hardware import CPU, FP8, Pool
from llamarl.parts.forecast.request import PlanRequest, Rules

CAUSES = {
    "compute": "compute",
    "weights": "memory bandwidth (weights)",
    "kv": "memory bandwidth (KV cache)",
    "tensor": "interconnect (tensor parallel)",
    "fsdp": "interconnect (weight gathers)",
    "context": "interconnect (context parallel)",
    "exchange": "interconnect (rows to their experts)",
    "pipeline": "pipeline bubble",
    "optimizer": "memory bandwidth (optimizer)",
    "overhead": "host overhead",
    "stragglers": "longest response",
    "prefill": "compute (prefill)",
    "sync": "interconnect (weight sync)",
    "publish": "memory bandwidth (weight sync)",
}
"""Display names of the parts of an executor's time. The largest part is the bottleneck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorPlan:
    """Common fields of the plans of trainer and generators."""

    pool: Pool
    tp: int
    time_parts: dict[str, float]
    """Seconds per step, by cause. For generators, the decode step is split up."""
    memory_parts: dict[str, float]
    """Bytes per GPU, by part."""

    @property
    def busy_s(self) -> float:
        """Seconds of work per step."""
        return sum(self.time_parts.values())

    @property
    def binds(self) -> str:
        """Name of the largest part of the time."""
        return CAUSES[max(self.time_parts, key=lambda name: self.time_parts[name])]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPlan(ExecutorPlan):
    """The trainer's part."""

    cp: int
    pp: int
    dp: int
    ep: int
    microbatch_tokens: int

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorPlan(ExecutorPlan):
    """The generators' part."""

    replicas: int
    slots: int
    """Responses that a replica decodes concurrently."""
    weight_bytes: int
    latency_s: float
    """Seconds to generate the longest response of a step."""
    memory_full: bool
    """More responses are waiting, but more slots would not fit."""

    @property
    def gpus(self) -> int:
        return self.tp * self.replicas

    @property
    def precision(self) -> str:
        return "fp8" if self.weight_bytes == FP8 else "bfloat16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One placement of a request."""

    request: PlanRequest
    rules: Rules
    trainer: TrainerPlan
    generator: GeneratorPlan
    staleness: int
    """Staleness S of the run. 0 is synchronous."""
    sync: str = ""
    """Route of the weights from trainer to generators, and the reason. Empty until priced."""

    @property
    def step_s(self) -> float:
        """Predicted seconds per optimizer step, see `solver`."""
        train_s, generate_s = self.trainer.busy_s, self.generator.busy_s
        if not self.rules.overlap:
            return train_s + generate_s
        latency_s = self.generator.latency_s if self.rules.partial_rollouts else 0.0
        return max(train_s, generate_s, (latency_s + train_s) / (self.staleness + 1))

    @property
    def samples_per_s(self) -> float:
        return self.request.num_samples / self.step_s

    @property
    def gpus(self) -> int:
        """GPUs in use: the sum of both executors, or the maximum if they share GPUs."""
        both = (self.trainer.gpus, self.generator.gpus)
        return sum(both) if self.rules.overlap else max(both)

    @property
    def peak_bytes(self) -> float:
        """Maximum memory that a GPU needs at a time under the rules of the placement."""
        trainer, generator = self.trainer.memory_parts, self.generator.memory_parts
        if self.rules.own_memory:
            return max(sum(trainer.values()), sum(generator.values()))
        if not self.rules.own_parallelism:
            return sum(trainer.values()) + sum(generator.values())
        training = sum(trainer.values()) - trainer["state"]
        return trainer["state"] + generator["weights"] + max(training, generator["kv"])

    @property
    def dollars_per_hour(self) -> float:
        """Price of the GPUs in use."""
        if not self.rules.overlap:
            return self.gpus * self.trainer.pool.gpu.price
        return self.trainer.gpus * self.trainer.pool.gpu.price + self.generator.gpus * self.generator.pool.gpu.price

    @property
    def dollars_per_million_samples(self) -> float:
        return self.dollars_per_hour / 3600 * 1e6 / self.samples_per_s

    @property
    def dollars_per_step(self) -> float:
        return self.dollars_per_hour / 3600 * self.step_s

    @property
    def gpu_hours_per_step(self) -> float:
        """Hours of all GPUs in use, of any kind."""
        return self.gpus * self.step_s / 3600

    @property
    def num_hosts(self) -> int:
        """Machines of `node_gpus` GPUs. Trainer and generators on the same kind share one machine if possible."""
        trainer, generator = self.trainer, self.generator
        together = not self.rules.overlap or trainer.pool.gpu.name == generator.pool.gpu.name
        each = [(trainer, self.gpus)] if together else [(trainer, trainer.gpus), (generator, generator.gpus)]
        return sum(1 if one.pool.gpu.name == CPU else -(-gpus // one.pool.gpu.node_gpus) for one, gpus in each)

    @property
    def is_runnable(self) -> bool:
        """Whether a run can use the plan: roles that share GPUs must be on one machine (`cluster.placement =
        "colocated"`)."""
        return self.rules.overlap or self.num_hosts == 1

    @property
    def step_binds(self) -> str:
        """Name of the bottleneck of the step."""
        if not self.rules.overlap:
            return "both phases in turn"
        if self.step_s > 1.001 * max(self.trainer.busy_s, self.generator.busy_s):
            return f"staleness {self.staleness}: the longest response takes {self.generator.latency_s:.1f} s"
        return "trainer" if self.trainer.busy_s >= self.generator.busy_s else "generators"
