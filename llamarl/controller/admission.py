"""`Admission`: which prompts become groups, in which order, and when. Loop 1 of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llamarl.config import RunConfig
from llamarl.controller.buffer import RolloutBuffer
from llamarl.controller.evaluation import HeldOutSet
from llamarl.controller.journal import Journal
from llamarl.controller.records import Key
from llamarl.controller.supervision import Signal
from llamarl.data.sampler import MixtureSampler, PromptOrder, PromptSampler, fingerprint
from llamarl.executors.replies import ControllerState
from llamarl.observability.events import Flow
from llamarl.training.packing import is_flat
from llamarl.types import RAISED, GenerationRequest, Outcome, Prompt, Rollout, RolloutGroup, SamplingParams


class StalenessViolated(AssertionError):
    """A group was older than the proved bound when it was consumed: a bug in the controller."""


class TooManyInvalid(RuntimeError):
    """Most rewards of a step could not be computed: the grader is broken, not the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problems:
    """Prompts that a run trains and is evaluated on, and the tokens that end a response."""

    train: Sequence[Prompt]
    eval: Sequence[HeldOutSet]
    stop_token_ids: tuple[int, ...]
    stops_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Strings that end a turn beside `rollout.stop_strings`, an environment's, by `Prompt.source`."""


def data_fingerprint(prompts: Sequence[Prompt]) -> int:
    """Fingerprint of prompts and answers, in order."""
    return fingerprint((f"{one.prompt_id}\0{one.answer}", one.token_ids_T) for one in prompts)


def sampler_of(prompts: Sequence[Prompt], config: RunConfig) -> PromptOrder:
    """The order in which prompts are drawn, which stand source by source; those without a source are one."""
    sources = dict[str, list[Prompt]]()
    for prompt in prompts:
        sources.setdefault(prompt.source, []).append(prompt)
    samplers = {
        label: PromptSampler(len(own), config.seed, data_fingerprint(own), label) for label, own in sources.items()
    }
    if "" in samplers or not samplers:  # none of who only evaluates, and draws none
        return samplers.get("") or PromptSampler(1, config.seed)
    weights = {source.label: source.weight for source in config.data.sources}
    return MixtureSampler(samplers, weights, {label: len(own) for label, own in sources.items()})


def _by_source(groups: Sequence[RolloutGroup]) -> str:
    """Text: sources of the invalid rewards, and how many each has; empty: there is no mixture."""
    invalid = (
        group.prompt.source
        for group in groups
        for result in group.results
        if group.prompt.source and result.outcome is Outcome.INVALID
    )
    found = ", ".join(f"{number} of source {label!r}" for label, number in Counter(invalid).most_common())
    return f"; {found}" if found else ""


def sampling_by_source(config: RunConfig, problems: Problems) -> dict[str, SamplingParams]:
    """Parameters with which responses are drawn, by `Prompt.source`."""
    rollout = config.rollout
    return {
        label: SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            max_new_tokens=own.rollout.max_new_tokens,
            stop_token_ids=problems.stop_token_ids,
            stop_strings=(*rollout.stop_strings, *problems.stops_of.get(label, ())),
            seed=config.seed,
        )
        for label, own in config.by_source.items()
    }


