"""One answer as rewards see it, and what a reward makes of it. Travels to the scoring processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_METRICS = 64


class RewardFault(Exception):
    """A score that cannot be given. `kind` is counted: see `Score.error`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)  # both, so that it survives pickling
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A completion with everything that its prompt brought along."""

    text: str  # the completion, without special tokens
    token_ids: list[int] = field(default_factory=list)  # [T] the completion's tokens
    data_source: str = ""
    prompt_text: str = ""  # rendered
    messages: Any = None  # the conversation as the data has it, or None
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A reward's result for one answer. `value` None: the reward does not apply to it."""

    value: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None


def to_outcome(result: Any) -> Outcome:
    """Reads what a reward returned: a number, a mapping with `score`, or None. RewardFault when it is none of these."""
    metrics: dict[str, float] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardFault("value", f"the reward returned a mapping without 'score'; it has {', '.join(map(str, list(result)[:10])) or 'nothing'}")
        for name, entry in list(result.items())[: MAX_METRICS + 1]:
            if name != "score" and (number := _number(entry)) is not None and math.isfinite(number):
                metrics[str(name)] = number
        result = result["score"]
    if result is None:
        return Outcome(None, metrics)
    value = _number(result)
    if value is None:
        raise RewardFault("value", f"the reward returned {type(result).__name__} {str(result)[:80]!r} where a number is expected")
    if not math.isfinite(value):
        raise RewardFault("value", f"the reward returned {value}")
    return Outcome(value, metrics)


def _number(entry: Any) -> float | None:
    """A float from a number, a boolean, or a one-element array or tensor; None for anything else."""
    if isinstance(entry, (bool, int, float)):
        return float(entry)
    if hasattr(entry, "item") and not isinstance(entry, str):
        try:
            return float(entry.item())
        except (TypeError, ValueError, RuntimeError):
            return None
    return None
