"""How far rollouts may run ahead of training: verl's arithmetic, with a bound that holds by construction.

    required_samples     = ppo_mini_batch_size * require_batches                  groups of one training step
    interval             = required_samples * trigger_parameter_sync_step         groups of one policy version
    max_required_samples = int(interval * (1 + staleness_threshold))              groups outstanding at most

A group is outstanding from its request until it is released: a trained group when the version that it helped to make is
published, a dropped one at once. A request made at version v carries v as the oldest version that may produce its tokens, and
v + ceil(staleness_threshold) as its deadline: the last version at which it may be trained.

Why the bound holds: at version v with R groups still to be trained before the next publication, interval - R trained groups
wait for their release, so at most max_required_samples - (interval - R) <= R + ceil(threshold) * interval groups are untrained,
which all fit until the deadline of the newest; older deadlines fit because they did when their last group was requested, and
`TrajectoryBuffer.take` never takes a group whose place an earlier deadline still needs.
"""

from __future__ import annotations

import math


class StalenessError(RuntimeError):
    """A trajectory is staler than the bound, which the construction rules out."""


class StalenessGate:
    """Counts outstanding groups and says whether another may be requested. Not thread-safe: the dispatcher's lock guards it."""

    def __init__(self, *, required_samples: int, trigger_parameter_sync_step: int, staleness_threshold: float) -> None:
        self.required_samples = required_samples
        self.interval = required_samples * trigger_parameter_sync_step
        # Rounding guards int() against 0.1-like thresholds: 1536 * 1.1 is 1689.6000000000001 but 10 * 1.1 is 11.000000000000002.
        self.max_required_samples = int(round(self.interval * (1 + staleness_threshold), 6))
        self.bound = math.ceil(round(staleness_threshold, 6))
        self.outstanding = 0

    @property
    def room(self) -> int:
        """How many groups may be requested now."""
        return self.max_required_samples - self.outstanding

    def reserve(self) -> None:
        """One group is requested."""
        assert self.room > 0, "a group was requested beyond max_required_samples"
        self.outstanding += 1

    def release(self, groups: int = 1) -> None:
        """So many groups were dropped, or the version that they helped to make was published."""
        assert 0 <= groups <= self.outstanding, f"{groups} groups released, {self.outstanding} outstanding"
        self.outstanding -= groups

    def deadline(self, born: int) -> int:
        """The last policy version at which a group requested at version `born` may be trained."""
        return born + self.bound

    def check(self, staleness: int, request_id: int) -> None:
        """StalenessError when a trajectory about to be trained exceeds the bound."""
        if staleness > self.bound:
            raise StalenessError(f"group {request_id} has staleness {staleness}, the bound is {self.bound}: this is a fault in Tandem, please report it")
