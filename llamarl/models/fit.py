"""Memory that each executor of a run takes by its settings, and the cheapest ones that make it fit. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from llamarl.config import RunConfig
from llamarl.config.roles import ATTENTION, CriticConfig, ParallelismConfig, ReferenceConfig, RewardModelConfig
from llamarl.models import memory
from llamarl.models.memory import WIDTHS, GeneratorLoad, Parts, TrainerLoad, total
from llamarl.models.sizes import DecoderSizes, adapter_parameters, uneven_shares
from llamarl.observability.report import role_of

CACHE_BLOCK_TOKENS = 16
"""Tokens for which keys and values are kept at a time, by all kernels."""
CONTEXT_BYTES = 1 << 29
"""Memory of a GPU that a process takes before its first tensor, with the libraries' own."""
SLOTS = 2
"""Versions of the weights that lie ready while generators keep up."""
MIRRORS = 4
"""Copies of the state with `checkpoint.mirror`: two that count, one that is written, and one to write from."""
GIB = 2.0**30

Model = ReferenceConfig | CriticConfig | RewardModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory of one rank of an executor, in bytes by kind."""

    executor: str
    num_ranks: int
    on_gpu: bool
    parts: Parts
    """On its device: all that it needs, with keys and values of one longest sequence."""
    host: Parts = field(default_factory=dict)
    """Beside, in the memory of its host, where its device is a GPU."""
    rests: Parts | None = None
    """On its device while it gives its memory to others; None: it never does."""
    grows: float = 0.0
    """More keys and values on its device where there is room: of `max_running` full contexts."""


def holdings(
    config: RunConfig, shape: DecoderSizes, models: Mapping[str, tuple[Model, DecoderSizes]]
) -> Iterator[RankMemory]:
    """Memory of each executor of a run; generators each by themselves.

    Args:
        models: beside the policy, by the executor's name: their settings and shapes.
    """
    trainer, sleeps = config.trainer, config.generators_sleep
    learns = _optimizing("trainer", trainer.device, trainer.parallelism, trainer_parts(config, shape), config, shape)
    yield replace(learns, rests=_at_rest(learns.parts, trainer.parallelism)) if sleeps else learns
    for name, (settings, sizes) in models.items():
        if isinstance(settings, CriticConfig):
            parts = memory.trainer_bytes(sizes, trainer_load(config, sizes, settings))
            yield _optimizing(name, settings.device, settings.parallelism, parts, config, None)
        else:
            is_reference = isinstance(settings, ReferenceConfig)
            tokens = trainer.microbatch_tokens if is_reference else settings.batch_tokens
            load = GeneratorLoad(
                width=WIDTHS[settings.dtype], kv_width=0, kv_tokens=0, copies=1, prefill_tokens=tokens,
                rows=min(tokens, memory.TILE_LOGITS // sizes.vocab_size) if is_reference else 0,
            )  # fmt: skip
            on_gpu = settings.device != "cpu"
            yield RankMemory(executor=name, num_ranks=1, on_gpu=on_gpu, parts=memory.generator_bytes(sizes, load))
    generator, tp = config.generator, config.generator.tensor_parallel
    parts = memory.generator_bytes(shape, generator_load(config, shape))
    grows = 0.0
    if generator.kv_cache_bytes is None:
        full = generator.max_running * cache_bytes(config, shape, shape.max_position_embeddings)
        grows = max(0.0, full - parts["keys and values"])
    for number in range(generator.replicas):
        yield RankMemory(
            executor=f"generator-{number}", num_ranks=tp, on_gpu=generator.device != "cpu", parts=parts, grows=grows,
            rests={kind: parts[kind] for kind in ("weights", "frozen") if trainer.lora} if sleeps else None,
        )  # fmt: skip


def _at_rest(parts: Parts, layout: ParallelismConfig) -> Parts:
    """The part that a trainer keeps between its steps; with FSDP2 gradients, too."""
    of_steps = {"copies", "activations", "head"} | ({"gradients"} if layout.fsdp * layout.cp == 1 else set())
    return {kind: size for kind, size in parts.items() if kind not in of_steps}


def in_turns(config: RunConfig, held: Sequence[RankMemory]) -> list[list[RankMemory]]:
    """Executors as they are at one moment: while trainer and critic work, and while generators do where these sleep."""
    if not config.generators_sleep:
        return [list(held)]
    return [
        [
            replace(one, parts=one.rests) if one.rests is not None and _generates(one) == sleep else one
            for one in held
        ]
        for sleep in (True, False)
    ]  # fmt: skip


def _generates(one: RankMemory) -> bool:
    return role_of(one.executor) == "generator"


def beside_bytes(config: RunConfig, shape: DecoderSizes) -> int:
    """Bytes that a resting trainer takes of a generator's device after its first step and not before."""
    trainer = config.trainer
    shares = config.generators_sleep and "cpu" not in (trainer.device, config.generator.device)
    return int(trainer_parts(config, shape)["moments"]) if shares and trainer.moments_on == "device" else 0


