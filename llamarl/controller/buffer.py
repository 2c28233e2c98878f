"""`RolloutBuffer`: bounded staleness by admission, and a windowed first-in-first-out order of consumption.

Groups are numbered 0, 1, 2, ... in the order of their admission. With P groups per step, S = max_staleness and
window W:

- *Admission.* Group i is admitted only while fewer than A groups are active, (S + 1) * P or `max_active`. A group is
  active from its admission until the version that was trained on it is made (`release`). What is admitted carries the
  oldest version that may serve it (`oldest_version`): its request leaves at once, and waits at its generator until that
  one serves this version or a newer one.
- *Window.* While h is the oldest unconsumed group, only groups below h + W may be consumed, oldest first.

- *Replacement.* A flat group, in which all rewards are equal, may be dropped: it is active no more, and a new group
  comes at the end of the order. Between two steps at most `max_dropped` groups are dropped, those with the smallest
  numbers, whatever order they come in; every later flat group is kept. So each step consumes exactly P groups.

Then no group is older than L = S + ceil((W - 1) / P) optimizer steps when it is consumed. Proof: let a be the newest
version that is made when i is admitted, and n the number of groups that are active then. The a * P groups behind a are
consumed. Of the others, at most n are older than i and not dropped, as they are active; at most W - 1 are younger than
i and consumed before it. So i is consumed at version a + floor((n + W - 1) / P) or an older one; and its tokens are of
version a + min(0, floor((n + W - 1) / P) - L) or of newer ones. As n < (S + 1) * P, that floor is at most L. With S = 0
there is no such choice for any window, as a step takes all P active groups. `docs/staleness.md` has it at length.
Discarding old groups would bound staleness too, but favors short answers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from llamarl.config.schema import staleness_limit
from llamarl.types import RolloutGroup


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
        for flat, is_kept in self._settled():
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

    def _settled(self) -> list[tuple[RolloutGroup, bool]]:
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
