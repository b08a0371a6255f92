"""Metric values that know how they are reduced, so that parts from several micro-batches or workers combine correctly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean kept as sum and count."""

    sum: float
    count: float = 1.0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.sum + other.sum, self.count + other.count)

    def value(self) -> float | None:
        return self.sum / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float | None:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    maximum: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.maximum, other.maximum))

    def value(self) -> float | None:
        return self.maximum


@dataclass(frozen=True, slots=True)
class Min:
    minimum: float

    def __add__(self, other: Min) -> Min:
        return Min(min(self.minimum, other.minimum))

    def value(self) -> float | None:
        return self.minimum


@dataclass(frozen=True, slots=True)
class Last:
    last: float

    def __add__(self, other: Last) -> Last:
        return other

    def value(self) -> float | None:
        return self.last


MetricValue = Mean | Sum | Max | Min | Last
Metrics = dict[str, MetricValue]


def merge(parts: Iterable[Mapping[str, MetricValue]]) -> Metrics:
    """Combines metrics of the same name. TypeError when two parts give one name different reductions."""
    merged: Metrics = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif type(merged[name]) is not type(value):
                raise TypeError(f"metric {name!r} is reduced as {type(merged[name]).__name__} and as {type(value).__name__}")
            else:
                merged[name] = merged[name] + value  # type: ignore[operator]
    return merged


def reduce(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    """Plain numbers; a mean over nothing is left out rather than made up."""
    values = {name: metric.value() for name, metric in metrics.items()}
    return {name: value for name, value in values.items() if value is not None}
