"""Hands prompts to rollout workers: which request, to whom, when. The only place where requests are made."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from trainer.staleness import StalenessGate
from workers.messages import Prompt, RolloutRequest, SamplingParams

LOOKAHEAD = 2  # groups that wait at a worker, so that a free slot is refilled without a round trip


class Source(Protocol):
    """Where prompts come from (trainer.data.PromptSource)."""

    def next(self) -> tuple[int, Prompt]: ...


def trajectory_seed(run_seed: int, prompt_id: str, epoch: int, index: int) -> int:
    """The random stream of one trajectory: different for every (run, prompt, epoch, index), the same whatever else is sampled."""
    text = f"{run_seed}|{prompt_id}|{epoch}|{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Dispatcher:
    """Keeps every rollout worker supplied, as far as the staleness gate allows.

    `pump` is called by the trainer's loop after anything that makes room, and by the mailbox's reader thread when a worker has
    finished a group, so that workers are refilled while the loop computes an optimizer step. A lock guards all state.
    """

    def __init__(
        self,
        source: Source,
        gate: StalenessGate,
        send: Callable[[str, RolloutRequest], bool],
        *,
        sampling: SamplingParams,
        n: int,
        seed: int,
        total_groups: int,
        slots: int,
        on_error: Callable[[BaseException], None],
        first_request_id: int = 0,
    ) -> None:
        self._source = source
        self._gate = gate
        self._send = send
        self._sampling = sampling
        self._n = n
        self._seed = seed
        self._limit = -(-slots // n) + LOOKAHEAD
        self._lock = threading.RLock()
        self._on_error = on_error
        self._next_id = first_request_id
        self._at: dict[str, set[int]] = {}  # worker -> requests that it has not answered
        self._in_flight: dict[int, RolloutRequest] = {}  # requests whose group has not reached the loop
        self._again: deque[RolloutRequest] = deque()  # requests to be issued again; they are in flight and hold their reservation
        self._paused = False
        self.version = 0
        self.wanted = total_groups  # groups that may still be requested, replacements of dropped ones included
        self.requested = 0
        self.dropped: Counter[str] = Counter()
        self.released_on_drop = 0

    # Workers

    def add_worker(self, worker: str) -> None:
        """A worker is ready for requests."""
        with self._lock:
            self._at.setdefault(worker, set())
        self.pump()

    def remove_worker(self, worker: str) -> int:
        """A worker is gone: its requests are issued again. Returns how many."""
        with self._lock:
            lost = sorted(self._at.pop(worker, set()))
            for request_id in lost:
                if request_id in self._in_flight:
                    self._reissue(self._in_flight[request_id])
        self.pump()
        return len(lost)

    def answered(self, worker: str, request_id: int) -> None:
        """A worker has sent its answer to a request (reader thread). Frees its place there at once."""
        with self._lock:
            self._at.get(worker, set()).discard(request_id)
        self.pump()

    # The loop

    def arrived(self, request: RolloutRequest) -> bool:
        """The loop received a request's group. False when it is not waited for (a second answer after a reissue): ignore it."""
        with self._lock:
            known = self._in_flight.get(request.request_id)
            if known is None or known.attempt != request.attempt:
                return False
            del self._in_flight[request.request_id]
            return True

    def retry(self, request: RolloutRequest) -> None:
        """Issues a failed request again, at the present version."""
        with self._lock:
            self._reissue(request)
        self.pump()

    def drop(self, reason: str) -> None:
        """A group that has arrived (or failed for good) is not trained; a new one may take its place at once."""
        with self._lock:
            self.dropped[reason] += 1
            self.wanted += 1
            self._gate.release()
        self.pump()

    def published(self, version: int, groups: int) -> None:
        """`version`, made by `groups` trained groups, is out: new requests are born with it."""
        with self._lock:
            self.version = version
            self._gate.release(groups)
        self.pump()

    def pause(self, paused: bool) -> None:
        """Makes no new request while paused."""
        with self._lock:
            self._paused = paused
        self.pump()

    def pump(self) -> None:
        """Makes and sends all requests that gate, total and workers allow. An exception (from the data) goes to `on_error`."""
        try:
            with self._lock:
                while not self._paused and (worker := self._free_worker()) is not None:
                    request = self._next()
                    if request is None:
                        return
                    self._at[worker].add(request.request_id)
                    if not self._send(worker, request):
                        # The worker is gone; its exit message will follow and find nothing of this request.
                        del self._at[worker]
                        self._reissue(request)
        except Exception as error:  # runs on the reader thread too, where nobody else would see it
            self._on_error(error)

    def in_flight(self) -> int:
        with self._lock:
            return len(self._in_flight)

    def pending_deadlines(self) -> list[int]:
        """Deadlines of all groups that are requested and have not arrived."""
        with self._lock:
            return [self._gate.deadline(request.min_version) for request in self._in_flight.values()]

    def unfinished(self) -> list[tuple[str, int]]:
        """(prompt id, epoch) of every request in flight, in request order, for a checkpoint."""
        with self._lock:
            return [(self._in_flight[key].prompt.prompt_id, self._in_flight[key].epoch) for key in sorted(self._in_flight)]

    def _free_worker(self) -> str | None:
        free = [(len(requests), worker) for worker, requests in self._at.items() if len(requests) < self._limit]
        return min(free)[1] if free else None

    def _next(self) -> RolloutRequest | None:
        if self._again:
            # Born again at the present version: its tokens will be that young, so its deadline moves with it.
            request = replace(self._again.popleft(), min_version=self.version)
            self._in_flight[request.request_id] = request
            return request
        if self.wanted <= 0 or self._gate.room <= 0:
            return None
        epoch, prompt = self._source.next()
        self._gate.reserve()
        self.wanted -= 1
        self.requested += 1
        request = RolloutRequest(
            request_id=self._next_id,
            prompt=prompt,
            epoch=epoch,
            sampling=self._sampling,
            seeds=tuple(trajectory_seed(self._seed, prompt.prompt_id, epoch, index) for index in range(self._n)),
            min_version=self.version,
        )
        self._next_id += 1
        self._in_flight[request.request_id] = request
        return request

    def _reissue(self, request: RolloutRequest) -> None:
        again = replace(request, attempt=request.attempt + 1)
        self._in_flight[again.request_id] = again
        self._again.append(again)
