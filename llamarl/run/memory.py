"""Memory of a run's executors compared with this machine's: lines for people, and errors for runs that do not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from llamarl.config import ConfigError, RunConfig
from llamarl.models import fit
from llamarl.models.fit import CONTEXT_BYTES, RankMemory, taken
from llamarl.models.folder import load_shape
from llamarl.models.memory import total
from llamarl.models.shape import ModelShape
from llamarl.models.sizes import DecoderSizes
from llamarl.observability.spans import available_bytes
from llamarl.run.placement import LocalPlacer, aligned, device_bytes, models_in_use, wanted_executors

HOST = "this host"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineMemory:
    """Memory of a machine in bytes."""

    host: float | None
    """Free host memory. None means unknown."""
    gpus: tuple[int, ...] = ()
    """Total memory of each GPU."""

    def of(self, place: str) -> float | None:
        """Returns the bytes of a place. None means unknown."""
        if place == HOST:
            return self.host
        number = int(place.removeprefix("cuda:"))
        return self.gpus[number] if number < len(self.gpus) else None


def described_machine(text: str) -> MachineMemory:
    """Parses a description of another machine: `8x80` has eight GPUs of 80 GB, `0` has none. Raises ConfigError."""
    if not (found := re.fullmatch(r"0|([1-9][0-9]{0,4})x([1-9][0-9]{0,3})", text)):
        raise ConfigError(f"--gpus = {text!r}: write number and GB of each, such as 8x80, or 0 for none")
    return MachineMemory(host=None, gpus=(int(found[2] or 0) * 10**9,) * int(found[1] or 0))


def machine_memory(config: RunConfig) -> MachineMemory:
    """Returns this machine's memory. Reads GPUs only if a role uses one. Raises ConfigError if torch cannot count
    them."""
    wants_gpu = any(one.device != "cpu" for one in wanted_executors(config))
    return MachineMemory(host=available_bytes(), gpus=device_bytes() if wants_gpu else ())


def run_holdings(config: RunConfig, shape: DecoderSizes) -> list[RankMemory]:
    """Returns the memory of each executor of a run. Raises ConfigError if a model cannot be read."""
    models = dict[str, tuple[fit.Model, list[DecoderSizes]]]()
    for name, settings in models_in_use(config).items():
        paths = set(config.references.values()) if name == "reference" else {settings.path or config.model.path}
        models[name] = settings, [shape if path == config.model.path else load_shape(path) for path in sorted(paths)]
    return list(fit.holdings(config, shape, models))


Shares = dict[str, dict[str, dict[str, float]]]
"""Bytes by place (`this host`, `cuda:0`), executor and kind."""


def shares(config: RunConfig, held: Sequence[RankMemory], num_gpus: int) -> Shares:
    """Returns the shares of each place at its fullest moment. Raises ConfigError if an executor has no place."""
    moments = shares_in_turns(config, held, num_gpus)

    def taken_of(place: str, moment: Shares) -> float:
        return sum(map(total, moment.get(place, {}).values()))

    places = dict.fromkeys(place for moment in moments for place in moment)
    return {place: max(moments, key=partial(taken_of, place))[place] for place in places}


def shares_in_turns(config: RunConfig, held: Sequence[RankMemory], num_gpus: int) -> list[Shares]:
    """Returns the shares while trainer and critic work, then while generators work; only one if no executor sleeps."""
    return [_shares(config, at_once, num_gpus) for at_once in fit.in_turns(config, held)]


def _shares(config: RunConfig, held: Sequence[RankMemory], num_gpus: int) -> Shares:
    placer, found = LocalPlacer(config, num_devices=num_gpus), Shares()
    for one in held:
        ranks = one.num_ranks
        devices = [f"cuda:{device}" for _, device in placer.devices(one.executor)]
        for place in devices:
            each = {kind: float(size) for kind, size in one.parts.items()} | {"context": float(CONTEXT_BYTES)}
            # In one process, all ranks share the first device.
            found.setdefault(place, {})[one.executor] = each
        on_host = {kind: float(ranks * size) for kind, size in (one.host if devices else one.parts).items()}
        if on_host:
            found.setdefault(HOST, {})[one.executor] = on_host
    return found


def check_memory(config: RunConfig, shape: ModelShape, machine: MachineMemory | None = None) -> None:
    """Raises ConfigError if a run does not fit into the machine's memory. The message lists the executors at the
    fullest place, and the cheapest setting that makes the run fit."""
    machine = machine or machine_memory(config)
    lacking = partial(_lacking, shape=shape, machine=machine)
    if lacking(config) <= 0:
        return
    places = shares(config, run_holdings(config, shape), len(machine.gpus))
    place = max(places, key=lambda place: _lack(places[place], machine.of(place)))
    here, there = places[place], machine.of(place) or 0.0
    largest = max(here, key=lambda executor: total(here[executor]))
    others = "".join(f", {name} {taken(parts)}" for name, parts in here.items() if name != largest)
    raise ConfigError(
        f"the {largest} takes {taken(here[largest])} of {place}{' next to' + others[1:] if others else ''}, and "
        f"{taken({'': there})} are there; {fit.way_out(config, shape, lacking)}"
    )


def _lack(executors: Mapping[str, Mapping[str, float]], there: float | None) -> float:
    return -1.0 if there is None else sum(sum(parts.values()) for parts in executors.values()) - there


def _lacking(config: RunConfig, shape: ModelShape, machine: MachineMemory) -> float:
    """Returns the bytes that the fullest place lacks. Infinite if there are fewer GPUs than ranks."""
    try:
        places = shares(config, run_holdings(config, shape), len(machine.gpus))
    except ConfigError:
        return float("inf")
    if machine.gpus and any(machine.of(place) is None for place in places.keys() - {HOST}):
        return float("inf")
    return max((_lack(executors, machine.of(place)) for place, executors in places.items()), default=-1.0)


def memory_lines(config: RunConfig, shape: DecoderSizes, machine: MachineMemory | None = None) -> list[str]:
    """Returns a line per executor with the memory of one rank by kind, and a line per device with its memory."""
    machine, held = machine or machine_memory(config), run_holdings(config, shape)
    rows = [("executor", "ranks", "device", "each takes")]
    for one in held:
        up_to = f", and up to {taken({'': one.grows})} more for keys and values if memory is free" if one.grows else ""
        beside = f"; of its host {taken(one.host)}" if one.host else ""
        device = "gpu" if one.on_gpu else "cpu"
        rows.append((one.executor, str(one.num_ranks), device, taken(one.parts) + up_to + beside))
    lines = aligned(rows)
    if config.cluster.kind == "hosts":
        return [*lines, "the memory of the hosts is known when they connect"]
    if config.generators_sleep:
        weights = "the trainer's own weights" if fit.serves_in_place(config) else "a copy of the trainer's weights"
        lines.append(
            f"generators sleep while the trainer works, and serve {weights}; the larger of the two peaks counts"
        )
    for place, executors in sorted(shares(config, held, len(machine.gpus)).items()):
        there = machine.of(place)
        of = "the free memory is not known" if there is None else f"{taken({'': there})} are there"
        every = sum(map(total, executors.values()))
        lines.append(f"{place}: {taken({'': every})} at least, and {of}")
    return lines
