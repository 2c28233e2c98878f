"""How long things take in a simulation: one record, from a JSON file, from a plan, or the defaults."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from llamarl.config import ConfigError
from llamarl.planner.generation import decode_parts, steady_context_tokens
from llamarl.planner.plan import Plan

Group = tuple[tuple[int, float], ...]
"""Tokens and reward of each response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatorCosts:
    """The defaults are a 70B model on H100s, rounded from the planner: tensor parallel 8, bfloat16."""

    generator_gpus: int = 8
    """GPUs of one generator replica."""
    trainer_gpus: int = 0
    """GPUs of the trainer when nobody says how many; 0: as many as all generators have."""
    decode_base_s: float = 0.012
    """a: seconds of a decode step, whatever runs: reading the weights, launches."""
    decode_per_rollout_s: float = 5e-5
    """b: further seconds per rollout in the step: its KV cache, its share of the products."""
    prefill_token_s: float = 3.5e-5
    """Seconds per prompt token; a prompt is prefilled once for its group."""
    train_base_s: float = 0.2
    """Seconds of an optimizer step that do not depend on its tokens: optimizer, host."""
    train_token_gpu_s: float = 1e-3
    """GPU-seconds per trained token, prompts included: forward, backward, recompute, communication."""
    publish_s: float = 0.5
    """Seconds in which the trainer makes its weights available."""
    adopt_s: float = 0.6
    """Seconds in which a generator stands still to take new weights over."""
    save_s: float = 10.0
    """Seconds of a checkpoint in which the trainer stands still."""
    score_s: float = 0.02
    """Mean seconds to judge one response, exponentially distributed."""
    score_workers: int = 64
    """Responses judged at the same time."""
    score_timeout_s: float = 10.0
    """Seconds after which the reward gives a response up; it is then invalid."""
    generator_start_s: float = 60.0
    """Seconds until a new generator process has loaded its model."""
    prompt_tokens: int = 512
    """Length of every prompt."""
    response_tokens: float = 1200.0
    """Mean of the lognormal response length, before the cut at `rollout.max_new_tokens`."""
    response_sigma: float = 0.7
    """Log-deviation of the response length; 0 makes all equal."""
    response_lengths: tuple[int, ...] = ()
    """Measured lengths to draw from instead of the lognormal."""
    measured_groups: tuple[Group, ...] = ()
    """Groups of a real run in the order of their prompts, one (tokens, reward) per response; group g of the simulation
    is the g-th of them, and from the first on again. Instead of drawn lengths and rewards."""
    skips_equal_rewards: bool = False
    """The trainer spends nothing on groups in which all rewards are equal, as their advantages are 0."""
    call_s: float = 0.0
    """Seconds that a call and its answer are under way."""
    cores: float = 0
    """Cores of the one machine that all executors on `cpu` and the controller share, or a container's part of them; 0:
    everybody has his own."""
    controller_rollout_s: float = 0.0
    """With `cores`: processor seconds of the controller, and of messages in executors, per rollout."""

    @classmethod
    def from_plan(cls, plan: Plan) -> SimulatorCosts:
        """What the planner's roofline says of the plan's layouts, as lines through two points."""
        request, generator, trainer = plan.request, plan.generator, plan.trainer
        one, full = sum(
            decode_parts(
                request,
                generator.pool,
                tp=np.array([generator.tp] * 2),
                weight_bytes=np.array([generator.weight_bytes] * 2),
                active=np.array([1.0, generator.slots]),
                context_tokens=steady_context_tokens(request),
            ).values(),
            start=np.zeros(2),
        )
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
            prompt_tokens=request.prompt_tokens,
            response_tokens=request.lengths.mean_tokens,
        )

    @classmethod
    def load(cls, path: str | Path) -> SimulatorCosts:
        """Costs from a JSON object with the fields of this record, or from the `costs` of a profile.

        What is missing keeps its default.

        Raises:
            ConfigError: the file cannot be read, or a field is unknown or impossible.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read costs {path}: {error}; give a JSON object of numbers") from None
        if not isinstance(data, dict):
            raise ConfigError(f'costs {path} hold no JSON object; write {{"decode_base_s": 0.012, ...}}')
        if isinstance(data.get("costs"), dict):
            data = data["costs"]
        known = {field.name for field in dataclasses.fields(cls)}
        for name, value in data.items():
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(sorted(known))}"
                raise ConfigError(f"{path}: `{name}` is not a cost; {hint}")
            _check(path, name, value)
        if "response_lengths" in data:
            data["response_lengths"] = tuple(data["response_lengths"])
        if "measured_groups" in data:
            data["measured_groups"] = tuple(
                tuple((tokens, float(reward)) for tokens, reward in group) for group in data["measured_groups"]
            )
        return cls(**data)

    def save(self, path: str | Path) -> None:
        """Writes what `load` reads. Raises OSError."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


