"""The timeline picture: a lane per process, busy spans coloured by what was done, a mark at every publication. One SVG, no resources."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from html import escape

from trainer.trace import Publication, TraceSpan, lane_key

WIDTH = 1200
LEFT, RIGHT = 104, 64  # room for lane names and busy shares
LANE, GAP = 26, 10
TOP = 78
EXACT_SPANS = 400  # a lane with more is drawn in columns, shaded by how busy each one was
COLUMN_BUDGET = 9000  # columns in the whole picture, which bounds the file
MARK_LABEL_PX = 30  # between two version labels

COLOURS = {
    "training": "#3b82d6",
    "rollout": "#2f9e6e",
    "validation": "#b252c9",
    "publish": "#e08a1e",
    "adopt": "#8ecf5f",
    "scoring": "#d8678f",
    "checkpoint": "#7c8794",
}
ALIASES = {"train": "training", "step": "training", "update": "training", "generate": "rollout", "gen": "rollout", "reward": "scoring", "validate": "validation"}
SPARE = ("#c9713d", "#5aa7a7", "#9a7bd1", "#a39343")
IDLE_CLASS = "tl-wait"

STYLE = """
.tl-bg{fill:#fff}.tl-track{fill:#f0f2f5}.tl-text{fill:#1f2933}.tl-soft{fill:#66717e}.tl-line{stroke:#d5dae0}.tl-mark{stroke:#e08a1e}
.tl-wait{fill:#d9dde3}.tl-version{fill:#b86c0c}.tl-on{fill:#fff}
@media (prefers-color-scheme:dark){.tl-bg{fill:#14181d}.tl-track{fill:#20262d}.tl-text{fill:#e6eaee}.tl-soft{fill:#97a3af}.tl-line{stroke:#333c46}
.tl-wait{fill:#39424c}.tl-version{fill:#f0a94a}}
text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-size:12px}
"""


def draw_timeline(spans: Sequence[TraceSpan], publications: Sequence[Publication], *, title: str = "") -> str:
    """The SVG's text. Below 300 kB for any number of spans; times are seconds since the start of the run."""
    lanes = sorted({span.lane for span in spans}, key=lane_key)
    end_s = max([span.end_s for span in spans] + [mark.time_s for mark in publications] + [0.001])
    start_s = min([0.0, *(span.start_s for span in spans)])
    scale = (WIDTH - LEFT - RIGHT) / (end_s - start_s)
    bottom = TOP + len(lanes) * (LANE + GAP)
    height = bottom + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(title or "timeline of a run", quote=True)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="tl-bg" width="{WIDTH}" height="{height}" rx="8"/>',
    ]
    parts += _header(spans, title, bool(publications))
    parts += _axis(start_s, end_s, scale, bottom)
    by_lane: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
    crowded = sum(len(items) > EXACT_SPANS for items in by_lane.values())
    column = max(1.0, crowded * (WIDTH - LEFT - RIGHT) / COLUMN_BUDGET)
    for index, lane in enumerate(lanes):
        parts += _lane(lane, by_lane[lane], TOP + index * (LANE + GAP), start_s, scale, end_s, column)
    parts += _marks(publications, start_s, scale, bottom)
    return "\n".join([*parts, "</svg>", ""])


def kind_of(name: str) -> str:
    """The kind of work that a span's name stands for; it decides the colour."""
    plain = name.lower()
    return ALIASES.get(plain, plain)


def colour_of(kind: str) -> str:
    return COLOURS.get(kind) or SPARE[sum(kind.encode()) % len(SPARE)]


def overlap_sentence(spans: Sequence[TraceSpan]) -> str:
    """How busy the others were while validation computed; empty when there was no validation."""
    validation = union([(span.start_s, span.end_s) for span in spans if span.lane.startswith("validation") and not span.idle])
    total = sum(end - start for start, end in validation)
    rollouts = sorted({span.lane for span in spans if span.lane.startswith("rollout")})
    if not total or not rollouts:
        return ""

    def busy(lane: str) -> float:
        own = union([(span.start_s, span.end_s) for span in spans if span.lane == lane and not span.idle])
        return covered(own, validation) / total

    generating = sum(busy(lane) for lane in rollouts) / len(rollouts)
    return f"While validation computed ({total:.1f} s), rollouts were busy {generating:.0%} of the time and the trainer {busy('trainer'):.0%}."


def union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals, in order, that cover the same points."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def covered(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Length of the intersection of two unions."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


def nice_ticks(start: float, end: float, count: int) -> list[float]:
    """Round values in [start, end], about `count` of them; multiples of 1, 2, 5 and, for seconds, of minutes and hours."""
    raw = (end - start) / max(1, count)
    candidates = [factor * 10.0**power for power in range(-4, 2) for factor in (1, 2, 5)] + [15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400]
    step = next((value for value in sorted(candidates) if value >= raw), 86400 * math.ceil(raw / 86400))
    first = math.ceil(start / step - 1e-9)
    return [index * step for index in range(first, math.floor(end / step + 1e-9) + 1)]


def time_label(seconds: float, step: float) -> str:
    if step >= 3600:
        return f"{seconds / 3600:g} h"
    if step >= 60:
        return f"{seconds / 60:g} min"
    if seconds >= 120:
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
    return f"{seconds:g} s"


def _header(spans: Sequence[TraceSpan], title: str, marks: bool) -> list[str]:
    parts = [f'<text class="tl-text" x="16" y="26" style="font-size:15px;font-weight:600">{escape(title or "What every process did")}</text>']
    sentence = overlap_sentence(spans)
    if sentence:
        parts.append(f'<text class="tl-soft" x="16" y="46">{escape(sentence)}</text>')
    kinds = sorted({kind_of(span.name) for span in spans if not span.idle}, key=lambda kind: (list(COLOURS).index(kind) if kind in COLOURS else 99, kind))
    entries: list[tuple[str, str]] = [(kind, f'fill="{colour_of(kind)}"') for kind in kinds]
    if any(span.idle for span in spans):
        entries.append(("waiting", f'class="{IDLE_CLASS}"'))
    x = WIDTH - 16.0 - sum(30 + 6.6 * len(name) for name, _ in entries) - (98 if marks else 0)
    for name, paint in entries:
        parts.append(f'<rect {paint} x="{x:.0f}" y="16" width="12" height="12" rx="3"/><text class="tl-soft" x="{x + 17:.0f}" y="26">{escape(name)}</text>')
        x += 30 + 6.6 * len(name)
    if marks:
        parts.append(f'<path class="tl-mark" d="M{x + 5:.0f} 15v14" stroke-width="1.5" stroke-dasharray="3 2"/>')
        parts.append(f'<text class="tl-soft" x="{x + 14:.0f}" y="26">policy version</text>')
    return parts


def _axis(start_s: float, end_s: float, scale: float, bottom: float) -> list[str]:
    ticks = nice_ticks(start_s, end_s, 10)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else end_s
    parts = []
    for tick in ticks:
        x = LEFT + (tick - start_s) * scale
        parts.append(f'<path class="tl-line" d="M{x:.1f} {TOP - 6}V{bottom + 2}"/>')
        parts.append(f'<text class="tl-soft" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{time_label(tick, step)}</text>')
    return parts


def _lane(lane: str, spans: list[TraceSpan], y: float, start_s: float, scale: float, end_s: float, column: float) -> list[str]:
    width = WIDTH - LEFT - RIGHT
    busy = sum(span.busy_s for span in spans)
    share = min(1.0, busy / (end_s - start_s))
    parts = [
        f'<text class="tl-text" x="{LEFT - 10}" y="{y + 17:.0f}" text-anchor="end">{escape(lane[:16])}</text>',
        f'<rect class="tl-track" x="{LEFT}" y="{y:.0f}" width="{width}" height="{LANE}" rx="4"/>',
        f'<text class="tl-soft" x="{WIDTH - RIGHT + 8}" y="{y + 17:.0f}">{share:.0%} busy</text>',
    ]
    if len(spans) > EXACT_SPANS:
        parts += _columns(spans, y, start_s, scale, column)
    else:
        for span in sorted(spans, key=lambda item: (not item.idle, item.start_s)):
            parts += _exact(span, y, start_s, scale)
    return parts


def _exact(span: TraceSpan, y: float, start_s: float, scale: float) -> list[str]:
    x, width = LEFT + (span.start_s - start_s) * scale, max(0.6, span.seconds * scale)
    rounded = ' rx="3"' if width > 8 else ""
    paint = f'class="{IDLE_CLASS}"' if span.idle else f'fill="{colour_of(kind_of(span.name))}"'
    inset = 8 if span.idle else 2
    tip = f"{span.name} {span.detail}".strip() + f": {span.seconds:.3g} s"
    rect = f'<rect {paint} x="{x:.1f}" y="{y + inset:.0f}" width="{width:.1f}" height="{LANE - 2 * inset}"{rounded}><title>{escape(tip)}</title></rect>'
    label = span.detail.replace("version ", "v")
    if span.idle or not label or width < 9 + 7 * len(label):
        return [rect]
    return [rect, f'<text class="tl-on" x="{x + width / 2:.1f}" y="{y + 17:.0f}" text-anchor="middle" style="font-size:11px">{escape(label)}</text>']


def _columns(spans: list[TraceSpan], y: float, start_s: float, scale: float, column: float) -> list[str]:
    """A crowded lane: each column takes the colour of what filled most of it and is the paler the less of it was busy."""
    count = math.ceil((WIDTH - LEFT - RIGHT) / column)
    shares: list[dict[str, float]] = [defaultdict(float) for _ in range(count)]
    for span in spans:
        if span.idle:
            continue
        first, last = (span.start_s - start_s) * scale / column, (span.end_s - start_s) * scale / column
        density = span.busy_s / span.seconds if span.seconds > 0 else 1.0
        for index in range(max(0, int(first)), min(count, int(last) + 1)):
            shares[index][kind_of(span.name)] += density * max(0.0, min(last, index + 1) - max(first, index))
    runs: dict[tuple[str, int], list[str]] = defaultdict(list)
    index = 0
    while index < count:
        look = _look(shares[index])
        stop = index + 1
        while stop < count and _look(shares[stop]) == look:
            stop += 1
        if look is not None:
            length = (stop - index) * column
            runs[look].append(f"M{index * column:.4g} 0h{length:.4g}v{LANE - 4}h-{length:.4g}z")
        index = stop
    return [
        f'<path fill="{colour_of(kind)}" fill-opacity="{level / 5:g}" transform="translate({LEFT} {y + 2:.0f})" d="{"".join(boxes)}"/>'
        for (kind, level), boxes in sorted(runs.items())
    ]


def _look(share: dict[str, float]) -> tuple[str, int] | None:
    """(kind, level 1 to 5) of a column, or None for an idle one."""
    total = sum(share.values())
    level = min(5, round(total * 5)) if total > 0.05 else 0
    return (max(share, key=lambda kind: share[kind]), max(1, level)) if total > 0.05 else None


def _marks(publications: Sequence[Publication], start_s: float, scale: float, bottom: float) -> list[str]:
    """A dashed line per publication; labels, and then lines, are thinned out where they would touch."""
    parts: list[str] = []
    last_label = last_line = -math.inf
    for mark in sorted(publications, key=lambda item: item.time_s):
        x = LEFT + (mark.time_s - start_s) * scale
        if x - last_line < 3:
            continue
        last_line = x
        parts.append(f'<path class="tl-mark" d="M{x:.1f} {TOP - 8}V{bottom - GAP + 4}" stroke-opacity=".75" stroke-dasharray="3 3"/>')
        if x - last_label >= MARK_LABEL_PX:
            parts.append(f'<text class="tl-version" x="{x:.1f}" y="{TOP - 12}" text-anchor="middle" style="font-size:11px">v{mark.version}</text>')
            last_label = x
    return parts
