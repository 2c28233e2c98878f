"""`Admission`: which prompts become groups, in which order, and when. Loop 1 of a run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llamarl.config import RunConfig
from llamarl.config.schema import staleness_limit
from llamarl.controller.evaluation import HeldOutSet
from llamarl.controller.supervision import Signal
from llamarl.data.sampler import MixtureSampler, PromptOrder, PromptSampler, fingerprint
from llamarl.executors.replies import ControllerState
from llamarl.journal.records import Key
from llamarl.journal.writer import Journal
from llamarl.observability.events import Flow
from llamarl.training.packing import is_flat
from llamarl.types import RAISED, GenerationRequest, Outcome, Prompt, Rollout, RolloutGroup, SamplingParams


class RolloutBuffer:
    """A state machine without clock, threads or tensors: admitted -> (flat ->) ready -> consumed -> released,
    or admitted -> flat -> dropped."""

    def __init__(
        self,
        prompts_per_step: int,
        max_staleness: int,
        window: int,
        first_group_id: int = 0,
        max_dropped: int = 0,
        resumed: Sequence[int] = (),
        max_active: int = 0,
        num_dropped: int = 0,
    ) -> None:
        """
        Args:
            max_active: groups, at most; 0: (S + 1) * P.
            resumed: older groups that nobody has consumed yet; they are admitted again, under their numbers, first.
            num_dropped: groups, by the run that goes on, since its last step began.
        """
        self.prompts_per_step = prompts_per_step
        self.window = window
        self.capacity = max_active or (max_staleness + 1) * prompts_per_step
        self.staleness_limit = staleness_limit(max_staleness, prompts_per_step, window)
        self.next_group_id = first_group_id
        """Id of the next group to be admitted for the first time."""
        self._resumed = list(resumed)
        self._waiting: dict[int, RolloutGroup | None] = {}  # unconsumed groups in admission order; None: not ready
        self._flat: dict[int, RolloutGroup] = {}  # of those, the ones that may be dropped: older groups decide
        self._lacking, self._there = [first_group_id], list[int]()
        """Ids of unconsumed groups, ascending: of those that are to come, or flat, with the next to be admitted behind
        them; and of those that are as good as ready."""
        self._max_dropped = max_dropped
        self.num_dropped = num_dropped
        """Flat groups that were dropped since the last step began, which sets it to 0."""
        self._num_unreleased = 0  # consumed, their version not yet made
        self.num_ready = 0

    @property
    def num_active(self) -> int:
        return len(self._waiting) + self._num_unreleased

    @property
    def num_free(self) -> int:
        """Groups that may be admitted now."""
        return self.capacity - self.num_active

    @property
    def num_unconsumed(self) -> int:
        """Admitted groups that no step has consumed yet."""
        return len(self._waiting)

    def describe(self) -> str:
        """Text for a stall report: how many groups a step takes, and how many are ready."""
        takes = f"takes {self.prompts_per_step} groups (window {self.window}, oldest first)"
        return f"{takes}; {self.num_ready} are ready"

    def admit(self, count: int) -> Sequence[int]:
        """Ids of `count` newly admitted groups, oldest first."""
        assert count <= self.num_free, "admission beyond the staleness bound"
        again, self._resumed = self._resumed[:count], self._resumed[count:]
        first, self.next_group_id = self.next_group_id, self.next_group_id + count - len(again)
        ids = [*again, *range(first, self.next_group_id)]
        self._waiting.update(dict.fromkeys(ids))
        self._lacking[-1:] = [*ids, self.next_group_id]
        return ids

    def generated(self, group_id: int) -> None:
        """All of a group is there but its scores: it is as good as ready, unless `put` finds it flat. Evaluations have
        groups that are none of these."""
        _move(group_id, self._lacking, self._there)

    def oldest_version(self, num_active: int, newest: int) -> int:
        """The oldest version that may serve a group, which was admitted while so many others were active and `newest`
        was the newest that was made."""
        latest = (num_active + self.window - 1) // self.prompts_per_step  # the step that takes it, counted from newest
        return max(0, newest + min(0, latest - self.staleness_limit))

    def put(self, group: RolloutGroup, *, is_flat: bool = False) -> tuple[list[RolloutGroup], list[int]]:
        """`group` is generated and scored. Returns groups that are ready now, and ids of those that are dropped."""
        is_new = self._waiting.get(group.group_id, group) is None and group.group_id not in self._flat
        assert is_new, "unknown group, or put twice"
        ready, dropped = list[RolloutGroup](), list[int]()
        if is_flat:
            self._flat[group.group_id] = group
            _move(group.group_id, self._there, self._lacking)
        else:
            self._waiting[group.group_id] = group
            ready.append(group)
        for flat, is_kept in self._resolved():
            del self._flat[flat.group_id]
            if is_kept:
                self._waiting[flat.group_id] = flat
                ready.append(flat)
            else:
                del self._waiting[flat.group_id]
                del self._lacking[bisect_left(self._lacking, flat.group_id)]
                dropped.append(flat.group_id)
        for one in ready:
            self.generated(one.group_id)
        self.num_dropped += len(dropped)
        self.num_ready += len(ready)
        return ready, dropped

    def _resolved(self) -> list[tuple[RolloutGroup, bool]]:
        """Flat groups whose fate no older group can change any more, and whether they are kept."""
        settled = list[tuple[RolloutGroup, bool]]()
        surely = possibly = self.num_dropped  # flat groups before the one looked at, and those that may turn out so
        for group_id in self._waiting if self._flat else ():
            flat = self._flat.get(group_id)
            if flat is None:
                possibly += self._waiting[group_id] is None
                continue
            if surely >= self._max_dropped or possibly < self._max_dropped:
                settled.append((flat, surely >= self._max_dropped))
            surely, possibly = surely + 1, possibly + 1
        return settled

    def take(self) -> list[RolloutGroup] | None:
        """The P groups of the next step in admission order, or None while the window does not hold enough."""
        if bisect_left(self._there, self._lacking[0] + self.window) < self.prompts_per_step:
            return None
        # The window begins with the oldest group that stays.
        end = self.window + next((one for one, group in self._waiting.items() if group is None), self.next_group_id)
        taken = [group for one, group in self._waiting.items() if group and one < end][: self.prompts_per_step]
        if len(taken) < self.prompts_per_step:
            return None
        for group in taken:
            del self._waiting[group.group_id]
        self._there = [group_id for group_id in self._there if group_id in self._waiting]
        self.num_ready -= len(taken)
        self._num_unreleased += len(taken)
        return taken

    def lacking(self) -> tuple[int, int]:
        """Number of groups, at least, that the first step lacks which cannot be taken yet; and an id: that step needs
        each group below it which is neither ready nor generated."""
        lacking, there, size = self._lacking, self._there, self.prompts_per_step
        # Steps take what they can in its order, so the window of each begins with the same group.
        num_taken = bisect_left(there, lacking[0] + self.window) // size * size

        def num_older(place: int) -> int:
            return place + max(0, bisect_left(there, lacking[place]) - num_taken)

        # The oldest that stays has at most W - 1 behind it that are taken.
        place = bisect_left(range(len(lacking) - 1), size - self.window + 1, key=num_older)
        return max(1, size - len(there) + num_taken), lacking[place]

    def release(self, count: int) -> None:
        """A version was made of `count` more groups."""
        assert 0 <= count <= self._num_unreleased, "released more groups than were consumed"
        self._num_unreleased -= count


def _move(group_id: int, source: list[int], target: list[int]) -> None:
    """Moves an id, if it is there, between two lists in ascending order."""
    place = bisect_left(source, group_id)
    if source[place : place + 1] == [group_id]:
        insort(target, source.pop(place))


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
                group, rollouts = journal.pop_generated(request.group_id)
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

    def add_scored(self, groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], int]:
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

    def version_trained(self, version: int, num_groups: int) -> None:
        """The trainer has made `version` of so many groups, whose slots are free."""
        self._version = version
        self.buffer.release(num_groups)
        self.changed.notify()

    def mark_consumed(self, groups: Sequence[RolloutGroup], version: int) -> None:
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
