"""A worker's side of its connection to the trainer, and the clock that says what it spends its time on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from workers.messages import StopWorker


class WorkerStopped(Exception):
    """The trainer asked this worker to end, or the trainer is gone."""


class Link(Protocol):
    """What a worker talks through. `receive` returns None after `timeout` seconds; both raise WorkerStopped at the end."""

    def receive(self, timeout: float) -> Any | None: ...

    def send(self, message: Any) -> None: ...


class LocalLink:
    """A link within one process: the inline mode and tests. `receive` never waits, since nobody else runs meanwhile."""

    def __init__(self, deliver: Callable[[Any], None]) -> None:
        self._inbox: deque[Any] = deque()
        self._deliver = deliver

    def put(self, message: Any) -> None:
        """The trainer's side: hands a message to the worker."""
        self._inbox.append(message)

    def receive(self, timeout: float) -> Any | None:
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        if isinstance(message, StopWorker):
            raise WorkerStopped
        return message

    def send(self, message: Any) -> None:
        self._deliver(message)


class StopWatch:
    """Adds up the time spent in each of several states, of which exactly one holds at any moment. Starts in `idle`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = "idle"
        self._since = clock()
        self._span_start = self._since
        self._totals: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []

    def enter(self, state: str) -> None:
        """From now on `state` holds."""
        if state == self._state:
            return
        now = self._clock()
        self._settle(now)
        self._state, self._span_start = state, now

    def totals(self) -> dict[str, float]:
        """Seconds spent in each state until now; they add up to the time since construction."""
        now = self._clock()
        self._totals[self._state] = self._totals.get(self._state, 0.0) + now - self._since
        self._since = now
        return dict(self._totals)

    def spans(self) -> list[tuple[str, float, float]]:
        """The (state, start, end) since the last call, the state that holds now up to this moment included."""
        now = self._clock()
        self._settle(now)
        self._span_start = now
        spans, self._spans = self._spans, []
        return spans

    def _settle(self, now: float) -> None:
        self._totals[self._state] = self._totals.get(self._state, 0.0) + now - self._since
        self._since = now
        if now > self._span_start:
            last = self._spans[-1] if self._spans else None
            # Decode steps leave gaps of microseconds between spans of one kind; a picture shows them as one.
            if last is not None and last[0] == self._state and self._span_start - last[2] < 0.001:
                self._spans[-1] = (self._state, last[1], now)
            else:
                self._spans.append((self._state, self._span_start, now))
