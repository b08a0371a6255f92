"""Rewards in processes of their own: a call that hangs, crashes or eats memory costs one score, and nothing waits for it."""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from pebble import ProcessExpired, ProcessPool

from workers.rewards import child
from workers.rewards.answer import Answer, Outcome

NICENESS = 10  # generation keeps its core; scoring takes what is left, and about a tenth where nothing is
STARTUP_S = 120.0  # without any sign of life for so long, the processes are started anew
MAX_RESTARTS = 3  # of a call that never ran because its process was lost to something else


@dataclass(slots=True)
class _Call:
    """One call of a reward. `answers` empty: the question how the reward wants its answers."""

    tag: Hashable
    spec: str
    kwargs: Mapping[str, Any]
    answers: tuple[Answer, ...]
    attempt: int = 0
    restarts: int = 0


class ScoringProcesses:
    """A pool of scoring processes behind `submit` and `poll`, neither of which waits.

    The time limit of a call starts when a process takes it up, not while it queues. A process whose call exceeds it is killed and
    replaced. A failed call is repeated up to `max_retries` times; its last failure is its outcome.
    """

    def __init__(
        self,
        specs: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        workers: int,
        timeout_s: float,
        max_retries: int,
        max_memory_bytes: int,
        startup_s: float = STARTUP_S,
    ) -> None:
        self._specs = list(specs)
        self._workers = workers
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._max_memory_bytes = max_memory_bytes
        self._startup_s = startup_s
        self._pool: ProcessPool | None = None
        self._running: dict[Future[Any], _Call] = {}
        self._finished: deque[Future[Any]] = deque()  # filled by the pool's threads; append and popleft are atomic
        self._done: list[tuple[Hashable, list[Outcome]]] = []
        self._batched: dict[str, bool] = {}
        self._waiting: dict[str, list[_Call]] = {}  # until it is known how the reward wants its answers
        self._alive_s = time.monotonic()
        self._closed = False
        for spec, kwargs in specs:  # starts the processes while the worker loads its model
            self._waiting[spec] = []
            self._schedule(_Call(None, spec, kwargs, ()))

    def submit(self, tag: Hashable, spec: str, kwargs: Mapping[str, Any], answers: Sequence[Answer]) -> None:
        """Queues answers to one prompt. `tag` comes back with their outcomes, all at once."""
        assert answers and not self._closed
        call = _Call(tag, spec, kwargs, tuple(answers))
        if spec in self._batched:
            self._split(call)
        elif spec in self._waiting:
            self._waiting[spec].append(call)
        else:
            self._waiting[spec] = [call]
            self._schedule(_Call(None, spec, kwargs, ()))

    def poll(self) -> list[tuple[Hashable, list[Outcome]]]:
        """Outcomes that are there. For a reward that takes one answer a call, tags are (tag, index) with one outcome each."""
        while self._finished:
            future = self._finished.popleft()
            call = self._running.pop(future, None)
            if call is not None:  # None: given up by a restart
                self._alive_s = time.monotonic()
                self._take(call, future)
        if self._running and time.monotonic() - self._alive_s > self._startup_s:
            if any(future.running() for future in self._running):
                self._alive_s = time.monotonic()
            else:
                self._restart()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Kills the processes. Bounded; idempotent."""
        self._closed = True
        self._running.clear()
        self._stop_pool()

    def _split(self, call: _Call) -> None:
        if self._batched[call.spec]:
            self._schedule(call)
            return
        for index, answer in enumerate(call.answers):
            self._schedule(_Call((call.tag, index), call.spec, call.kwargs, (answer,)))

    def _schedule(self, call: _Call) -> None:
        if self._pool is None or not self._pool.active:
            self._stop_pool()
            self._alive_s = time.monotonic()
            self._pool = ProcessPool(
                max_workers=self._workers,
                context=multiprocessing.get_context("spawn"),  # a fork would inherit the worker's pipes and threads
                initializer=child.start_child,
                initargs=(self._specs, self._max_memory_bytes, NICENESS),
            )
        if not self._running:
            self._alive_s = time.monotonic()
        if call.answers:
            future = self._pool.schedule(child.score, args=(call.spec, call.kwargs, call.answers), timeout=self._timeout_s)
        else:
            future = self._pool.schedule(child.describe, args=(call.spec, call.kwargs), timeout=self._startup_s)
        self._running[future] = call
        future.add_done_callback(self._finished.append)

    def _take(self, call: _Call, future: Future[Any]) -> None:
        try:
            result = future.result(timeout=0)
        except BrokenProcessPool as error:
            # A process was lost between two calls: not this call's fault.
            if call.restarts < MAX_RESTARTS and not self._closed:
                call.restarts += 1
                self._schedule(call)
                return
            self._fail(call, f"crash: the scoring processes broke down {call.restarts + 1} times: {error}")
        except TimeoutError:
            self._fail(call, f"timeout: no score within reward.timeout_s = {self._timeout_s:g} s")
        except ProcessExpired as error:
            self._fail(call, f"crash: the scoring process ended with {_ending(error.exitcode)}")
        except Exception as error:  # e.g. an answer that cannot be sent to the process
            self._fail(call, f"exception: {type(error).__name__}: {str(error)[:500]}")
        else:
            self._succeed(call, result)

    def _succeed(self, call: _Call, result: Any) -> None:
        if call.answers:
            error = next((outcome.error for outcome in result if outcome.error is not None), None)
            if error is not None and self._again(call):
                return
            self._done.append((call.tag, result))
            return
        # A reward that cannot be loaded is treated as one call a score: each reports why.
        self._batched[call.spec], _ = result
        for waiting in self._waiting.pop(call.spec, []):
            self._split(waiting)

    def _fail(self, call: _Call, error: str) -> None:
        if self._again(call):
            return
        if call.answers:
            self._done.append((call.tag, [Outcome(None, {}, error)] * len(call.answers)))
            return
        kind, _, message = error.partition(": ")
        for waiting in self._waiting.pop(call.spec, []):
            self._done.append((waiting.tag, [Outcome(None, {}, f"startup: loading the reward failed ({kind}: {message})")] * len(waiting.answers)))

    def _again(self, call: _Call) -> bool:
        if call.attempt >= self._max_retries or self._closed:
            return False
        call.attempt += 1
        self._schedule(call)
        return True

    def _restart(self) -> None:
        """No call has started or ended for `startup_s`: the processes do not come up. New ones, for all that was asked."""
        calls = list(self._running.values())
        self._running.clear()
        self._stop_pool()
        for call in calls:
            self._fail(call, f"startup: the scoring process showed no sign of life for {self._startup_s:g} s; does importing the reward hang?")

    def _stop_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
            pool.join()


def _ending(exitcode: int) -> str:
    if exitcode < 0:
        return f"signal {-exitcode}"
    return "exit code 0" if exitcode == child.EXIT_INSTEAD_OF_ZERO else f"exit code {exitcode}"
