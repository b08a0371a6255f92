"""What runs in a scoring process. Imports nothing heavy: every process, and every replacement of a killed one, starts here."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from workers.rewards.answer import Answer, Outcome
from workers.rewards.function import RewardFunction, load_reward

PRINT_LIMIT = 64 * 1024  # bytes that all rewards of one process may print into the worker's log
EXIT_INSTEAD_OF_ZERO = 86
_PR_SET_PDEATHSIG = 1
_loaded: dict[str, RewardFunction | str] = {}  # spec and arguments -> the reward, or why it cannot be loaded


class LimitedOutput(io.TextIOBase):
    """A text stream that passes on the first `limit` bytes and drops the rest, so that a talkative reward fills no disk."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self._descriptor = descriptor
        self._left = limit

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._left > 0:
            data = text[: self._left].encode("utf-8", "replace")[: self._left]
            self._left -= len(data)
            if self._left <= 0:
                data += b"\n[the rest of what this scoring process prints is dropped]\n"
            with contextlib.suppress(OSError):  # nobody reads the log any more
                os.write(self._descriptor, data)
        return len(text)


def start_child(specs: Sequence[tuple[str, Mapping[str, Any]]], max_memory_bytes: int, niceness: int) -> None:
    """Prepares a scoring process: it dies with its parent, is limited in memory and output, yields the CPU, and has its rewards loaded."""
    _die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a reward that hangs in C code never runs a Python handler
    os.nice(niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    _limit_output()
    _make_exits_visible()
    for spec, kwargs in specs:
        _load(spec, kwargs)


def describe(spec: str, kwargs: Mapping[str, Any]) -> tuple[bool, str | None]:
    """(whether the reward takes a whole group at once, why it cannot be loaded)."""
    reward = _load(spec, kwargs)
    return (False, reward) if isinstance(reward, str) else (reward.batched, None)


def score(spec: str, kwargs: Mapping[str, Any], answers: Sequence[Answer]) -> list[Outcome]:
    """One call of a reward: one answer, or a group of them."""
    reward = _load(spec, kwargs)
    if isinstance(reward, str):
        return [Outcome(None, {}, f"exception: {reward}")] * len(answers)
    return reward.score(answers)


def _load(spec: str, kwargs: Mapping[str, Any]) -> RewardFunction | str:
    key = f"{spec} {json.dumps(kwargs, sort_keys=True, default=repr)}"
    if key not in _loaded:
        try:
            _loaded[key] = load_reward(spec, kwargs)
        except Exception as error:  # reported with every score that it costs
            _loaded[key] = f"{error}" if isinstance(error, ValueError) else f"reward {spec!r} cannot be loaded: {type(error).__name__}: {error}"
    return _loaded[key]


def _die_with_parent() -> None:
    """SIGKILL from the kernel when the parent ends, and a thread that watches it where the kernel cannot."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def _limit_output() -> None:
    """Python's prints go to the worker's log up to a limit; what C code or subprocesses print is dropped."""
    log = os.dup(2)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    sys.stdout = sys.stderr = LimitedOutput(log, PRINT_LIMIT)


def _make_exits_visible() -> None:
    # The pool takes exit code 0 for a planned end and would wait for the answer until the time limit.
    leave = os._exit

    def exit_visibly(code: int) -> None:
        leave(code or EXIT_INSTEAD_OF_ZERO)

    os._exit = exit_visibly  # type: ignore[assignment]
