"""`Faults` of a simulation, and their times. Random faults depend on the seed alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from llamarl.config import ConfigError, did_you_mean

HELP = (
    "comma-separated: slow=SHARExFACTOR, die=REPLICA@SECONDS, deaths=RATE (per hour, of all generators), "
    "join=COUNT@SECONDS, reward_timeouts=SHARE; for example slow=0.01x4,deaths=2,die=3@600"
)
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_FORMS = {
    "slow": (rf"{_NUMBER}x{_NUMBER}", "slow=0.01x4 (1 % of the replicas, four times slower)"),
    "die": (rf"([0-9]+)@{_NUMBER}", "die=3@600 (generator-3 after 600 s)"),
    "deaths": (_NUMBER, "deaths=2 (per hour)"),
    "join": (rf"([0-9]+)@{_NUMBER}", "join=8@600 (eight generators after 600 s)"),
    "reward_timeouts": (_NUMBER, "reward_timeouts=0.001 (of all responses)"),
}
"""Value and example of each fault."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Slow generators, deaths, joins and rewards that never come; by default nothing goes wrong."""

    slow_share: float = 0.0
    """Share of the generators that are slow, 0 to 1."""
    slow_factor: float = 1.0
    """Factor by which everything takes longer on slow generators."""
    deaths: tuple[tuple[float, int], ...] = ()
    """(seconds from the start of the loop, replica) of each generator that dies at a given time."""
    deaths_per_hour: float = 0.0
    """Further deaths at random times, of random generators."""
    joins: tuple[tuple[float, int], ...] = ()
    """(seconds from the start of the loop, count) of generators that come in addition."""
    reward_timeout_share: float = 0.0
    """Share of responses that the reward never judges, 0 to 1."""

    def slowness(self, replica: int, num_replicas: int) -> float:
        """Factor of one replica: the slow ones are spread evenly, and there is one as soon as the share is not 0."""
        count = math.ceil(self.slow_share * num_replicas)
        before, after = replica * count // num_replicas, (replica + 1) * count // num_replicas
        return self.slow_factor if replica < num_replicas and before != after else 1.0

    @classmethod
    def parse(cls, text: str, num_replicas: int) -> Faults:
        """`slow=0.01x4,deaths=2`. Raises ConfigError, with the right form of the part that is wrong."""
        values = _read(text)
        ((slow_share, slow_factor),) = values["slow"] or [(0.0, 1.0)]
        ((per_hour,),), ((timeouts,),) = (values[name] or [(0.0,)] for name in ("deaths", "reward_timeouts"))
        for name, share in (("slow", slow_share), ("reward_timeouts", timeouts)):
            if share > 1:
                raise ConfigError(f"--faults: `{name}` = {share:g} is a share of all; give at most 1")
        if slow_factor < 1:
            raise ConfigError(f"--faults: slow generators are {slow_factor:g} times slower; give at least 1")
        for replica, _ in values["die"]:
            if replica >= num_replicas:
                raise ConfigError(
                    f"--faults: `die={replica:g}` names no generator; there are {num_replicas}, 0 to {num_replicas - 1}"
                )
        return cls(
            slow_share=slow_share,
            slow_factor=slow_factor,
            deaths=tuple((at_s, int(replica)) for replica, at_s in values["die"]),
            deaths_per_hour=per_hour,
            joins=tuple((at_s, int(count)) for count, at_s in values["join"]),
            reward_timeout_share=timeouts,
        )


def _read(text: str) -> dict[str, list[tuple[float, ...]]]:
    """The numbers of each fault, by name. Raises ConfigError."""
    values = {name: list[tuple[float, ...]]() for name in _FORMS}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in _FORMS:
            raise ConfigError(f"--faults: `{name}` is not a fault; {did_you_mean(name, _FORMS)} Write {HELP}")
        found = re.fullmatch(_FORMS[name][0], value)
        if not found:
            raise ConfigError(f"--faults: `{part}` cannot be read; write {_FORMS[name][1]}")
        values[name].append(tuple(float(group) for group in found.groups()))
    for name in ("slow", "deaths", "reward_timeouts"):
        if len(values[name]) > 1:
            raise ConfigError(f"--faults: `{name}` is given {len(values[name])} times; give it once")
    return values
