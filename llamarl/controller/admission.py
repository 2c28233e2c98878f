"""Loop 1 of a run: which prompts become groups, in which order and when. `RolloutBuffer` bounds their staleness.

Groups are numbered 0, 1, 2, ... in the order of their admission. With P groups per step, S = max_staleness and
window W:

- *Admission.* Group i is admitted only while fewer than A groups are active, where A is (S + 1) * P or `max_active`. A
  group is active from its admission until the version that was trained on it is *made*: until the optimizer step that
  takes the group has ended (`Admission.version_trained`, `RolloutBuffer.free`). Its request carries the oldest
  version that may serve it (`oldest_version`). The request leaves at once, and waits at its generator until that
  generator serves this version or a newer one.
- *Window.* While h is the oldest unconsumed group, only groups below h + W may be consumed, oldest first.
- *Replacement.* A flat group, in which all rewards are equal, may be dropped. It is then no longer active, and a new
  group joins the end of the order. Between two steps at most `max_dropped` groups are dropped: those with the smallest
  numbers, regardless of the order in which they finish. Every later flat group is kept. So each step consumes exactly P
  groups.

Then no group is older than L = S + ceil((W - 1) / P) optimizer steps when it is consumed. Proof: let a be the newest
version that is made when i is admitted, and n the number of groups that are active then. The a * P groups behind a are
consumed. Of the others, at most n are older than i and not dropped, since they are active. At most W - 1 are younger
than i and consumed before it. So i is consumed at version a + floor((n + W - 1) / P) or an older one. Its tokens are of
version a + min(0, floor((n + W - 1) / P) - L) or of newer ones. As n < (S + 1) * P, that floor is at most L. With S = 0
the window does not matter, since a step takes all P active groups. `docs/staleness.md` has the proof at length.
Discarding old groups would bound the staleness too, but it favors short responses.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llamarl.config import RunConfig
from llamarl.config.schema import staleness_limit
from llamarl.controller.evaluation import HeldOutSet
from llamarl.controller.progress import Progress
from llamarl.controller.supervision import Signal
from llamarl.data.sampler import MixtureSampler, PromptOrder, PromptSampler, fingerprint
from llamarl.executors.replies import ControllerState
from llamarl.journal.records import Key
from llamarl.journal.writer import Journal
from llamarl.observability.sinks import Flow
from llamarl.training.packing import is_flat
from llamarl.types import RAISED, GenerationRequest, Outcome, Prompt, Rollout, RolloutGroup, SamplingParams


class StalenessViolated(AssertionError):
    """A consumed group was older than the proved bound: a bug in the controller."""


class TooManyInvalid(RuntimeError):
    """Most rewards of a step could not be computed: the grader is broken, not the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problems:
    """Prompts that a run trains and is evaluated on, and the tokens that end a response."""

    train: Sequence[Prompt]
    eval: Sequence[HeldOutSet]
    stop_token_ids: tuple[int, ...]
    stops_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Strings of the environment that end a turn, in addition to `rollout.stop_strings`, by `Prompt.source`."""


def data_fingerprint(prompts: Sequence[Prompt]) -> int:
    """Returns a fingerprint of prompts and answers, in order."""
    return fingerprint((f"{prompt.prompt_id}\0{prompt.answer}", prompt.token_ids_T) for prompt in prompts)


def sampler_of(prompts: Sequence[Prompt], config: RunConfig) -> PromptOrder:
    """Returns the order in which prompts are drawn. `prompts` are sorted by source."""
    by_source = dict[str, list[Prompt]]()
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    samplers = {
        label: PromptSampler(len(part), config.seed, data_fingerprint(part), label) for label, part in by_source.items()
    }
    if "" in samplers or not samplers:  # one source without a name, or an evaluation, which draws no prompts
        return samplers.get("") or PromptSampler(1, config.seed)
    weights = {source.label: source.weight for source in config.data.sources}
    return MixtureSampler(samplers, weights, {label: len(part) for label, part in by_source.items()})


def _invalid_by_source(groups: Sequence[RolloutGroup]) -> str:
    invalid = (
        group.prompt.source
        for group in groups
        for result in group.results
        if group.prompt.source and result.outcome is Outcome.INVALID
    )
    counts = ", ".join(f"{number} of source {label!r}" for label, number in Counter(invalid).most_common())
    return f"; {counts}" if counts else ""


def sampling_by_source(config: RunConfig, problems: Problems) -> dict[str, SamplingParams]:
    """Returns sampling parameters by `Prompt.source`."""
    rollout = config.rollout
    return {
        label: SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            max_new_tokens=source.rollout.max_new_tokens,
            stop_token_ids=problems.stop_token_ids,
            stop_strings=(*rollout.stop_strings, *problems.stops_of.get(label, ())),
            seed=config.seed,
        )
        for label, source in config.by_source.items()
    }


class Admission:
    """Draws prompts, admits them as groups while slots are free, and gives each step its groups.

    The position in the data and the buffer are part of each checkpoint.

    Example::

        admission = Admission(config, problems, None, telemetry.flow, Progress())
        requests = admission.admit()                     # one request per free slot
        admission.add_scored(groups)                     # once they are generated and scored
        groups = await admission.batch()                 # P groups for the next step
        admission.version_trained(1, len(groups))        # frees their slots
    """

    def __init__(
        self, config: RunConfig, problems: Problems, state: ControllerState | None, flow: Flow, progress: Progress
    ) -> None:
        """
        Args:
            state: of the checkpoint to resume from; None means that the run starts.
            flow: records when each group passes a stage.
        """
        self._flow, self._progress = flow, progress
        self.changed = Signal()
        """Notified when groups were scored or dropped, or slots became free."""
        self.dispatched = asyncio.Event()
        """Set while the tasks that send requests for all free slots have been started."""
        rollout = config.rollout
        self.sampling = sampling_by_source(config, problems)
        """Sampling parameters by `Prompt.source`."""
        self._group_size = rollout.group_size
        self._prompts = problems.train
        self._sampler = sampler_of(self._prompts, config)
        self._prompt_of = dict[int, int]()
        """Prompt index by unconsumed group. Groups keep their ids when a run resumes: the sampling noise and the
        journal use them."""
        if state:
            self._sampler.restore(state["sampler"])
            self._prompt_of |= dict(state["unconsumed"])
        self.buffer = RolloutBuffer(
            BufferLimits(
                prompts_per_step=rollout.prompts_per_step,
                max_staleness=rollout.max_staleness,
                window=rollout.window,
                max_dropped=(rollout.max_attempts - 1) * rollout.prompts_per_step,
                max_active=rollout.max_active,
            ),
            first_group_id=state["next_group_id"] if state else 0,
            resumed=sorted(self._prompt_of),
            num_dropped=state.get("num_dropped", 0) if state else 0,
        )
        self.num_left = (config.steps - (state["step"] if state else 0)) * rollout.prompts_per_step
        """Groups that the remaining steps will consume."""
        self._max_attempts = rollout.max_attempts
        self._mask_truncated = config.shaping.mask_truncated
        self._max_invalid_share = config.reward.max_invalid_share
        self._warned_of_flat = self._warned_of_raised = False

    async def loop(
        self,
        journal: Journal,
        ask: Callable[[Sequence[tuple[GenerationRequest, Prompt]], Mapping[Key, Rollout]], Awaitable[None]],
        deliver: Callable[[Sequence[RolloutGroup]], None],
    ) -> None:
        """Consumes free slots and prompts; waits for slots; produces requests to generators, and scored groups that the
        journal holds; unblocked by `version_trained`, and by `add_scored` when it drops groups."""
        try:
            while self.num_left:
                if self.num_admissible <= 0:
                    self.dispatched.set()
                await self.changed.until(lambda: self.num_admissible > 0 or not self.num_left)
                to_ask, held = list[tuple[GenerationRequest, Prompt]](), dict[Key, Rollout]()
                scored = list[RolloutGroup]()
                for request, prompt in self.admit():  # none once the last step has all its groups
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
        finally:
            self.dispatched.set()

    @property
    def num_admissible(self) -> int:
        """Groups that may be admitted now and will be needed."""
        return min(self.buffer.num_free, self.num_left - self.buffer.num_unconsumed)

    def admit(self) -> list[tuple[GenerationRequest, Prompt]]:
        """Admits a group for each free slot. Returns their requests and prompts."""
        num_active = self.buffer.num_active
        group_ids = self.buffer.admit(self.num_admissible)
        self._flow.mark("admitted", group_ids)
        newest = self._progress.made
        return [
            self._request(group_id, self.buffer.oldest_version(num_active + place, newest))
            for place, group_id in enumerate(group_ids)
        ]

    def mark_generated(self, group_id: int) -> None:
        """Notes that all rollouts of a group have ended."""
        self._flow.mark("generated", [group_id])
        self.buffer.mark_generated(group_id)

    def add_scored(self, groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], int]:
        """Adds scored groups. Returns the groups that became ready, and the number of dropped ones."""
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
        """Waits until the window holds the groups of the next step. Returns them."""
        while (groups := self.buffer.take()) is None:
            await self.changed.wait()
        return groups

    def prompt_of(self, group_id: int) -> int:
        """Returns the prompt index of an unconsumed group."""
        return self._prompt_of[group_id]

    def is_flat(self, group: RolloutGroup) -> bool:
        """Whether a comparison of the group's rollouts teaches nothing."""
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
        """Notes that `version` is made, and frees the slots of the groups that it was trained on."""
        self._progress.made = version
        self.buffer.free(num_groups)
        if self.num_admissible > 0:
            self.dispatched.clear()
        self.changed.notify()

    def mark_consumed(self, groups: Sequence[RolloutGroup], version: int) -> None:
        """Notes that a step at `version` takes these groups. Raises StalenessViolated."""
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
        """Checks the groups of `step`. Returns a warning, or an empty string.

        It warns once of replies that raised, and once of steps that `rollout.max_attempts` did not fill.

        Raises:
            TooManyInvalid: more than `reward.max_invalid_share` of the rewards are invalid.
        """
        results = [result for group in groups for result in group.results]
        reasons = [result.reason for result in results if result.outcome is Outcome.INVALID]
        if len(reasons) > self._max_invalid_share * len(results):
            raise TooManyInvalid(
                f"{len(reasons)} of {len(results)} rewards of step {step} are invalid "
                f"(reward.max_invalid_share = {self._max_invalid_share:g}{_invalid_by_source(groups)}); the first "
                f"says: {reasons[0]}"
            )
        raised = [reason for reason in reasons if reason.startswith(RAISED)]
        if raised and not self._warned_of_raised:
            self._warned_of_raised = True
            return (
                f"{len(raised)} replies of step {step} raised, so these episodes are not trained on; a policy that "
                f"makes `reply` raise escapes a reward of 0, so catch the exception there. The first: {raised[0]}"
            )
        num_flat = sum(map(self.is_flat, groups)) if self._max_attempts > 1 and not self._warned_of_flat else 0
        if not num_flat:
            return ""
        self._warned_of_flat = True
        return (
            f"step {step} takes {num_flat} groups whose rewards are all equal, as {self._max_attempts} attempts found "
            "no others (rollout.max_attempts); problems of another difficulty, or a larger group_size, teach more"
        )

    def state(self, step: int) -> ControllerState:
        """Returns the state for the checkpoint of `step`. A run that resumes from it neither repeats nor skips a
        prompt."""
        return {
            "step": step,
            "sampler": self._sampler.state(),
            "next_group_id": self.buffer.next_group_id,
            "unconsumed": sorted(self._prompt_of.items()),
            "num_dropped": self.buffer.num_dropped,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLimits:
    """Limits of a `RolloutBuffer`, in groups unless noted."""

    prompts_per_step: int
    max_staleness: int
    """S, in optimizer steps."""
    window: int
    max_dropped: int = 0
    """Flat groups that are dropped between two steps, at most."""
    max_active: int = 0
    """0 means (S + 1) * P."""

    @property
    def capacity(self) -> int:
        return self.max_active or (self.max_staleness + 1) * self.prompts_per_step

    @property
    def staleness(self) -> int:
        """L, in optimizer steps."""
        return staleness_limit(self.max_staleness, self.prompts_per_step, self.window)


class RolloutBuffer:
    """Bounds the staleness by admission, and orders consumption by a window.

    A state machine without clock, threads or tensors. A group is admitted, then perhaps flat, then ready, consumed and
    freed; or admitted, flat and dropped.

    Example::

        buffer = RolloutBuffer(BufferLimits(prompts_per_step=2, max_staleness=1, window=2))
        first, *_ = buffer.admit(buffer.num_free)    # ids of 4 groups
        ready, dropped = buffer.put(group)           # a scored group
        groups = buffer.take()                       # 2 groups, or None
        buffer.free(2)                               # their version is made
    """

    def __init__(
        self, limits: BufferLimits, first_group_id: int = 0, resumed: Sequence[int] = (), num_dropped: int = 0
    ) -> None:
        """
        Args:
            resumed: ids of unconsumed groups of a resumed run. They are admitted first, under their ids.
            num_dropped: groups that the resumed run has dropped since its last step began.
        """
        self.prompts_per_step = limits.prompts_per_step
        self.window = limits.window
        self.capacity = limits.capacity
        self.staleness_limit = limits.staleness
        self.next_group_id = first_group_id
        """Id of the next group that is admitted for the first time."""
        self._resumed = list(resumed)
        self._waiting: dict[int, RolloutGroup | None] = {}  # unconsumed groups in admission order; None means not ready
        self._flat: dict[int, RolloutGroup] = {}  # those of them that may be dropped, depending on older groups
        self._missing, self._generated = [first_group_id], list[int]()
        """Ids of unconsumed groups, ascending. `_missing`: not generated yet, or flat; the last is the next id.
        `_generated`: ready, or waiting for their scores."""
        self._max_dropped = limits.max_dropped
        self.num_dropped = num_dropped
        """Flat groups that were dropped since the last step began, which resets it."""
        self._num_consumed = 0
        """Consumed groups whose version is not made yet."""
        self.num_ready = 0

    @property
    def num_active(self) -> int:
        return len(self._waiting) + self._num_consumed

    @property
    def num_free(self) -> int:
        """Groups that may be admitted now."""
        return self.capacity - self.num_active

    @property
    def num_unconsumed(self) -> int:
        return len(self._waiting)

    def describe(self) -> str:
        """Returns text for a stall report."""
        takes = f"takes {self.prompts_per_step} groups (window {self.window}, oldest first)"
        return f"{takes}; {self.num_ready} are ready"

    def admit(self, count: int) -> Sequence[int]:
        """Admits `count` groups. Returns their ids, oldest first."""
        assert count <= self.num_free, "admission beyond the staleness bound"
        again, self._resumed = self._resumed[:count], self._resumed[count:]
        first, self.next_group_id = self.next_group_id, self.next_group_id + count - len(again)
        ids = [*again, *range(first, self.next_group_id)]
        self._waiting.update(dict.fromkeys(ids))
        self._missing[-1:] = [*ids, self.next_group_id]
        return ids

    def mark_generated(self, group_id: int) -> None:
        """Counts a group as ready while it is scored, unless `put` finds it flat. Ignores groups of evaluations."""
        _move(group_id, self._missing, self._generated)

    def oldest_version(self, num_active: int, newest: int) -> int:
        """Returns the oldest version that may serve a group.

        Args:
            num_active: other groups that were active at its admission.
            newest: newest version that was made at its admission.
        """
        latest = (num_active + self.window - 1) // self.prompts_per_step  # the step that takes it, counted from newest
        return max(0, newest + min(0, latest - self.staleness_limit))

    def put(self, group: RolloutGroup, *, is_flat: bool = False) -> tuple[list[RolloutGroup], list[int]]:
        """Adds a scored group. Returns the groups that became ready, and the ids of dropped ones."""
        is_new = self._waiting.get(group.group_id, group) is None and group.group_id not in self._flat
        assert is_new, "unknown group, or put twice"
        ready, dropped = list[RolloutGroup](), list[int]()
        if is_flat:
            self._flat[group.group_id] = group
            _move(group.group_id, self._generated, self._missing)
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
                del self._missing[bisect_left(self._missing, flat.group_id)]
                dropped.append(flat.group_id)
        for one in ready:
            self.mark_generated(one.group_id)
        self.num_dropped += len(dropped)
        self.num_ready += len(ready)
        return ready, dropped

    def _resolved(self) -> list[tuple[RolloutGroup, bool]]:
        """Returns the flat groups whose fate is certain, whatever older groups turn out to be, and whether each is
        kept."""
        resolved = list[tuple[RolloutGroup, bool]]()
        surely = possibly = self.num_dropped  # older groups that are flat, and that may become flat
        for group_id in self._waiting if self._flat else ():
            flat = self._flat.get(group_id)
            if flat is None:
                possibly += self._waiting[group_id] is None
                continue
            if surely >= self._max_dropped or possibly < self._max_dropped:
                resolved.append((flat, surely >= self._max_dropped))
            surely, possibly = surely + 1, possibly + 1
        return resolved

    def take(self) -> list[RolloutGroup] | None:
        """Returns the P groups of the next step in admission order, or None if the window holds fewer."""
        if bisect_left(self._generated, self._missing[0] + self.window) < self.prompts_per_step:
            return None
        # The window begins with the oldest group that is not taken.
        not_ready = (group_id for group_id, group in self._waiting.items() if group is None)
        end = self.window + next(not_ready, self.next_group_id)
        ready = [group for group_id, group in self._waiting.items() if group and group_id < end]
        taken = ready[: self.prompts_per_step]
        if len(taken) < self.prompts_per_step:
            return None
        for group in taken:
            del self._waiting[group.group_id]
        self._generated = [group_id for group_id in self._generated if group_id in self._waiting]
        self.num_ready -= len(taken)
        self._num_consumed += len(taken)
        return taken

    def missing(self) -> tuple[int, int]:
        """Returns what the first step that cannot be taken yet is missing: the least number of groups, and an id.

        That step requires each group below the id that is neither ready nor generated.
        """
        missing, generated, size = self._missing, self._generated, self.prompts_per_step
        # Steps take what they can in its order, so the window of each begins with the same group.
        num_taken = bisect_left(generated, missing[0] + self.window) // size * size

        def num_older(place: int) -> int:
            return place + max(0, bisect_left(generated, missing[place]) - num_taken)

        # At most W - 1 groups behind the oldest one that is not taken are taken.
        place = bisect_left(range(len(missing) - 1), size - self.window + 1, key=num_older)
        return max(1, size - len(generated) + num_taken), missing[place]

    def free(self, count: int) -> None:
        """Frees the slots of `count` consumed groups whose version is made."""
        assert 0 <= count <= self._num_consumed, "freed more groups than were consumed"
        self._num_consumed -= count


def _move(group_id: int, source: list[int], target: list[int]) -> None:
    """Moves an id from one ascending list to another, if it is there."""
    place = bisect_left(source, group_id)
    if source[place : place + 1] == [group_id]:
        insort(target, source.pop(place))
