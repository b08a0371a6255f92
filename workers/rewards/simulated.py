"""Rewards without text, for the simulated engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from workers.messages import Prompt
from workers.rewards import Score


class SimulatedScorer:
    """0 or 1 by the parity of the answer's length: never all equal for long, and the same in every run."""

    def __init__(self) -> None:
        self._done: list[tuple[Hashable, list[Score]]] = []

    @property
    def pending(self) -> int:
        return len(self._done)

    def submit(self, key: Hashable, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[NDArray[np.int32]]) -> None:
        self._done.append((key, [Score(value=float(len(ids) % 2), metrics={}, error=None) for ids in completion_ids]))

    def poll(self) -> list[tuple[Hashable, list[Score]]]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._done.clear()
