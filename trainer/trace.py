"""What every process did when: collected during a run, written as a Chrome trace and as a picture."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IDLE_NAMES = frozenset({"idle", "wait", "waiting", "paused"})
SPAN_LIMIT = 50_000  # kept in memory; beyond it, neighbours of the same kind are joined over ever longer gaps


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Something that took time on a lane. Seconds since the origin of its trace."""

    lane: str
    name: str
    start_s: float
    end_s: float
    detail: str = ""
    gaps_s: float = 0.0  # of joined spans: what lay between them

    @property
    def idle(self) -> bool:
        return self.name in IDLE_NAMES

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def busy_s(self) -> float:
        return 0.0 if self.idle else self.seconds - self.gaps_s


@dataclass(frozen=True, slots=True)
class Publication:
    """A policy version became visible to all readers."""

    version: int
    time_s: float


def lane_key(lane: str) -> tuple[int, str, int]:
    """Display order: the trainer, the rollout workers by number, others, validation."""
    number = re.search(r"(\d+)$", lane)
    stem = lane[: number.start()] if number else lane
    rank = 0 if lane == "trainer" else 3 if lane.startswith("validation") else 1 if lane.startswith("rollout") else 2
    return rank, stem, int(number.group()) if number else -1


class Trace:
    """Collects spans. Cheap to add to, bounded in memory whatever the length of the run."""

    def __init__(self, origin_s: float | None = None, *, limit: int = SPAN_LIMIT) -> None:
        """`origin_s`: the time.monotonic() that the picture calls 0; None: now."""
        self.origin_s = time.monotonic() if origin_s is None else origin_s
        self.publications: list[Publication] = []
        self._spans: list[TraceSpan] = []
        self._limit = limit
        self._gap_s = 0.001

    def add(self, lane: str, name: str, start_s: float, end_s: float, detail: str = "") -> None:
        """A span from `start_s` to `end_s` in time.monotonic() seconds. Names in IDLE_NAMES count as not busy."""
        if end_s < start_s:
            raise ValueError(f"span {name!r} of {lane!r} ends {start_s - end_s:.6f} s before it starts; pass (start_s, end_s)")
        self._spans.append(TraceSpan(lane, name, start_s - self.origin_s, end_s - self.origin_s, detail))
        if len(self._spans) > self._limit:
            while len(self._spans) > self._limit // 2:  # at long gaps everything joins: a lane ends as one span
                self._gap_s *= 2
                self._spans = joined(self._spans, self._gap_s)

    def published(self, version: int, time_s: float) -> None:
        """Marks the moment at which a version was published."""
        self.publications.append(Publication(version, time_s - self.origin_s))
        if len(self.publications) > self._limit:
            self.publications = self.publications[::2]

    @property
    def spans(self) -> list[TraceSpan]:
        return list(self._spans)

    @property
    def lanes(self) -> list[str]:
        return sorted({span.lane for span in self._spans}, key=lane_key)

    def events(self) -> list[dict[str, Any]]:
        """Chrome trace events: one process, a thread per lane, complete events in microseconds, publications as instants."""
        threads = {lane: index for index, lane in enumerate(self.lanes)}
        events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "tandem"}}]
        for lane, thread in threads.items():
            events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": lane}})
            events.append({"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": thread, "args": {"sort_index": thread}})
        for span in self._spans:
            event: dict[str, Any] = {
                "name": span.name,
                "cat": "idle" if span.idle else "busy",
                "ph": "X",
                "ts": round(span.start_s * 1e6),
                "dur": round((span.end_s - span.start_s) * 1e6),
                "pid": 1,
                "tid": threads[span.lane],
            }
            if span.detail:
                event["args"] = {"detail": span.detail}
            events.append(event)
        for mark in self.publications:
            name = f"policy version {mark.version}"
            events.append({"name": name, "cat": "publication", "ph": "i", "s": "g", "ts": round(mark.time_s * 1e6), "pid": 1, "tid": 0})
        return events

    def write(self, folder: Path, *, title: str = "") -> None:
        """Writes trace.json (opens in ui.perfetto.dev and chrome://tracing) and timeline.svg. OSError when the disk does not take them."""
        from trainer.timeline import draw_timeline  # drawing is only needed at the end

        _replace(folder / "trace.json", json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}, ensure_ascii=False, separators=(",", ":")))
        _replace(folder / "timeline.svg", draw_timeline(self._spans, self.publications, title=title))


def joined(spans: list[TraceSpan], gap_s: float) -> list[TraceSpan]:
    """Fewer spans that show the same: neighbours on a lane become one when at most `gap_s` lies between them and they have the same
    name, or when one of them is shorter than `gap_s`; the longer one's name stays. Busy time is kept, except of what falls to idling."""
    result: list[TraceSpan] = []
    last: dict[str, int] = {}
    for span in sorted(spans, key=lambda item: item.start_s):
        index = last.get(span.lane)
        previous = result[index] if index is not None else None
        if index is None or previous is None or not _joinable(previous, span, gap_s):
            last[span.lane] = len(result)
            result.append(span)
            continue
        longer = previous if previous.seconds >= span.seconds else span
        end_s = max(previous.end_s, span.end_s)
        detail = longer.detail if longer.name != previous.name or previous.detail == span.detail else ""
        whole = end_s - previous.start_s
        result[index] = TraceSpan(span.lane, longer.name, previous.start_s, end_s, detail, max(0.0, whole - previous.busy_s - span.busy_s))
    return result


def _joinable(first: TraceSpan, second: TraceSpan, gap_s: float) -> bool:
    if second.start_s - first.end_s > gap_s:
        return False
    return first.name == second.name or min(first.seconds, second.seconds) < gap_s


def _replace(path: Path, text: str) -> None:
    """Writes beside the target and renames, so that nobody reads half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