class Admission:
    """The data position and the buffer that bounds staleness; both go into checkpoints."""

    def __init__(self, config: RunConfig, problems: Problems, state: ControllerState | None, flow: Flow) -> None:
        """`state` is that of a checkpoint to go on from; `flow` hears when groups pass."""
        self._flow = flow
        self.changed = Signal()
        """Groups were scored or dropped, or slots are free."""
        rollout = config.rollout
        self.sampling = sampling_by_source(config, problems)
        """Parameters with which responses are drawn, by the prompts' source."""
        self._group_size = rollout.group_size
        self._prompts = problems.train
        self._sampler = sampler_of(self._prompts, config)
        self._prompt_of = dict[int, int]()
        """Prompt index of each unconsumed group. Those of a resumed run keep their numbers: sampling noise depends on
        these, and the journal knows them by these."""
        if state:
            self._sampler.restore(state["sampler"])
            self._prompt_of |= dict(state["unconsumed"])
        first_group_id = state["next_group_id"] if state else 0
        max_dropped = (rollout.max_attempts - 1) * rollout.prompts_per_step
        self.buffer = RolloutBuffer(
            rollout.prompts_per_step, rollout.max_staleness, rollout.window, first_group_id, max_dropped,
            resumed=sorted(self._prompt_of), max_active=rollout.max_active,
            num_dropped=state.get("num_dropped", 0) if state else 0,
        )  # fmt: skip
        self.num_left = (config.steps - (state["step"] if state else 0)) * rollout.prompts_per_step
        """Groups that the steps to come will consume."""
        self._version = state["step"] if state else 0
        """Newest version that the trainer has made."""
        self._max_attempts = rollout.max_attempts
        self._mask_truncated = config.shaping.mask_truncated
        self._max_invalid_share = config.reward.max_invalid_share
        self._told_of_flat_groups = self._told_of_raised = False

    async def loop(
        self,
        journal: Journal,
        ask: Callable[[Sequence[tuple[GenerationRequest, Prompt]], Mapping[Key, Rollout]], Awaitable[None]],
        deliver: Callable[[Sequence[RolloutGroup]], None],
    ) -> None:
        """Consumes free slots and prompts; waits for slots; produces requests to generators, and scored groups that the
        journal has; unblocked by `made`, and by groups that are dropped."""
        while self.num_left:
            await self.changed.until(lambda: self.num_admissible > 0 or not self.num_left)
            to_ask, held = list[tuple[GenerationRequest, Prompt]](), dict[Key, Rollout]()
            scored = list[RolloutGroup]()
            for request, prompt in self.admit():  # none when the last step has what it needs
                group, rollouts = journal.kept(request.group_id)
                held |= rollouts
                if group is None:
                    to_ask.append((request, prompt))
                else:
                    scored.append(group)
            if scored:
                deliver(scored)
            if to_ask:
                await ask(to_ask, held)

    @property
    def num_admissible(self) -> int:
        """Groups that may be admitted now and will be needed."""
        return min(self.buffer.num_free, self.num_left - self.buffer.num_unconsumed)

    def admit(self) -> list[tuple[GenerationRequest, Prompt]]:
        """Requests for as many groups as may be admitted now."""
        num_active = self.buffer.num_active
        group_ids = self.buffer.admit(self.num_admissible)
        self._flow.mark("admitted", group_ids)
        return [
            self._request(group_id, self.buffer.oldest_version(num_active + place, self._version))
            for place, group_id in enumerate(group_ids)
        ]

    def generated(self, group_id: int) -> None:
        """All of a group is there but its scores."""
        self._flow.mark("generated", [group_id])
        self.buffer.generated(group_id)

    def put(self, groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], int]:
        """Takes scored groups; which groups are ready now, and how many were dropped, for others to be admitted."""
        all_ready, num_dropped = list[RolloutGroup](), 0
        self._flow.mark("scored", [group.group_id for group in groups])
        for group in groups:
            ready, dropped = self.buffer.put(group, is_flat=self._max_attempts > 1 and self.is_flat(group))
            for group_id in dropped:
                del self._prompt_of[group_id]
            all_ready += ready
            num_dropped += len(dropped)
        self.changed.notify()
        return all_ready, num_dropped

    async def batch(self) -> list[RolloutGroup]:
        """The groups of the next step; waits until the window holds them."""
        while (groups := self.buffer.take()) is None:
            await self.changed.wait()
        return groups

    def prompt_of(self, group_id: int) -> int:
        """Index of the prompt of an unconsumed group."""
        return self._prompt_of[group_id]

    def is_flat(self, group: RolloutGroup) -> bool:
        """Whether there is nothing to learn from comparing its rollouts."""
        return is_flat(group, mask_truncated=self._mask_truncated)

    def _request(self, group_id: int, from_version: int) -> tuple[GenerationRequest, Prompt]:
        if group_id not in self._prompt_of:
            self._prompt_of[group_id] = self._sampler.next()
        prompt = self._prompts[self._prompt_of[group_id]]
        request = GenerationRequest(
            group_id=group_id,
            prompt_token_ids_T=prompt.token_ids_T,
            group_size=self._group_size,
            sampling=self.sampling[prompt.source],
            from_version=from_version,
        )
        return request, prompt

    def made(self, version: int, num_groups: int) -> None:
        """The trainer has made `version` of so many groups, whose slots are free."""
        self._version = version
        self.buffer.release(num_groups)
        self.changed.notify()

    def consumed(self, groups: Sequence[RolloutGroup], version: int) -> None:
        """The trainer takes these groups at `version`. Raises StalenessViolated."""
        self.buffer.num_dropped = 0
        self.num_left -= len(groups)
        self._flow.mark("taken", [group.group_id for group in groups])
        for group in groups:
            del self._prompt_of[group.group_id]
            oldest = group.oldest_version
            staleness = version - oldest
            if oldest >= 0 and staleness > self.buffer.staleness_limit:
                raise StalenessViolated(
                    f"group {group.group_id} is {staleness} steps old, the bound is {self.buffer.staleness_limit}"
                )

    def check(self, groups: Sequence[RolloutGroup], step: int) -> str:
        """Whether `step` can learn from these groups; once each, a warning that replies have raised, or that
        `rollout.max_attempts` did not fill it.

        Raises:
            TooManyInvalid: more than `reward.max_invalid_share`.
        """
        results = [result for group in groups for result in group.results]
        reasons = [result.reason for result in results if result.outcome is Outcome.INVALID]
        if len(reasons) > self._max_invalid_share * len(results):
            raise TooManyInvalid(
                f"{len(reasons)} of {len(results)} rewards of step {step} are invalid "
                f"(reward.max_invalid_share = {self._max_invalid_share:g}{_by_source(groups)}); the first says: "
                f"{reasons[0]}"
            )
        raised = [reason for reason in reasons if reason.startswith(RAISED)]
        if raised and not self._told_of_raised:
            self._told_of_raised = True
            return (
                f"{len(raised)} replies of step {step} raised, so nothing is learnt from these episodes; what makes "
                f"`reply` raise lets a policy escape a reward of 0: catch it there. The first: {raised[0]}"
            )
        count = sum(map(self.is_flat, groups)) if self._max_attempts > 1 and not self._told_of_flat_groups else 0
        if not count:
            return ""
        self._told_of_flat_groups = True
        return (
            f"step {step} takes {count} groups whose rewards are all equal, as {self._max_attempts} attempts found "
            "no others (rollout.max_attempts); problems of another difficulty, or a larger group_size, teach more"
        )

    def state(self, step: int) -> ControllerState:
        """State for a checkpoint of `step`, with which after a resume nothing is trained twice or skipped."""
        return {
            "step": step,
            "sampler": self._sampler.state(),
            "next_group_id": self.buffer.next_group_id,
            "unconsumed": sorted(self._prompt_of.items()),
            "num_dropped": self.buffer.num_dropped,
        }
