"""When a policy version is validated, which weights are kept for it, and what becomes of the result."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from workers.messages import ValidationFailed, ValidationReason, ValidationReport, ValidationRequest

HOLDER = "validation"


def due(version: int, *, test_freq: int, val_before_train: bool, last: bool) -> ValidationReason | None:
    """Why `version` is validated, or None. The last version always is; test_freq 0 means only first and last."""
    if last:
        return "last"
    if version == 0:
        return "first" if val_before_train else None
    return "periodic" if test_freq and version % test_freq == 0 else None


class Leases(Protocol):
    """What is needed of workers.weights.WeightPublisher."""

    def lease(self, slot: int, holder: str, version: int) -> None: ...

    def release_exact(self, holder: str, version: int) -> None: ...


@dataclass(slots=True)
class ValidationRecord:
    """One validation from request to result, as summary.json lists it. Times in monotonic seconds."""

    version: int
    step: int
    reason: ValidationReason
    requested_s: float
    started_s: float | None = None
    ended_s: float | None = None
    accuracy: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    status: Literal["waiting", "running", "done", "superseded", "failed"] = "waiting"
    checksum: str | None = None
    error: str | None = None
    attempts: int = 0


class ValidationError(RuntimeError):
    """A validation that the run depends on failed; carries the worker's traceback."""


class ValidationSchedule:
    """At most one validation runs; others wait, each with a lease on the slot of its version.

    The lease is kept until the result has been dealt with, so that a retry measures the same weights and the best version can
    be saved from them.
    """

    def __init__(
        self,
        leases: Leases,
        send: Callable[[ValidationRequest], bool],
        *,
        when_behind: Literal["coalesce", "wait"],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._send = send
        self._when_behind = when_behind
        self._clock = clock
        self._slots: dict[int, int] = {}
        self._waiting: deque[ValidationRecord] = deque()
        self.running: ValidationRecord | None = None
        self.records: list[ValidationRecord] = []
        self._ready = False
        self._sent_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a result is still to come."""
        return self.running is not None or bool(self._waiting)

    @property
    def full(self) -> bool:
        """Whether a further version must wait for a place: only with `when_behind: wait`, which skips none."""
        return self._when_behind == "wait" and bool(self._waiting)

    @property
    def running_since(self) -> float | None:
        """When the running validation was handed to the worker."""
        return self._sent_s if self.running is not None else None

    def request(self, version: int, slot: int, step: int, reason: ValidationReason) -> list[ValidationRecord]:
        """Leases the slot and queues the validation. Returns the waiting ones that it supersedes."""
        assert not self.full
        self._leases.lease(slot, HOLDER, version)
        self._slots[version] = slot
        record = ValidationRecord(version, step, reason, self._clock())
        self.records.append(record)
        superseded: list[ValidationRecord] = []
        if self._when_behind == "coalesce":
            # First and last are never superseded: the run's gain is the difference between them.
            superseded = [item for item in self._waiting if item.reason == "periodic"]
            for item in superseded:
                item.status = "superseded"
                self._waiting.remove(item)
                self._release(item.version)
        self._waiting.append(record)
        self._start()
        return superseded

    def worker_ready(self) -> None:
        """The validation worker can take requests."""
        self._ready = True
        if self.running is not None:
            self._submit(self.running)
        self._start()

    def worker_lost(self) -> ValidationRecord | None:
        """The validation worker is gone; returns the record of what it was measuring, if anything."""
        self._ready = False
        return self.running

    def finish(self, report: ValidationReport) -> ValidationRecord:
        """Enters a report into its version's record. The lease lasts until `settle`."""
        record = self._current(report.request)
        record.started_s, record.ended_s = report.started_s, report.ended_s
        record.accuracy, record.metrics, record.checksum = report.accuracy, report.metrics, report.checksum
        record.status = "done"
        return record

    def fail(self, failure: ValidationFailed) -> ValidationRecord | None:
        """A failed validation is tried once more on the same weights (None); after that, or for version 0, its record is returned as failed."""
        record = self._current(failure.request)
        record.attempts += 1
        if record.attempts < 2 and record.reason != "first":
            self._submit(record)
            return None
        record.status, record.error = "failed", failure.traceback
        record.ended_s = self._clock()
        return record

    def settle(self) -> None:
        """The running validation's result has been dealt with: its lease ends and the next one starts."""
        assert self.running is not None
        self._release(self.running.version)
        self.running = None
        self._start()

    def slot(self, version: int) -> int:
        """The slot that is leased for a version that waits or runs."""
        return self._slots[version]

    def to_request(self, record: ValidationRecord) -> ValidationRequest:
        """The message that asks for a record's measurement, in its present attempt."""
        return ValidationRequest(
            version=record.version,
            slot=self._slots[record.version],
            step=record.step,
            reason=record.reason,
            requested_s=record.requested_s,
            attempt=record.attempts,
        )

    def _current(self, request: ValidationRequest) -> ValidationRecord:
        assert self.running is not None and self.running.version == request.version, f"a result for version {request.version} was not asked for"
        return self.running

    def _start(self) -> None:
        if self._ready and self.running is None and self._waiting:
            self.running = self._waiting.popleft()
            self._submit(self.running)

    def _submit(self, record: ValidationRecord) -> None:
        record.status = "running"
        self._sent_s = self._clock()
        if self._ready:  # otherwise `worker_ready` sends it
            self._send(self.to_request(record))

    def _release(self, version: int) -> None:
        del self._slots[version]
        self._leases.release_exact(HOLDER, version)


@dataclass(slots=True)
class BestVersion:
    """The best validated version so far, and whether to stop early."""

    metric: str | None  # None: mean accuracy
    mode: Literal["max", "min"]
    stop_metric: str | None = None
    threshold: float | None = None
    patience: int | None = None
    version: int | None = None
    value: float | None = None
    _since_gain: int = 0

    def update(self, record: ValidationRecord) -> bool:
        """Whether this record's version is the best so far. KeyError when the metric is not in the report."""
        value = self._value(record, self.metric)
        if self.value is None or (value > self.value if self.mode == "max" else value < self.value):
            self.version, self.value, self._since_gain = record.version, value, 0
            return True
        self._since_gain += 1
        return False

    def stop(self, record: ValidationRecord) -> str | None:
        """Why the run should end now, or None. Call after `update`."""
        if self.threshold is not None:
            value = self._value(record, self.stop_metric or self.metric)
            if value >= self.threshold if self.mode == "max" else value <= self.threshold:
                return f"{self.stop_metric or self.metric or 'accuracy'} of version {record.version} reached {value:.4f} (threshold {self.threshold:g})"
        if self.patience is not None and self._since_gain >= self.patience:
            return f"{self._since_gain} validations without gain over version {self.version}"
        return None

    @staticmethod
    def _value(record: ValidationRecord, metric: str | None) -> float:
        if metric is None or metric == "accuracy":
            assert record.accuracy is not None
            return record.accuracy
        if metric not in record.metrics:
            raise KeyError(f"validation metric {metric!r} is not reported; there are {', '.join(sorted(record.metrics))}")
        return record.metrics[metric]
