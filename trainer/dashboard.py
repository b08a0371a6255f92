"""The picture that the console draws on a terminal: pure rendering of a Progress with rich, no clock, no thread, no output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainer.progress import (
    LENGTH,
    REWARD,
    STALENESS_MAX,
    STALENESS_MEAN,
    Progress,
    WorkerStatus,
    clock_text,
    first_of,
    interval_text,
    short_number,
)

# Only the sixteen colours that a terminal's own theme defines: they stay readable on light and on dark.
LABEL = "dim"
GOOD = "green"
BAR = "cyan"
VALIDATION = "magenta"
WARN = "yellow"
BAD = "red"

STATE_STYLES = {
    "training": BAR,
    "generating": GOOD,
    "validating": VALIDATION,
    "publishing": BAR,
    "starting": LABEL,
    "paused": WARN,
    "waiting": WARN,
    "idle": LABEL,
    "gone": BAD,
    "failed": BAD,
}


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters of the picture; a terminal without UTF-8 gets the plain ones."""

    spark: str
    full: str
    empty: str
    dot: str
    arrow: str

    @classmethod
    def of(cls, encoding: str | None) -> Glyphs:
        if encoding is not None and encoding.lower().replace("-", "").startswith("utf"):
            return cls("▁▂▃▄▅▆▇█", "━", "─", "·", "→")
        return cls("_.-=+*#@", "#", "-", "-", "->")