def _check(path: str | Path, name: str, value: object) -> None:
    if name == "response_lengths":
        if not isinstance(value, list) or not all(isinstance(one, int) and one >= 1 for one in value):
            raise ConfigError(f"{path}: `{name}` must be a list of whole numbers of at least 1")
        return
    if name == "measured_groups":
        if not isinstance(value, list) or not all(_is_group(group) for group in value):
            raise ConfigError(f"{path}: `{name}` must be a list of groups, each a list of [tokens, reward]")
        return
    if name == "skips_equal_rewards":
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: `{name} = {value!r}`; give true or false")
        return
    whole = name in ("generator_gpus", "trainer_gpus", "score_workers", "prompt_tokens")
    positive = (whole and name != "trainer_gpus") or name in ("decode_base_s", "response_tokens")
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not 0 <= value < float("inf") or (positive and not value):
        if whole:
            kind = f"a whole number of at least {int(positive)}"
        else:
            kind = "a number above 0" if positive else "a number of at least 0"
        raise ConfigError(f"{path}: `{name} = {value!r}`; give {kind}")


def _is_group(group: object) -> bool:
    return (
        isinstance(group, list)
        and len(group) > 0
        and all(
            isinstance(one, list)
            and len(one) == 2
            and isinstance(one[0], int)
            and one[0] >= 0
            and isinstance(one[1], int | float)
            for one in group
        )
    )


class ResponseLengths:
    """Length of each rollout, a function of (seed, group, index) alone: whoever generates it, and however often."""

    def __init__(self, costs: SimulatorCosts, limit_tokens: int, seed: int) -> None:
        self._measured = np.array(costs.response_lengths)
        self._groups = costs.measured_groups
        self._sigma = costs.response_sigma
        self._mu = float(np.log(costs.response_tokens)) - self._sigma**2 / 2
        self.limit_tokens = limit_tokens
        self._seed = seed

    def draw(self, group_id: int, group_size: int) -> list[int]:
        """One length per rollout, in tokens, 1 to the limit."""
        if self._groups:
            return [min(max(tokens, 1), self.limit_tokens) for tokens, _ in self._chosen(group_id, group_size)]
        random = keyed(self._seed, LENGTHS, group_id)
        if len(self._measured):
            lengths = random.choice(self._measured, group_size)
        else:
            lengths = np.exp(self._mu + self._sigma * random.standard_normal(group_size))
        return np.clip(np.rint(lengths), 1, self.limit_tokens).astype(int).tolist()

    def rewards(self, group_id: int, group_size: int) -> list[float] | None:
        """The measured rewards of the same rollouts, 0 for those that the limit cuts; None when none were measured."""
        if not self._groups:
            return None
        chosen = self._chosen(group_id, group_size)
        return [reward if tokens <= self.limit_tokens else 0.0 for tokens, reward in chosen]

    def _chosen(self, group_id: int, group_size: int) -> list[tuple[int, float]]:
        """All of the measured group; a part of it, or some of it again, when the group has another size."""
        group = self._groups[group_id % len(self._groups)]
        if len(group) == group_size:
            return list(group)
        order = keyed(self._seed, LENGTHS, group_id).permutation(len(group))
        return [group[order[number % len(group)]] for number in range(group_size)]


LENGTHS, SCORES, FAULTS = 1, 2, 3
"""Purposes of random numbers."""


def keyed(seed: int, purpose: int, number: int) -> np.random.Generator:
    """Random numbers that depend on the key alone, not on the order of events."""
    return np.random.Generator(np.random.Philox(key=[(seed << 8) + purpose, number]))
