"""What a person watching a run wants to know, as plain data. Filled by the trainer, read by whatever displays it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

HISTORY = 256  # points kept of a curve; older ones are averaged in pairs when it is full


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What one process does now."""

    state: str  # "training", "generating", "validating", "waiting", "paused", "starting", "gone", ...
    idle_ratio: float | None = None  # share of its time so far (or lately) that it did nothing, 0 to 1
    tokens_per_s: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationEntry:
    """One result as it arrived."""

    version: int
    step: int
    reason: str
    accuracy: float | None
    ci: tuple[float, float] | None = None
    duration_s: float | None = None
    status: str = "done"  # "done", "superseded", "failed"


class Curve:
    """A series of any length in bounded memory: neighbours are averaged whenever it is full."""

    def __init__(self, limit: int = HISTORY) -> None:
        assert limit >= 2
        self._limit = limit
        self._per_point = 1
        self._points: list[float] = []
        self._open: list[float] = []

    def add(self, value: float) -> None:
        self._open.append(value)
        if len(self._open) < self._per_point:
            return
        self._points.append(sum(self._open) / len(self._open))
        self._open.clear()
        if len(self._points) >= self._limit:
            self._points = [(a + b) / 2 for a, b in zip(self._points[::2], self._points[1::2], strict=False)]
            self._per_point *= 2

    def points(self, count: int) -> list[float]:
        """The whole series in at most `count` points, each the mean of a stretch."""
        series = self._points + ([sum(self._open) / len(self._open)] if self._open else [])
        if len(series) <= count:
            return series
        edges = [round(index * len(series) / count) for index in range(count + 1)]
        return [sum(series[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


# The first of these names that a step reports is shown.
REWARD = ("critic/score/mean", "critic/rewards/mean", "reward/mean")
TOKENS = ("rollout/tokens_per_s", "fully_async/rollouter/tokens_per_s", "perf/throughput")
STALENESS_MEAN = ("staleness/mean", "fully_async/staleness/mean")
STALENESS_MAX = ("staleness/max", "fully_async/staleness/max")
LENGTH = ("response_length/mean",)
LOSS = ("actor/pg_loss", "actor/loss")


def first_of(metrics: Mapping[str, float], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = metrics.get(name)
        if value is not None and value == value:
            return float(value)
    return None


@dataclass(slots=True)
class Progress:
    """The state of a run for its displays."""

    total_steps: int
    clock: Callable[[], float] = time.monotonic
    info: dict[str, Any] = field(default_factory=dict)
    started_s: float = 0.0
    step: int = 0
    policy_version: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: Curve = field(default_factory=Curve)
    validations: list[ValidationEntry] = field(default_factory=list)
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    _step_times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=50))

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def train(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        self.step, self.policy_version = step, policy_version
        self.metrics.update(metrics)
        reward = first_of(metrics, REWARD)
        if reward is not None:
            self.rewards.add(reward)
        self._step_times.append((step, self.clock()))

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started_s

    @property
    def remaining_s(self) -> float | None:
        """Until the last step, from the pace of the last 50 reports; None before the second one."""
        if self.step >= self.total_steps:
            return 0.0
        if len(self._step_times) < 2:
            return None
        (first, began), (last, ended) = self._step_times[0], self._step_times[-1]
        if last <= first:
            return None
        pace = (ended - began) / (last - first)
        return max(0.0, pace * (self.total_steps - last) - (self.clock() - ended))

    @property
    def measured(self) -> list[ValidationEntry]:
        return [entry for entry in self.validations if entry.accuracy is not None]

    @property
    def tokens_per_s(self) -> float | None:
        """The workers' sum where they tell, else the last step's metric."""
        known = [status.tokens_per_s for status in self.workers.values() if status.tokens_per_s is not None]
        return sum(known) if known else first_of(self.metrics, TOKENS)


def clock_text(seconds: float | None) -> str:
    """0:42, 12:05, 3:04:05."""
    if seconds is None:
        return "-:--"
    whole = int(seconds + 0.5)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def short_number(value: float | None) -> str:
    """12, 940, 12.3k, 4.56M."""
    if value is None:
        return "-"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scaled = value / (1e3 if unit == "k" else limit)
            return f"{scaled:.3g}{unit}"
    return f"{value:.0f}"


def interval_text(ci: tuple[float, float] | None) -> str:
    return f"[{ci[0]:.3f}, {ci[1]:.3f}]" if ci is not None else ""
