"""Duration of weight sync: the reshard plan between the two layouts of a plan, on the links of its machines.

The search considers one side at a time, so it counts the bytes that a generator's adapter receives. The resulting plan
is then priced here by its actual copies.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from llamarl.parts.forecast.hardware import FP8
from llamarl.parts.forecast.layouts import generator_layout, trainer_layout
from llamarl.parts.forecast.plan import Plan
from llamarl.parts.forecast.shapes import DecoderShape
from llamarl.parts.forecast.transfer_time import LinkSpeeds, Transfer, fastest
from llamarl.sharding.tensor_parallel import is_expert


@lru_cache(maxsize=64)
def weight_transfer(
    model: DecoderShape,
    links: LinkSpeeds,
    trainer: tuple[int, int, int, int, int],
    generator: tuple[int, int, int],
    first_device: int,
    host_size: int,
) -> tuple[Transfer, str]:
    """Returns the estimate of one sync, and the reason for its route.

    Args:
        trainer: pipeline stages, copies, FSDP shards, tensor-parallel ranks, ranks that share experts by number.
        generator: replicas, tensor-parallel ranks, bytes per weight.
        first_device: first device of the generators. The trainer starts at 0.
    """
    pp, copies, shards, trainer_tp, ep = trainer
    replicas, tp, weight_bytes = generator
    # Uneven shards count as padded. Experts are those of a run, which distributes them evenly.
    # Norms and biases are few bytes in very many pieces.
    parameters = {
        name: shape if is_expert(name) else tuple(-(-size // tp) * tp for size in shape)
        for name, shape in model.weights().items()
        if len(shape) > 1
    }
    source = trainer_layout(
        parameters, fsdp=shards, tp=trainer_tp, pp=pp, replicate=copies, ep=ep, dtype="bfloat16", host_size=host_size
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
    """Returns the plan with the duration of its weight sync by its actual copies.

    Without direct sync, or if only adapters are sent, the plan is unchanged.
    """
    if plan.request.lora:
        return replace(plan, sync="adapters alone, merged where they arrive")
    if not plan.rules.direct_sync:
        return plan
    trainer, generator = plan.trainer, plan.generator
    gpus, share = (trainer.pool.gpu, generator.pool.gpu), plan.request.constants.link_efficiency
    shards, host_size = trainer.dp * trainer.cp, generator.pool.gpu.node_gpus
    first = trainer.gpus if plan.rules.overlap else 0
    if trainer.pool is not generator.pool:  # different kinds of machines are different hosts
        first = -(-first // host_size) * host_size
    transfer, reason = weight_transfer(
        plan.request.model,
        LinkSpeeds(
            network=share * min(gpu.network_bandwidth for gpu in gpus),
            host=share * min(gpu.node_bandwidth for gpu in gpus),
        ),
        (trainer.pp, *((1, shards) if plan.rules.own_parallelism else (shards, 1)), trainer.tp, trainer.ep),
        (generator.replicas, generator.tp, generator.weight_bytes),
        first,
        host_size,
    )
    time_parts = generator.time_parts | {"sync": transfer.seconds}
    return replace(plan, generator=replace(generator, time_parts=time_parts), sync=reason)