def _optimizing(
    name: str, device: str, layout: ParallelismConfig, parts: Parts, config: RunConfig, published: DecoderSizes | None
) -> RankMemory:
    """One that is trained: beside `parts` what it copies for checkpoints, mirrors and generators, and moments that are
    to lie there."""
    kept = parts["gradients"] + parts["moments"]  # of what is trained, weights take what gradients do
    beside: Parts = {"checkpoint": kept} | ({"mirror": MIRRORS * kept} if config.checkpoint.mirror else {})
    on_gpu = device != "cpu"
    if on_gpu and config.trainer.moments_on == "host":
        parts = dict(parts)
        beside["moments"] = parts.pop("moments")
    if published and not slots_on_device(config):
        beside["slots"] = slot_bytes(config, published)
    parts = parts if on_gpu else parts | beside
    return RankMemory(
        executor=name, num_ranks=layout.num_ranks, on_gpu=on_gpu, parts=parts, host=beside if on_gpu else {}
    )  # fmt: skip


def trainer_parts(config: RunConfig, shape: DecoderSizes) -> Parts:
    """Bytes by kind on the device of one rank of the trainer."""
    parts = memory.trainer_bytes(shape, trainer_load(config, shape))
    return parts | ({"slots": slot_bytes(config, shape)} if slots_on_device(config) else {})


