"""`RolloutBuffer`: bounded staleness by admission, and a windowed first-in-first-out order of consumption.

Groups are numbered 0, 1, 2, ... in the order of their admission. With P groups per step, S = max_staleness and
window W:

- *Admission.* Group i is admitted only while fewer than (S + 1) * P groups are active. A group is active from its
  admission until the version that was trained on it is released (`release`); requests go only to generators that serve
  the released version or a newer one.
- *Window.* While h is the oldest unconsumed group, only groups below h + W may be consumed, oldest first.

Then no group is older than S + ceil((W - 1) / P) optimizer steps when it is consumed. Proof: i is admitted when at
least i + 1 - (S + 1) * P groups were released, so version floor(i / P) - S or a newer one was, and every generator that
is given a part of i serves that one or a newer one. At most i + W - 1 groups are consumed before i, so it is consumed
at version floor((i + W - 1) / P) or an older one. The difference is at most S + ceil((W - 1) / P). With S = 0 it is 0
for any window, as a step takes all P active groups. `docs/staleness.md` has it at length.
Discarding old groups would bound staleness too, but favors short answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.types import RolloutGroup


class RolloutBuffer:
    """A state machine without clock, threads or tensors: admitted -> ready -> consumed -> released."""

    def __init__(self, prompts_per_step: int, max_staleness: int, window: int, first_group_id: int = 0) -> None:
        self.prompts_per_step = prompts_per_step
        self.window = window
        self.capacity = (max_staleness + 1) * prompts_per_step
        self.staleness_limit = max_staleness + -(-(window - 1) // prompts_per_step) if max_staleness else 0
        self.next_group_id = first_group_id
        """Of the next group to be admitted."""
        self._waiting: dict[int, RolloutGroup | None] = {}  # unconsumed groups in admission order; None: not ready
        self._num_unreleased = 0  # consumed, their version not yet released
        self.num_ready = 0

    @property
    def num_active(self) -> int:
        return len(self._waiting) + self._num_unreleased

    @property
    def num_free(self) -> int:
        """Groups that may be admitted now."""
        return self.capacity - self.num_active

    @property
    def unconsumed(self) -> list[int]:
        """Ids of admitted groups that no step has consumed yet, oldest first."""
        return list(self._waiting)

    def admit(self, count: int) -> Sequence[int]:
        """Ids of `count` newly admitted groups, oldest first."""
        assert count <= self.num_free, "admission beyond the staleness bound"
        ids = range(self.next_group_id, self.next_group_id + count)
        self.next_group_id += count
        self._waiting.update(dict.fromkeys(ids))
        return ids

    def put(self, group: RolloutGroup) -> None:
        """`group` is generated and scored."""
        assert self._waiting.get(group.group_id, group) is None, "unknown group, or put twice"
        self._waiting[group.group_id] = group
        self.num_ready += 1

    def take(self) -> list[RolloutGroup] | None:
        """The P groups of the next step in admission order, or None while the window does not hold enough."""
        if self.num_ready < self.prompts_per_step:
            return None
        taken, limit = list[RolloutGroup](), None
        for group_id, group in self._waiting.items():
            if limit is not None and group_id >= limit:
                return None
            if group is not None:
                taken.append(group)
            elif limit is None:  # the oldest group that stays: the window begins with it
                limit = group_id + self.window
            if len(taken) == self.prompts_per_step:
                break
        else:
            return None
        for group in taken:
            del self._waiting[group.group_id]
        self.num_ready -= len(taken)
        self._num_unreleased += len(taken)
        return taken

    def release(self, count: int) -> None:
        """A version was released that was trained on `count` more groups."""
        assert 0 <= count <= self._num_unreleased, "released more groups than were consumed"
        self._num_unreleased -= count