def sparkline(values: Sequence[float], glyphs: Glyphs, *, low: float | None = None, high: float | None = None) -> str:
    """One character per value, scaled between the least and the greatest (or the given limits)."""
    if not values:
        return ""
    bottom = min(values) if low is None else low
    top = max(values) if high is None else high
    scale = top - bottom
    last = len(glyphs.spark) - 1
    return "".join(glyphs.spark[min(last, max(0, round((value - bottom) / scale * last))) if scale > 0 else last // 2] for value in values)


def bar(share: float | None, width: int, glyphs: Glyphs, style: str) -> Text:
    """A bar of `width` cells, filled to `share` (0 to 1)."""
    filled = 0 if share is None else round(min(1.0, max(0.0, share)) * width)
    return Text.assemble((glyphs.full * filled, style), (glyphs.empty * (width - filled), LABEL))


class Dashboard:
    """Renders itself to whatever width and height there is at that moment."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        glyphs = Glyphs.of(console.encoding)
        width = options.max_width
        height = options.height if options.height is not None else console.size.height
        if width < 46 or height < 9:
            yield self._one_line(width, glyphs)
            return
        inner = width - 4
        compact = len(self._progress.workers) + 9 > height
        rows: list[RenderableType] = [self._steps(inner, glyphs), self._curves(inner, glyphs)]
        if self._progress.workers:
            rows += [Text(), self._compact_workers(inner, glyphs) if compact else self._workers(inner, glyphs)]
        info = self._progress.info
        title = Text.assemble((" tandem ", "bold"), *((f"{glyphs.dot} {info['name']} ", "") for _ in (0,) if info.get("name")))
        subtitle = Text(f" {_tail(str(info['run_dir']), inner - 4)} ", style=LABEL) if info.get("run_dir") else None
        yield Panel(Group(*rows), title=title, title_align="left", subtitle=subtitle, subtitle_align="right", border_style=LABEL, padding=(0, 1))

    def _one_line(self, width: int, glyphs: Glyphs) -> Text:
        progress = self._progress
        reward = first_of(progress.metrics, REWARD)
        parts = [f"{progress.step}/{progress.total_steps}"]
        if reward is not None:
            parts.append(f"r {reward:.3f}")
        if progress.measured:
            parts.append(f"acc {progress.measured[-1].accuracy:.3f} v{progress.measured[-1].version}")
        parts.append(clock_text(progress.remaining_s))
        return Text(f" {glyphs.dot} ".join(parts), no_wrap=True, overflow="ellipsis")

    def _steps(self, width: int, glyphs: Glyphs) -> RenderableType:
        progress = self._progress
        share = progress.step / progress.total_steps if progress.total_steps else 0.0
        left = f"step {progress.step}/{progress.total_steps}  v{progress.policy_version} "
        if progress.step >= progress.total_steps:
            times = f" 100%  {clock_text(progress.elapsed_s)}"
        elif progress.step == 0:
            times = f"   0%  {clock_text(progress.elapsed_s)}  starting"
        else:
            times = f" {share:4.0%}  {clock_text(progress.elapsed_s)}  {clock_text(progress.remaining_s)} left"
        cells = max(5, width - len(left) - len(times))
        line = Text.assemble((left, "bold"), bar(share, cells, glyphs, BAR), (times, ""))
        line.no_wrap, line.overflow = True, "ellipsis"
        return line

    def _curves(self, width: int, glyphs: Glyphs) -> RenderableType:
        progress = self._progress
        table = Table.grid(padding=(0, 2, 0, 0), expand=False)
        table.add_column(style=LABEL, no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=width - 12)
        cells = max(8, min(48, width - 58))
        reward = first_of(progress.metrics, REWARD)
        row = Text.assemble((f"{reward:.3f}" if reward is not None else "-", "bold"), "  ", (sparkline(progress.rewards.points(cells), glyphs), GOOD))
        length = first_of(progress.metrics, LENGTH)
        if length is not None:
            row.append(f"  {length:.0f} tokens an answer", style=LABEL)
        table.add_row("reward", row)
        table.add_row("accuracy", self._accuracy(cells, glyphs))
        table.add_row("staleness", self._staleness(glyphs))
        return table

    def _accuracy(self, cells: int, glyphs: Glyphs) -> Text:
        progress = self._progress
        measured = progress.measured
        if not measured:
            return Text("no result yet", style=LABEL)
        last = measured[-1]
        assert last.accuracy is not None
        line = Text.assemble((f"{last.accuracy:.3f}", "bold"), "  ")
        values = [entry.accuracy for entry in measured if entry.accuracy is not None]
        line.append(sparkline(values[-cells:], glyphs), style=VALIDATION)
        line.append(f"  v{last.version}")
        if last.ci is not None:
            line.append(f" {interval_text(last.ci)}", style=LABEL)
        if len(measured) > 1:
            best = max(measured, key=lambda entry: entry.accuracy or 0.0)
            line.append(f"  {glyphs.dot} first {values[0]:.3f}", style=LABEL)
            if best is not last:
                line.append(f" {glyphs.dot} best {best.accuracy:.3f} v{best.version}", style=LABEL)
        return line

    def _staleness(self, glyphs: Glyphs) -> Text:
        progress = self._progress
        mean, most = first_of(progress.metrics, STALENESS_MEAN), first_of(progress.metrics, STALENESS_MAX)
        line = Text()
        line.append(f"{mean:.2f}" if mean is not None else "-", style="bold")
        if most is not None:
            line.append(f"  at most {most:.0f}")
        bound = progress.info.get("staleness_bound")
        if bound is not None:
            line.append(f" (bound {bound})", style=LABEL)
        line.append("   tokens/s ", style=LABEL)
        line.append(short_number(progress.tokens_per_s), style="bold")
        return line

    def _workers(self, width: int, glyphs: Glyphs) -> RenderableType:
        table = Table.grid(padding=(0, 2, 0, 0), expand=False)
        names = max(len(name) for name in self._progress.workers)
        states = max(len(status.state) for status in self._progress.workers.values())
        table.add_column(style=LABEL, no_wrap=True, min_width=min(names, 20), max_width=20, overflow="ellipsis")
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, min_width=9)
        table.add_column(no_wrap=True, min_width=states)
        table.add_column(no_wrap=True, overflow="ellipsis", style=LABEL)
        cells = max(6, min(30, width - min(names, 20) - states - 44))
        for name, status in self._progress.workers.items():
            style = STATE_STYLES.get(status.state, "")
            table.add_row(name, bar(_busy(status), cells, glyphs, style or BAR), _busy_text(status), Text(status.state, style=style), _rate(status, glyphs))
        return table

    def _compact_workers(self, width: int, glyphs: Glyphs) -> RenderableType:
        """One cell per worker: how busy it is by the height of its mark, what it does by the colour."""
        line = Text(no_wrap=True, overflow="ellipsis")
        for name, status in self._progress.workers.items():
            share = _busy(status)
            line.append(f"{name} ", style=LABEL)
            line.append(sparkline([share if share is not None else 0.0], glyphs, low=0.0, high=1.0), style=STATE_STYLES.get(status.state, BAR))
            line.append("  ")
        return line


def _busy(status: WorkerStatus) -> float | None:
    return None if status.idle_ratio is None else 1.0 - status.idle_ratio


def _busy_text(status: WorkerStatus) -> Text:
    share = _busy(status)
    return Text("       -" if share is None else f"{share:4.0%} busy")


def _rate(status: WorkerStatus, glyphs: Glyphs) -> str:
    parts = [f"{short_number(status.tokens_per_s)} tok/s"] if status.tokens_per_s is not None else []
    return f" {glyphs.dot} ".join([*parts, *([status.detail] if status.detail else [])])


def _tail(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[-max(1, width - 3) :]
