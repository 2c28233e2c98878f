"""Memory that each executor of a run needs with its settings, and the cheapest settings that make it fit. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from llamarl.config import RunConfig
from llamarl.config.roles import (
    ATTENTION,
    REWARD_MODEL_TOKENS,
    CriticConfig,
    ParallelismConfig,
    ReferenceConfig,
    RewardModelConfig,
    TrainerConfig,
)
from llamarl.models import memory
from llamarl.models.memory import WIDTHS, GeneratorLoad, Parts, TrainerLoad, total
from llamarl.models.sizes import DecoderSizes, adapter_parameters, uneven_shares
from llamarl.observability.report import role_of

CACHE_BLOCK_TOKENS = 16
"""Tokens of a block of keys and values, for all kernels."""
CONTEXT_BYTES = 1 << 29
"""GPU memory that a process takes before its first tensor, including that of libraries."""
SLOTS = 2
"""Versions of the weights that are ready while generators keep up."""
MIRRORS = 4
"""Copies of the state with `checkpoint.mirror`: two that count, one being written, and one to write from."""
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
    """On its host in addition, if its device is a GPU."""
    rests: Parts | None = None
    """On its device while it sleeps. None means that it never sleeps."""
    grows: float = 0.0
    """Further keys and values on its device if there is memory: of `max_running` full contexts."""


def holdings(
    config: RunConfig, shape: DecoderSizes, models: Mapping[str, tuple[Model, Sequence[DecoderSizes]]]
) -> Iterator[RankMemory]:
    """Yields the memory of each executor of a run, each generator separately.

    Args:
        models: settings and shapes of the models besides the policy, by the executor's name. A reference may hold
            several.
    """
    trainer, sleeps = config.trainer, config.generators_sleep
    learns = _optimizing("trainer", trainer.device, trainer.parallelism, trainer_parts(config, shape), config, shape)
    yield replace(learns, rests=_at_rest(learns.parts, trainer.parallelism)) if sleeps else learns
    for name, (settings, shapes) in models.items():
        if isinstance(settings, CriticConfig):
            parts = memory.trainer_bytes(shapes[0], trainer_load(config, shapes[0], settings))
            yield _optimizing(name, settings.device, settings.parallelism, parts, config, None)
        else:
            on_gpu = settings.device != "cpu"
            yield RankMemory(executor=name, num_ranks=1, on_gpu=on_gpu, parts=_scorer_parts(trainer, settings, shapes))
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


def _scorer_parts(
    trainer: TrainerConfig, settings: ReferenceConfig | RewardModelConfig, shapes: Sequence[DecoderSizes]
) -> Parts:
    """Returns bytes of a reference or reward model. One of several models works at a time."""
    is_reference = isinstance(settings, ReferenceConfig)
    tokens = trainer.microbatch_tokens if is_reference else REWARD_MODEL_TOKENS
    found: Parts = {}
    for sizes in shapes:
        load = GeneratorLoad(
            width=WIDTHS[settings.dtype], kv_width=0, kv_tokens=0, copies=1, prefill_tokens=tokens,
            rows=min(tokens, memory.TILE_LOGITS // sizes.vocab_size) if is_reference else 0,
        )  # fmt: skip
        parts = memory.generator_bytes(sizes, load)
        weights = found.get("weights", 0.0) + parts["weights"]
        found = {kind: max(size, found.get(kind, 0.0)) for kind, size in parts.items()} | {"weights": weights}
    return found


def _at_rest(parts: Parts, layout: ParallelismConfig) -> Parts:
    """Returns the memory that a trainer keeps between its steps. With FSDP2 this includes gradients."""
    of_steps = {"copies", "activations", "head"} | ({"gradients"} if layout.fsdp * layout.cp == 1 else set())
    return {kind: size for kind, size in parts.items() if kind not in of_steps}


def in_turns(config: RunConfig, held: Sequence[RankMemory]) -> list[list[RankMemory]]:
    """Returns the executors at each moment: while trainer and critic work, and, if generators sleep then, while
    generators work."""
    if not config.generators_sleep:
        return [list(held)]
    return [
        [
            replace(rank, parts=rank.rests) if rank.rests is not None and _generates(rank) == sleep else rank
            for rank in held
        ]
        for sleep in (True, False)
    ]  # fmt: skip


def _generates(rank: RankMemory) -> bool:
    return role_of(rank.executor) == "generator"


def beside_bytes(config: RunConfig, shape: DecoderSizes) -> int:
    """Returns bytes that a resting trainer takes of a generator's device after its first step and not before."""
    trainer = config.trainer
    shares = config.generators_sleep and "cpu" not in (trainer.device, config.generator.device)
    return int(trainer_parts(config, shape)["moments"]) if shares and trainer.moments_on == "device" else 0


