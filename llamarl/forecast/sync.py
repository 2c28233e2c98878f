"""What weight sync takes: the reshard plan between the two layouts of a plan, on the links of its machines.

The search knows one side of a pair at a time, so it counts the bytes that a generator's adapter must receive. The plan
that it finds is then priced here, by its own copies.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from llamarl.forecast.hardware import FP8
from llamarl.forecast.plan import GeneratorPlan, Plan, TrainerPlan
from llamarl.forecast.shapes import Decoder
from llamarl.sharding.parallel_layout import generator_layout, trainer_layout
from llamarl.sharding.transfer_time import Links, Transfer, fastest


@lru_cache(maxsize=64)
def weight_transfer(
    model: Decoder,
    links: Links,
    trainer: tuple[int, int, int, int],
    generator: tuple[int, int, int],
    first_device: int,
    host_size: int,
) -> tuple[Transfer, str]:
    """The estimate of one sync, and why it goes that way.

    Args:
        trainer: pipeline stages, copies, FSDP shards, tensor-parallel ranks.
        generator: replicas, tensor-parallel ranks, bytes per weight.
        first_device: of the generators; the trainer's is 0.
    """
    pp, copies, shards, trainer_tp = trainer
    replicas, tp, weight_bytes = generator
    # A size that the ranks cannot share evenly counts as padded.
    parameters = {
        name: tuple(-(-size // tp) * tp for size in shape) for name, shape in model.weights(norms=False).items()
    }
    source = trainer_layout(
        parameters, fsdp=shards, tp=trainer_tp, pp=pp, replicate=copies, dtype="bfloat16", host_size=host_size
    )
    heads = model.num_kv_heads if tp <= model.num_kv_heads else math.gcd(tp, model.num_kv_heads)
    destination = generator_layout(
        parameters,
        num_kv_heads=heads,
        tp=tp,
        replicas=replicas,
        dtype="float8_e4m3fn" if weight_bytes == FP8 else "bfloat16",
        first_device=first_device,
        host_size=host_size,
    )
    _, transfer, reason = fastest(source, destination, links)
    return transfer, reason


def priced(plan: Plan) -> Plan:
    """The plan with weight sync as long as its own copies take, and the step accordingly.

    Without direct sync there are no copies from shard to shard, and the plan stays as it is.
    """
    if not plan.rules.direct_sync:
        return plan
    trainer, generator = plan.trainer, plan.generator
    transfer, reason = weight_transfer(
        plan.request.model,
        _links(plan),
        _trainer_mesh(trainer, is_sharded=plan.rules.own_parallelism),
        (generator.replicas, generator.tp, generator.weight_bytes),
        _first_device(plan),
        generator.pool.gpu.node_gpus,
    )
    generator = replace(generator, time_parts=generator.time_parts | {"sync": transfer.seconds})
    return replace(plan, generator=generator, step_s=_step_s(plan, generator), sync=reason)


def _links(plan: Plan) -> Links:
    """Of the slower machines where they differ."""
    gpus, share = (plan.trainer.pool.gpu, plan.generator.pool.gpu), plan.request.constants.link_efficiency
    return Links(
        network=share * min(gpu.network_bandwidth for gpu in gpus), host=share * min(gpu.node_bandwidth for gpu in gpus)
    )


def _trainer_mesh(trainer: TrainerPlan, *, is_sharded: bool) -> tuple[int, int, int, int]:
    shards = trainer.dp * trainer.cp
    return (trainer.pp, 1, shards, trainer.tp) if is_sharded else (trainer.pp, shards, 1, trainer.tp)


def _first_device(plan: Plan) -> int:
    """Behind the trainer's devices, on a host of their own if they are of another kind; the same ones if shared."""
    if not plan.rules.overlap:
        return 0
    host_size, first = plan.generator.pool.gpu.node_gpus, plan.trainer.gpus
    return first if plan.trainer.pool is plan.generator.pool else -(-first // host_size) * host_size


def _step_s(plan: Plan, generator: GeneratorPlan) -> float:
    train_s = plan.trainer.busy_s
    if not plan.rules.overlap:
        return train_s + generator.busy_s
    latency_s = generator.latency_s if plan.rules.partial_rollouts else 0.0
    return max(train_s, generator.busy_s, (latency_s + train_s) / (plan.staleness + 1))