def trainer_load(
    config: RunConfig, shape: DecoderSizes, critic: CriticConfig | None = None, tokens: int | None = None
) -> TrainerLoad:
    """Load of a rank with all responses of a group at their longest.

    Args:
        critic: the critic's settings; None: the load is the trainer's.
        tokens: of a microbatch; None: of the largest that can come.
    """
    settings, rollout, where = config.trainer, config.rollout, critic or config.trainer
    layout = where.parallelism
    prompt, response = longest(config, shape)
    group, responses = prompt + rollout.group_size * response, rollout.group_size * response
    share = -(-rollout.prompts_per_step // layout.fsdp)
    if tokens is None:
        tokens = min(settings.microbatch_tokens, share * group)
    half, on_gpu = settings.dtype == "bfloat16", where.device != "cpu"
    return TrainerLoad(
        tokens=tokens, targets=tokens * responses / group,
        keys=tokens * (prompt + rollout.group_size * (prompt + response)) / group,
        half=half, checkpointing=settings.activation_checkpointing, flash=on_gpu and half and layout.cp == 1,
        on_gpu=on_gpu, fused=on_gpu and half and not settings.compile,
        tp=layout.tp, cp=layout.cp, pp=layout.pp, shards=layout.fsdp * layout.cp, ep=layout.ep,
        is_critic=critic is not None,
        weight=WIDTHS[settings.weights], moments=memory.MOMENTS_BYTES[settings.moments],
        lora=None if critic else settings.lora,
    )  # fmt: skip


def generator_load(config: RunConfig, shape: DecoderSizes) -> GeneratorLoad:
    """Load of a rank whose cache has the size that is set, or room for one longest sequence."""
    generator, tp = config.generator, config.generator.tensor_parallel
    cached = generator.kv_cache_bytes or cache_bytes(config, shape, sum(longest(config, shape)))
    tokens = cached / memory.kv_token_bytes(shape, tp, kv_width(config))
    # On a CPU they serve from the trainer's slot, or from what was received, which took the place of the last version.
    copies = 2 if generator.device != "cpu" or config.cluster.kind == "hosts" else 1
    if config.generators_sleep and not config.trainer.lora:  # nothing is in use while others are written
        copies = 0 if serves_in_place(config) else 1
    if generator.device == "cpu":  # packed, but int8 without AVX-512: those in use, and the next
        copies += 2
    return GeneratorLoad(
        width=WIDTHS[generator.dtype], kv_width=kv_width(config), kv_tokens=tokens, tp=tp, copies=copies,
        rows=generator.max_running, prefill_tokens=generator.prefill_tokens, lora=config.trainer.lora,
    )  # fmt: skip


def longest(config: RunConfig, shape: DecoderSizes) -> tuple[int, int]:
    """Tokens of the longest prompt and response that can come."""
    context, found = shape.max_position_embeddings, list[tuple[int, int]]()
    for one in config.by_source.values():
        prompt = min(one.data.max_prompt_tokens, context - 1)
        found.append((prompt, min(one.rollout.max_new_tokens, context - prompt)))
    return max(found, key=sum)


def kv_width(config: RunConfig) -> int:
    """Bytes of a cached scalar."""
    generator = config.generator
    return {"auto": 4 if generator.dtype == "float32" else 2, "bfloat16": 2, "fp8": 1}[generator.kv_dtype]


def slots_on_device(config: RunConfig) -> bool:
    """The versions that generators fetch lie on the trainer's GPU; elsewhere in its host's memory."""
    transport = config.weight_sync.transport
    is_nixl = transport == "nixl" or (transport == "auto" and find_spec("nixl") is not None)
    return config.trainer.device != "cpu" and is_nixl


def serves_in_place(config: RunConfig) -> bool:
    """Generators compute with the trainer's own weights: `weight_sync/transports/in_place.py`."""
    trainer, generator = config.trainer, config.generator
    is_one = trainer.parallelism.num_ranks == generator.tensor_parallel == 1 and not trainer.lora
    on_cpu = [one.device == "cpu" for one in (trainer, generator)]
    alike = trainer.weights == generator.dtype and (generator.dtype == "float32" or not any(on_cpu))
    chosen = config.weight_sync.transport in ("auto", "in_place")
    chosen = chosen and not config.weight_sync.delta
    return config.generators_sleep and chosen and is_one and alike and len({*on_cpu}) == 1


def slot_bytes(config: RunConfig, shape: DecoderSizes) -> float:
    """Bytes of one trainer rank's part of the versions that lie ready, of all layouts: each rank of a generator has
    its own."""
    if serves_in_place(config):
        return 0.0
    tp, ranks = config.generator.tensor_parallel, config.trainer.parallelism.num_ranks
    if lora := config.trainer.lora:
        return SLOTS * 4 * adapter_parameters(shape, lora) / ranks
    return SLOTS * tp * float(memory.served_bytes(shape, WIDTHS[config.generator.dtype], tp)) / ranks


def cache_bytes(config: RunConfig, shape: DecoderSizes, tokens: int) -> int:
    """Bytes of keys and values of one sequence of so many tokens on one rank of a generator, in whole blocks."""
    blocks = -(-tokens // CACHE_BLOCK_TOKENS)
    each = memory.kv_token_bytes(shape, config.generator.tensor_parallel, kv_width(config))
    return blocks * CACHE_BLOCK_TOKENS * int(each)


def taken(parts: Parts) -> str:
    """`12.34 GiB (weights 4.00, ...)`, the largest first, without what is less than a hundredth."""
    whole = float(total(parts))
    unit, name = (GIB, "GiB") if whole >= GIB / 10 else (2.0**20, "MiB")
    kinds = sorted(((float(size), kind) for kind, size in parts.items() if size >= 0.01 * whole), reverse=True)
    split = ", ".join(f"{kind} {size / unit:.2f}" for size, kind in kinds)
    return f"{whole / unit:.2f} {name}" + (f" ({split})" if len(kinds) > 1 else "")


def levers(config: RunConfig, shape: DecoderSizes) -> Iterator[tuple[str, list[Any]]]:
    """Options that save memory, the cheapest first: those that cost time, those that round, those that change what is
    learnt, those that need more devices. Each with values, those that change the least first."""
    trainer, generator, layout = config.trainer, config.generator, config.trainer.parallelism
    yield "trainer.activation_checkpointing", [True]
    yield "trainer.microbatch_tokens", _halves(trainer.microbatch_tokens, sum(longest(config, shape)))
    if generator.kv_cache_bytes is not None:
        one = cache_bytes(config, shape, sum(longest(config, shape)))
        yield "generator.kv_cache_bytes", _halves(generator.kv_cache_bytes, one)
    yield "generator.max_running", _halves(generator.max_running, config.rollout.group_size)
    yield "trainer.moments_on", ["host"] if trainer.device != "cpu" and trainer.moments_on == "device" else []
    yield "trainer.parallelism.ep", _shared(shape, layout)
    yield "generator.dtype", [name for name in ("bfloat16", "int8") if WIDTHS[name] < WIDTHS[generator.dtype]]
    yield "reference.dtype", [name for name in ("bfloat16", "int8") if WIDTHS[name] < WIDTHS[config.reference.dtype]]
    yield "trainer.dtype", ["bfloat16"]
    is_half = trainer.dtype == "bfloat16" and not trainer.lora
    yield "trainer.weights", ["bfloat16"] if is_half and trainer.weights == "float32" else []
    is_cut = layout.tp > 1 or config.critic.parallelism.tp > 1  # within blocks that share a scale, perhaps
    yield "trainer.moments", ["8bit"] if trainer.moments == "float32" and not is_cut else []
    yield "generator.replicas", _halves(generator.replicas, 1)
    yield "checkpoint.mirror", [False]
    targets = {"targets": [*ATTENTION]} if shape.moe else {}
    yield "trainer.lora", [] if trainer.lora else [{"rank": 16} | targets]
    doubled = [layout.fsdp << power for power in range(1, 8)]
    yield "trainer.parallelism.fsdp", [fsdp for fsdp in doubled if _is_even(shape, layout, fsdp, layout.ep)]
    yield "generator.tensor_parallel", [generator.tensor_parallel << power for power in range(1, 4)]


def _shared(shape: DecoderSizes, layout: ParallelismConfig) -> list[int]:
    """More ranks of a trainer that can share a mixture's experts evenly, and the others each expert."""
    if (moe := shape.moe) is None:
        return []
    ranks, found = layout.fsdp * layout.cp, [layout.ep << power for power in range(1, moe.num_experts.bit_length())]
    evenly = [ep for ep in found if moe.num_experts % ep == ranks % ep == 0]
    return [ep for ep in evenly if _is_even(shape, layout, layout.fsdp, ep)]


def _is_even(shape: DecoderSizes, layout: ParallelismConfig, fsdp: int, ep: int) -> bool:
    """Ranks with the same experts can share each evenly."""
    return ep == 1 or not uneven_shares(shape, fsdp * layout.cp // ep, layout.tp)


def _halves(size: int, least: int) -> list[int]:
    """Halves, quarters and so on of `size`, down to `least`."""
    found = [size >> power for power in range(1, size.bit_length()) if size >> power > least]
    return found + [least] * (least < size)


def way_out(config: RunConfig, shape: DecoderSizes, lacking: Callable[[RunConfig], float]) -> str:
    """End of a sentence: the cheapest lever that makes a run fit; else the fewest of the cheapest ones together; else
    what is missing with all of them.

    Args:
        lacking: bytes that a run lacks, 0 or less where it fits.
    """
    for option, values in levers(config, shape):
        for value in values:
            if _fits(config, {option: value}, lacking):
                return f"set {_said({option: value})}, with which it fits"
    pulled, least = _pulled(config, shape, lacking)
    if least > 0:
        with_them = f"with {_said(pulled)} it still lacks" if pulled else "it lacks"
        return f"{with_them} {taken({'': least})}; use a smaller model, or a device with more memory"
    known = dict(levers(config, shape))
    for option in reversed(list(pulled)):  # from the dearest on, whether less of it will do
        without = {name: value for name, value in pulled.items() if name != option}
        milder = [without, *({**pulled, option: value} for value in known[option]), pulled]
        pulled = next(settings for settings in milder if _fits(config, settings, lacking))
    return f"set {_said(pulled)}, with which it fits"


def _pulled(
    config: RunConfig, shape: DecoderSizes, lacking: Callable[[RunConfig], float]
) -> tuple[dict[str, Any], float]:
    """Levers pulled one after the other, each as far as it helps, until the run fits; and what it lacks then."""
    pulled, least = dict[str, Any](), lacking(config)
    for option, values in levers(config, shape):
        for value in values:
            settings = pulled | {option: value}
            if option == "trainer.lora":  # which is not for weights in bfloat16
                settings = {name: one for name, one in settings.items() if name != "trainer.weights"}
                settings |= {"trainer.weights": "float32"} if config.trainer.weights != "float32" else {}
            other = _with(config, settings)
            if least > 0 and other and (lack := lacking(other)) < least:
                pulled, least = settings, lack
    return pulled, least


def _fits(config: RunConfig, settings: Mapping[str, Any], lacking: Callable[[RunConfig], float]) -> bool:
    other = _with(config, settings)
    return other is not None and lacking(other) <= 0


def _with(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig | None:
    """The run with some options set; None: that cannot be."""
    data = config.model_dump()
    for option, value in settings.items():
        *path, last = option.split(".")
        section = data
        for name in path:
            section = section[name]
        section[last] = value
    try:
        return RunConfig.model_validate(data)
    except ValueError:
        return None


def _said(settings: Mapping[str, Any]) -> str:
    return " and ".join(f"{option} = {_toml(value)}" for option, value in settings.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + "}"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