def _optimizing(
    name: str, device: str, layout: ParallelismConfig, parts: Parts, config: RunConfig, published: DecoderSizes | None
) -> RankMemory:
    """Returns the memory of an executor that trains: `parts`, and copies for checkpoints, mirrors and generators, each
    on its device or host."""
    kept = parts["gradients"] + parts["moments"]  # trained weights are as large as their gradients
    copies: Parts = {"checkpoint": kept} | ({"mirror": MIRRORS * kept} if config.checkpoint.mirror else {})
    on_gpu = device != "cpu"
    if on_gpu and config.trainer.moments_on == "host":
        parts = dict(parts)
        copies["moments"] = parts.pop("moments")
    if published and not slots_on_device(config):
        copies["slots"] = slot_bytes(config, published)
    parts = parts if on_gpu else parts | copies
    return RankMemory(
        executor=name, num_ranks=layout.num_ranks, on_gpu=on_gpu, parts=parts, host=copies if on_gpu else {}
    )  # fmt: skip


def trainer_parts(config: RunConfig, shape: DecoderSizes) -> Parts:
    """Returns bytes by kind on the device of one rank of the trainer."""
    parts = memory.trainer_bytes(shape, trainer_load(config, shape))
    return parts | ({"slots": slot_bytes(config, shape)} if slots_on_device(config) else {})


def trainer_load(
    config: RunConfig, shape: DecoderSizes, critic: CriticConfig | None = None, tokens: int | None = None
) -> TrainerLoad:
    """Returns the load of a rank if all responses of a group are as long as possible.

    Args:
        critic: the critic's settings. None means the trainer's load.
        tokens: tokens of a microbatch. None means the largest possible.
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
        half=half, checkpointing=settings.activation_checkpointing is True,
        selective=settings.activation_checkpointing == "selective", flash=on_gpu and half,
        on_gpu=on_gpu, fused=on_gpu and half and not settings.compile,
        tp=layout.tp, cp=layout.cp, pp=layout.pp, shards=layout.fsdp * layout.cp, ep=layout.ep,
        is_critic=critic is not None,
        weight=WIDTHS[settings.weights], moments=memory.MOMENTS_BYTES[settings.moments],
        lora=None if critic else settings.lora,
    )  # fmt: skip


def generator_load(config: RunConfig, shape: DecoderSizes) -> GeneratorLoad:
    """Returns the load of a rank whose cache has the configured size, or that of one longest sequence."""
    generator, tp = config.generator, config.generator.tensor_parallel
    cached = generator.kv_cache_bytes or cache_bytes(config, shape, sum(longest(config, shape)))
    tokens = cached / memory.kv_token_bytes(shape, tp, kv_width(config))
    # On a CPU they serve from the trainer's slot, or from received tensors, which replace those of the last version.
    copies = 2 if generator.device != "cpu" or config.cluster.kind == "hosts" else 1
    if config.generators_sleep and not config.trainer.lora:  # no weights are in use while new ones are written
        copies = 0 if serves_in_place(config) else 1
    if generator.device == "cpu":  # packed copies, except int8 without AVX-512: in use, and the next
        copies += 2
    return GeneratorLoad(
        width=WIDTHS[generator.dtype], kv_width=kv_width(config), kv_tokens=tokens, tp=tp, copies=copies,
        rows=generator.max_running, prefill_tokens=generator.prefill_tokens, lora=config.trainer.lora,
    )  # fmt: skip


def longest(config: RunConfig, shape: DecoderSizes) -> tuple[int, int]:
    """Returns the tokens of the longest possible prompt and response."""
    context, lengths = shape.max_position_embeddings, list[tuple[int, int]]()
    for settings in config.by_source.values():
        prompt = min(settings.data.max_prompt_tokens, context - 1)
        lengths.append((prompt, min(settings.rollout.max_new_tokens, context - prompt)))
    return max(lengths, key=sum)


def kv_width(config: RunConfig) -> int:
    """Returns bytes of a cached scalar."""
    generator = config.generator
    return {"auto": 4 if generator.dtype == "float32" else 2, "bfloat16": 2, "fp8": 1}[generator.kv_dtype]


def slots_on_device(config: RunConfig) -> bool:
    """Returns whether the versions that generators fetch are on the trainer's GPU. Otherwise they are in its host's
    memory."""
    transport = config.weight_sync.transport
    # "auto" takes "cuda_ipc" only if they fit (`training/meter.py: slots_fit`).
    is_on_gpu = transport in ("cuda_ipc", "nixl") or (transport == "auto" and find_spec("nixl") is not None)
    return config.trainer.device != "cpu" and is_on_gpu


def serves_in_place(config: RunConfig) -> bool:
    """Returns whether generators compute with the trainer's own weights: `weight_sync/transports/in_place.py`."""
    trainer, generator = config.trainer, config.generator
    has_one_rank = trainer.parallelism.num_ranks == generator.tensor_parallel == 1 and not trainer.lora
    on_cpu = [executor.device == "cpu" for executor in (trainer, generator)]
    has_same_type = trainer.weights == generator.dtype and (generator.dtype == "float32" or not any(on_cpu))
    is_allowed = config.weight_sync.transport in ("auto", "in_place") and not config.weight_sync.delta
    return config.generators_sleep and is_allowed and has_one_rank and has_same_type and len({*on_cpu}) == 1


