"""Finished groups that wait for their training step, taken by deadline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.messages import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedGroup:
    group: RolloutGroup
    deadline: int  # last policy version at which it may be trained
    arrived_s: float


class TrajectoryBuffer:
    """Groups by request id. Not thread-safe: only the trainer's loop touches it."""

    def __init__(self) -> None:
        self._groups: dict[int, BufferedGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, entry: BufferedGroup) -> None:
        """AssertionError when the group is there already: it would be counted twice."""
        key = entry.group.request.request_id
        assert key not in self._groups, f"group {key} arrived twice"
        self._groups[key] = entry

    def groups(self) -> list[RolloutGroup]:
        """All groups in the order of their requests."""
        return [self._groups[key].group for key in sorted(self._groups)]

    def take(self, count: int, *, version: int, remaining: int, interval: int, pending: Iterable[int]) -> list[BufferedGroup] | None:
        """The `count` groups with the earliest deadlines, ordered by request; None when they must wait.

        `remaining` groups will be trained before the version after `version` is published, then `interval` for each further one;
        `pending` are the deadlines of groups that are still being generated. A group is taken only if all others, pending ones
        included, can still be trained by their deadlines: taking whatever finished first would let slow groups grow arbitrarily stale.
        """
        if len(self._groups) < count:
            return None
        order = sorted(self._groups.values(), key=lambda entry: (entry.deadline, entry.group.request.request_id))
        taken, left = order[:count], order[count:]
        deadlines = sorted([*(entry.deadline for entry in left), *pending])
        for index, deadline in enumerate(deadlines, start=1):
            if index > remaining - count + max(0, deadline - version) * interval:
                return None
        for entry in taken:
            del self._groups[entry.group.request.request_id]
        return sorted(taken, key=lambda entry: entry.group.request.request_id)
