"""Rewards: how an answer becomes a number.

`build_scorer` makes what a worker scores with; `check_reward` and `probe_reward` are for the check before a run. Importing this
package loads neither torch nor a reward library, because every scoring process does it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.messages import Prompt

if TYPE_CHECKING:
    from configs.data import DataConfig, RewardConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one answer is worth. `value` None: the answer is excluded, by its reward or because scoring failed."""

    value: float | None
    metrics: dict[str, float] = field(default_factory=dict)  # further entries that the reward returned
    error: str | None = None  # "KIND: message"; kinds: timeout, crash, memory, exception, value, missing, http, startup


class Scorer(Protocol):
    """Scores groups of answers without holding up its caller. One thread calls everything."""

    @property
    def pending(self) -> int:
        """Groups that were submitted and not yet returned by `poll`."""

    def submit(self, key: Hashable, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[NDArray[np.int32]]) -> None:
        """Queues the answers to one prompt. `key` comes back from `poll` with the scores."""

    def poll(self) -> list[tuple[Hashable, list[Score]]]:
        """Groups that are finished, each with its scores in the order of submission. Never waits."""

    def close(self) -> None:
        """Ends scoring processes and connections; unfinished groups are forgotten. Idempotent."""


def build_scorer(config: RewardConfig) -> Scorer:
    """The scorer of a worker. ValueError when a reward is unknown, cannot be imported, or lacks an optional package."""
    from workers.rewards.scorer import RewardScorer

    return RewardScorer(config)


def check_reward(config: RewardConfig, data: DataConfig) -> None:
    """Faults of the configured rewards that can be seen before any process starts. ValueError lists all of them."""
    from workers.rewards.probe import check_reward as check

    check(config, data)


def probe_reward(config: RewardConfig, prompts: Sequence[Prompt], scorer: Scorer | None = None) -> list[tuple[str, str, Score]]:
    """Scores each prompt's gold answer, written in several ways, and obviously wrong answers: (kind, answer, score).

    A reward that works gives the gold answers more than the wrong ones; otherwise a column or a pattern is wrong.
    """
    from workers.rewards.probe import probe_reward as probe

    return probe(config, prompts, scorer)
