"""The console: a live picture on a terminal, plain lines anywhere else.

The trainer only fills in a Progress and never writes to the terminal itself: a display thread does, so that a terminal that is slow,
stopped with Ctrl-S or gone cannot hold up training. Whatever goes wrong with the display ends the display, not the run.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from trainer.dashboard import Dashboard, Glyphs
from trainer.progress import (
    REWARD,
    STALENESS_MAX,
    STALENESS_MEAN,
    Progress,
    ValidationEntry,
    WorkerStatus,
    clock_text,
    first_of,
    interval_text,
    short_number,
)

Mode = Literal["auto", "rich", "plain", "off"]
Level = Literal["info", "warning", "error"]

__all__ = ["Console", "WorkerStatus"]

REFRESH_S = 0.25
PLAIN_INTERVAL_S = 1.0  # between two step lines
CLOSE_TIMEOUT_S = 3.0
STYLES: dict[str, str] = {"info": "", "warning": "yellow", "error": "bold red", "validation": "magenta"}


def choose_mode(mode: Mode, stream: TextIO) -> Literal["rich", "plain", "off"]:
    """`auto` is rich on a terminal that can move its cursor, plain otherwise."""
    if mode != "auto":
        return mode
    return "rich" if stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb") else "plain"


class Console:
    """Shows a run to a person. All methods are cheap, may be called from one thread, and never raise for what a terminal does."""

    def __init__(self, mode: Mode, *, total_steps: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stdout if stream is None else stream
        self.mode = choose_mode(mode, self._stream)
        self.progress = Progress(total_steps, clock)
        self._clock = clock
        self._glyphs = Glyphs.of(getattr(self._stream, "encoding", None))
        self._lines: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._last_step_line_s: float | None = None
        self._step_line_due = False

    def __enter__(self) -> Console:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self, run_info: Mapping[str, Any]) -> None:
        """Begins to display. Known keys of run_info: name, run_dir, model, devices (text), staleness_bound; all optional."""
        self.progress.info.update(run_info)
        shown = [str(run_info[key]) for key in ("name", "model", "devices", "run_dir") if run_info.get(key)]
        if shown:
            self._say(f" {self._glyphs.dot} ".join(["tandem", *shown]), "info")
        if self.mode != "off" and self._thread is None:
            self._thread = threading.Thread(target=self._display, name="console", daemon=True)
            self._thread.start()

    def train(self, step: int, policy_version: int, metrics: Mapping[str, float]) -> None:
        """One step was done."""
        self.progress.train(step, policy_version, metrics)
        if self.mode != "plain":
            return
        now = self._clock()
        last = step >= self.progress.total_steps
        if last or self._last_step_line_s is None or now - self._last_step_line_s >= PLAIN_INTERVAL_S:
            self._last_step_line_s = now
            self._say(self._step_line(), "info")

    def validation(
        self,
        *,
        version: int,
        step: int,
        reason: str,
        accuracy: float | None,
        ci: tuple[float, float] | None = None,
        duration_s: float | None = None,
        status: str = "done",
    ) -> None:
        """A validation ended, or was superseded."""
        entry = ValidationEntry(version=version, step=step, reason=reason, accuracy=accuracy, ci=ci, duration_s=duration_s, status=status)
        self.progress.validations.append(entry)
        if accuracy is None:
            self._say(f"validation v{version} {status} ({reason}, step {step})", "warning" if status == "failed" else "info")
            return
        took = f" in {duration_s:.1f} s" if duration_s is not None else ""
        interval = f" {interval_text(ci)}" if ci is not None else ""
        self._say(f"validation v{version} accuracy {accuracy:.3f}{interval} ({reason}, step {step}){took}", "validation")

    def workers(self, status: Mapping[str, WorkerStatus]) -> None:
        """What each process does now, in display order. Processes not named keep their last status."""
        self.progress.workers = {**self.progress.workers, **status}

    def note(self, text: str, level: Level = "info") -> None:
        """A line for the person. With mode `off`, errors still reach standard error."""
        self._say(text, level)

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Shows the end, restores the terminal, stops the display. Idempotent; bounded even when the terminal does not take output."""
        if self._closing:
            return
        self._closing = True
        for line in closing_lines(summary, self._glyphs):
            self._say(line, "info")
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        elif self.mode != "off":
            self._guard(self._write_lines)

    def _say(self, text: str, level: str) -> None:
        if self.mode == "off":
            if level == "error":
                self._guard(lambda: print(text, file=sys.stderr, flush=True))
            return
        stamp = "" if self.mode == "rich" else f"{clock_text(self.progress.elapsed_s):>8}  "
        self._lines.put((stamp + text, level))
        self._wake.set()

    def _step_line(self) -> str:
        progress = self.progress
        reward = first_of(progress.metrics, REWARD)
        mean, most = first_of(progress.metrics, STALENESS_MEAN), first_of(progress.metrics, STALENESS_MAX)
        parts = [f"step {progress.step}/{progress.total_steps}", f"v{progress.policy_version}"]
        if reward is not None:
            parts.append(f"reward {reward:.3f}")
        if mean is not None:
            parts.append(f"staleness {mean:.2f}" + (f" (max {most:.0f})" if most is not None else ""))
        if progress.tokens_per_s is not None:
            parts.append(f"{short_number(progress.tokens_per_s)} tok/s")
        if progress.step < progress.total_steps:
            parts.append(f"{clock_text(progress.remaining_s)} left")
        return "  ".join(parts)

    def _display(self) -> None:
        """The display thread.

        Consumes: lines said and the Progress. Waits for: the next refresh. Unblocked by: a line, or `close`. Produces: the terminal's
        content. Ends: after `close`, or when the terminal fails.
        """
        if self.mode == "rich" and not self._guard(self._live):
            self.mode = "plain"  # the picture failed, lines may still get through
            self._lines.put(("the live display failed; plain lines from here on", "warning"))
        if self.mode == "plain":
            self._guard(self._plain)

    def _live(self) -> None:
        console = RichConsole(file=self._stream, force_terminal=True, highlight=False, soft_wrap=False)
        with Live(Dashboard(self.progress), console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                closing = self._closing  # read before the lines: what was said before `close` is shown
                while not self._lines.empty():
                    text, level = self._lines.get()
                    live.console.print(Text(text, style=STYLES[level]))
                live.refresh()
                if closing:
                    return
                self._wake.wait(REFRESH_S)
                self._wake.clear()

    def _plain(self) -> None:
        while True:
            closing = self._closing
            self._write_lines()
            if closing:
                return
            self._wake.wait(1.0)
            self._wake.clear()

    def _write_lines(self) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        while not self._lines.empty():
            text, _ = self._lines.get()
            self._stream.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
        self._stream.flush()

    def _guard(self, action: Callable[[], None]) -> bool:
        """The boundary to the terminal: whether the action succeeded. Whatever fails there is said on standard error, once."""
        try:
            action()
            return True
        except Exception as error:
            try:
                print(f"tandem: the console failed ({type(error).__name__}: {error}); training goes on", file=sys.__stderr__, flush=True)
            except (OSError, ValueError):  # standard error is gone as well: nobody is left to be told
                return False
            return False


def closing_lines(summary: Mapping[str, Any] | None, glyphs: Glyphs) -> list[str]:
    """The result of a run in a few lines, from its summary.json."""
    if not summary:
        return []
    lines = []
    measured = [item for item in summary.get("validations", []) if item.get("accuracy") is not None]
    if measured:
        first, last = measured[0], measured[-1]
        gain = f"{first['accuracy']:.3f} (v{first['policy_version']}) {glyphs.arrow} " if len(measured) > 1 else ""
        lines.append(f"accuracy {gain}{last['accuracy']:.3f} (v{last['policy_version']}), {len(measured)} versions measured")
    rollout, trainer = summary.get("rollout", {}), summary.get("trainer", {})
    if rollout:
        waited = rollout.get("waited_for_validation_s") or 0.0
        lines.append(
            f"rollouts idle {rollout.get('idle_ratio') or 0.0:.0%}, trainer idle {trainer.get('idle_ratio') or 0.0:.0%}, "
            f"rollouts waited {waited:.1f} s for validation, {short_number(rollout.get('tokens_per_s'))} tok/s"
        )
    end = "finished" if summary.get("exit") == 0 else f"ended with exit code {summary.get('exit')}"
    lines.append(f"{end} after {summary.get('steps')} steps in {clock_text(summary.get('wall_s'))}")
    if summary.get("error"):
        lines.append(str(summary["error"]).strip().splitlines()[-1])
    return lines