def slot_bytes(config: RunConfig, shape: DecoderSizes) -> float:
    """Returns bytes of one trainer rank's part of the versions that are ready, in all layouts: each rank of a generator
    has its own."""
    if serves_in_place(config):
        return 0.0
    tp, ranks = config.generator.tensor_parallel, config.trainer.parallelism.num_ranks
    if lora := config.trainer.lora:
        return SLOTS * 4 * adapter_parameters(shape, lora) / ranks
    return SLOTS * tp * float(memory.served_bytes(shape, WIDTHS[config.generator.dtype], tp)) / ranks


def cache_bytes(config: RunConfig, shape: DecoderSizes, tokens: int) -> int:
    """Returns bytes of keys and values of one sequence of `tokens` tokens on one rank of a generator, in whole
    blocks."""
    blocks = -(-tokens // CACHE_BLOCK_TOKENS)
    each = memory.kv_token_bytes(shape, config.generator.tensor_parallel, kv_width(config))
    return blocks * CACHE_BLOCK_TOKENS * int(each)


def taken(parts: Parts) -> str:
    """Returns `12.34 GiB (weights 4.00, ...)`, the largest first, without parts below a hundredth."""
    whole = float(total(parts))
    unit, name = (GIB, "GiB") if whole >= GIB / 10 else (2.0**20, "MiB")
    kinds = sorted(((float(size), kind) for kind, size in parts.items() if size >= 0.01 * whole), reverse=True)
    split = ", ".join(f"{kind} {size / unit:.2f}" for size, kind in kinds)
    return f"{whole / unit:.2f} {name}" + (f" ({split})" if len(kinds) > 1 else "")


def levers(config: RunConfig, shape: DecoderSizes) -> Iterator[tuple[str, list[Any]]]:
    """Yields options that save memory, with values, the smallest change first.

    The cheapest options come first: options that cost time, then options that round, that change the
    training, and that need more devices.
    """
    trainer, generator, layout = config.trainer, config.generator, config.trainer.parallelism
    yield "trainer.activation_checkpointing", [] if trainer.activation_checkpointing is True else ["selective", True]
    yield "trainer.microbatch_tokens", _halves(trainer.microbatch_tokens, sum(longest(config, shape)))
    if generator.kv_cache_bytes is not None:
        least = cache_bytes(config, shape, sum(longest(config, shape)))
        yield "generator.kv_cache_bytes", _halves(generator.kv_cache_bytes, least)
    yield "generator.max_running", _halves(generator.max_running, config.rollout.group_size)
    yield "trainer.moments_on", ["host"] if trainer.device != "cpu" and trainer.moments_on == "device" else []
    yield "trainer.parallelism.ep", _shared(shape, layout)
    yield "generator.dtype", [name for name in ("bfloat16", "int8") if WIDTHS[name] < WIDTHS[generator.dtype]]
    yield "reference.dtype", [name for name in ("bfloat16", "int8") if WIDTHS[name] < WIDTHS[config.reference.dtype]]
    yield "trainer.dtype", ["bfloat16"]
    is_half = trainer.dtype == "bfloat16" and not trainer.lora
    yield "trainer.weights", ["bfloat16"] if is_half and trainer.weights == "float32" else []
    is_cut = layout.tp > 1 or config.critic.parallelism.tp > 1  # perhaps within blocks that share a scale
    yield "trainer.moments", ["8bit"] if trainer.moments == "float32" and not is_cut else []
    yield "generator.replicas", _halves(generator.replicas, 1)
    yield "checkpoint.mirror", [False]
    targets = {"targets": [*ATTENTION]} if shape.moe else {}
    yield "trainer.lora", [] if trainer.lora else [{"rank": 16} | targets]
    doubled = [layout.fsdp << power for power in range(1, 8)]
    yield "trainer.parallelism.fsdp", [fsdp for fsdp in doubled if _is_even(shape, layout, fsdp, layout.ep)]
    yield "generator.tensor_parallel", [generator.tensor_parallel << power for power in range(1, 4)]


def _shared(shape: DecoderSizes, layout: ParallelismConfig) -> list[int]:
    """Returns larger numbers of ranks that can share a mixture's experts evenly, while the other ranks share each
    expert evenly."""
    if (moe := shape.moe) is None:
        return []
    ranks, doubled = layout.fsdp * layout.cp, [layout.ep << power for power in range(1, moe.num_experts.bit_length())]
    divisors = [ep for ep in doubled if moe.num_experts % ep == ranks % ep == 0]
    return [ep for ep in divisors if _is_even(shape, layout, layout.fsdp, ep)]


def _is_even(shape: DecoderSizes, layout: ParallelismConfig, fsdp: int, ep: int) -> bool:
    return ep == 1 or not uneven_shares(shape, fsdp * layout.cp // ep, layout.tp)


def _halves(size: int, least: int) -> list[int]:
    """Returns halves, quarters and so on of `size`, down to `least`."""
    halves = [size >> power for power in range(1, size.bit_length()) if size >> power > least]
    return halves + [least] * (least < size)


def way_out(config: RunConfig, shape: DecoderSizes, lacking: Callable[[RunConfig], float]) -> str:
    """Returns the end of a sentence: the cheapest option that makes a run fit, else the fewest of the cheapest
    together, else the memory that is missing with all of them.

    Args:
        lacking: returns the bytes that a run lacks, 0 or less if it fits.
    """
    for option, values in levers(config, shape):
        for value in values:
            if _fits(config, {option: value}, lacking):
                return f"set {_assignments({option: value})}, with which it fits"
    pulled, least = _pulled(config, shape, lacking)
    if least > 0:
        with_them = f"with {_assignments(pulled)} it still lacks" if pulled else "it lacks"
        return f"{with_them} {taken({'': least})}; use a smaller model, or a device with more memory"
    known = dict(levers(config, shape))
    for option in reversed(list(pulled)):  # checks whether a smaller change suffices, the most expensive first
        without = {name: value for name, value in pulled.items() if name != option}
        milder = [without, *({**pulled, option: value} for value in known[option]), pulled]
        pulled = next(settings for settings in milder if _fits(config, settings, lacking))
    return f"set {_assignments(pulled)}, with which it fits"


def _pulled(
    config: RunConfig, shape: DecoderSizes, lacking: Callable[[RunConfig], float]
) -> tuple[dict[str, Any], float]:
    """Sets one option after the other, each as far as it helps, until the run fits. Returns them and the bytes that are
    still lacking."""
    pulled, least = dict[str, Any](), lacking(config)
    for option, values in levers(config, shape):
        for value in values:
            settings = pulled | {option: value}
            if option == "trainer.lora":  # excludes weights in bfloat16
                settings = {name: other for name, other in settings.items() if name != "trainer.weights"}
                settings |= {"trainer.weights": "float32"} if config.trainer.weights != "float32" else {}
            other = _with(config, settings)
            if least > 0 and other and (lack := lacking(other)) < least:
                pulled, least = settings, lack
    return pulled, least


def _fits(config: RunConfig, settings: Mapping[str, Any], lacking: Callable[[RunConfig], float]) -> bool:
    other = _with(config, settings)
    return other is not None and lacking(other) <= 0


def _with(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig | None:
    """Returns the run with some options set, or None if these settings are invalid."""
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


def _assignments(settings: Mapping[str, Any]) -> str:
    return " and ".join(f"{option} = {_toml(value)}" for option, value in settings.items())


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(inner)}" for name, inner in value.items()) + "}"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
