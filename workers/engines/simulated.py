"""An engine without a model: it emits tokens on a clock, with lengths from a distribution.

For scheduling tests, benchmarks and sizing: everything around it (queues, slots, staleness, validation) is real.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import SimulatedConfig
from workers.engines.base import Engine, EngineOutput, EngineRequest, EngineStats
from workers.messages import FinishReason

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, order=True)
class _Sequence:
    last_step: int  # the decode step that produces its last token
    order: int
    request: EngineRequest = field(compare=False)
    index: int = field(compare=False)
    length: int = field(compare=False)


def simulated_length(config: SimulatedConfig, seed: int, max_tokens: int) -> int:
    """The length in tokens that the trajectory with this seed has; the same in every process."""
    random = np.random.default_rng(seed % 2**63)
    if config.length_distribution == "fixed":
        length = float(config.length_median)
    elif config.length_distribution == "uniform":
        length = random.uniform(1, 2 * config.length_median - 1)
    else:
        length = config.length_median * float(np.exp(config.length_sigma * random.standard_normal()))
    return int(min(max(1, round(length)), config.length_max, max_tokens))


class SimulatedEngine(Engine):
    """One token for every running sequence each `seconds_per_decode_step`, however many run.

    One call of `step` goes on until a sequence finishes, but for at most `quantum_s`, so that many workers fit on few cores. The
    time of a step counts from the end of the previous one while there is work: the caller's time between steps is not added,
    since a GPU would go on computing meanwhile.
    """

    def __init__(
        self,
        config: SimulatedConfig,
        *,
        slots: int,
        quantum_s: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.version = -1
        self.weights_value = float("nan")  # a sample of the adopted made-up weights, which tests compare with the version
        self._config = config
        self._slots = slots
        self._quantum = max(1, int(quantum_s / config.seconds_per_decode_step))
        self._clock = clock
        self._sleep = sleep
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # a heap by last_step
        self._adoptions: list[tuple[int, int]] = []  # (first step, version), ascending
        self._due: float | None = None
        self._submitted = 0
        self._tokens = 0
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def submit(self, request: EngineRequest) -> None:
        for index, seed in enumerate(request.seeds):
            length = simulated_length(self._config, seed, request.sampling.max_tokens)
            self._waiting.append(_Sequence(0, self._submitted, request, index, length))
            self._submitted += 1

    def step(self) -> list[EngineOutput]:
        if not self.has_work:
            return []
        while self._waiting and len(self._running) < self._slots:
            sequence = self._waiting.popleft()
            sequence.last_step = self._steps + sequence.length
            heapq.heappush(self._running, sequence)
        count = min(self._running[0].last_step - self._steps, self._quantum)
        duration = count * self._config.seconds_per_decode_step
        now = self._clock()
        # After standing still for longer than a quantum the clock starts anew: that time is not made up for.
        slack = self._quantum * self._config.seconds_per_decode_step
        start = now if self._due is None or now - self._due > slack else self._due
        self._due = start + duration
        if self._due > now:
            self._sleep(self._due - now)
        self._steps += count
        self._tokens += count * len(self._running)
        finished: list[EngineOutput] = []
        while self._running and self._running[0].last_step <= self._steps:
            sequence = heapq.heappop(self._running)
            truncated = sequence.length == sequence.request.sampling.max_tokens
            finished.append(self._output(sequence, sequence.length, "length" if truncated else "stop"))
        if not self.has_work:
            self._due = None
        return finished

    def abort(self, request_id: int) -> list[EngineOutput]:
        ended = [self._output(item, self._steps - (item.last_step - item.length), "abort") for item in self._running if item.request.request_id == request_id]
        ended += [self._output(item, 0, "abort") for item in self._waiting if item.request.request_id == request_id]
        self._running = [item for item in self._running if item.request.request_id != request_id]
        heapq.heapify(self._running)
        self._waiting = deque(item for item in self._waiting if item.request.request_id != request_id)
        return ended

    def adopt(self, weights: Mapping[str, torch.Tensor], version: int, *, copy: bool = True) -> None:
        for tensor in weights.values():
            if copy:
                tensor = tensor.clone()  # a real engine reads all bytes, and so does this one
            self.weights_value = float(tensor.reshape(-1)[0])
        self.version = version
        self._adoptions.append((self._steps, version))
        # Only adoptions during a running sequence's life matter.
        oldest = min((item.last_step - item.length for item in self._running), default=self._steps)
        while len(self._adoptions) > 1 and self._adoptions[1][0] <= oldest:
            self._adoptions.pop(0)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running), waiting=len(self._waiting), capacity=self._slots, tokens=self._tokens, steps=self._steps, kv_cache_bytes=0)

    def close(self) -> None:
        self._running.clear()
        self._waiting.clear()

    def _output(self, sequence: _Sequence, tokens: int, reason: FinishReason) -> EngineOutput:
        versions = np.full(tokens, self.version, dtype=np.int32)
        first = sequence.last_step - sequence.length
        for step, version in self._adoptions:
            versions[max(0, step - first):] = version
        zeros = np.zeros(tokens, dtype=np.float32)
        return EngineOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=np.arange(tokens, dtype=np.int32) % 97,
            logprobs=zeros,
            sampled_logprobs=zeros,
            versions=versions,
            finish_reason=reason,
        )
