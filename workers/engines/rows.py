"""The running sequences, one row each, as arrays: rows 0..count-1 are active, whatever finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from workers.engines.base import EngineOutput
from workers.engines.sampler import Draw
from workers.engines.stop import StopStrings
from workers.messages import FinishReason, SamplingParams


class RowTable:
    """Tokens, lengths and sampling settings of up to `slots` sequences of up to `length` tokens. Allocated once."""

    def __init__(self, slots: int, length: int) -> None:
        self.count = 0
        self.tokens = np.zeros((slots, length), dtype=np.int32)  # prompt and response
        self.logprobs = np.zeros((slots, length), dtype=np.float32)  # column = position; of the response only
        self.sampled_logprobs = np.zeros((slots, length), dtype=np.float32)
        self.versions = np.zeros((slots, length), dtype=np.int32)
        self.lengths = np.zeros(slots, dtype=np.int64)  # tokens so far, prompt included
        self.prompts = np.zeros(slots, dtype=np.int64)
        self.limits = np.zeros(slots, dtype=np.int64)  # length at which the row ends
        self.keys = np.zeros(slots, dtype=np.uint64)  # of the random streams
        self.temperature = np.zeros(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.top_p = np.zeros(slots, dtype=np.float32)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.stop_ids = np.full((slots, 1), -1, dtype=np.int64)
        self.request_ids = np.zeros(slots, dtype=np.int64)
        self.indices = np.zeros(slots, dtype=np.int64)
        self.watchers: list[StopStrings | None] = [None] * slots

    @property
    def slots(self) -> int:
        return len(self.lengths)

    def _arrays(self) -> Iterable[np.ndarray]:
        yield from (self.lengths, self.prompts, self.limits, self.keys, self.temperature, self.top_k, self.top_p, self.min_p)
        yield from (self.stop_ids, self.request_ids, self.indices)

    def add(self, request_id: int, index: int, prompt: np.ndarray, key: int, sampling: SamplingParams, watcher: StopStrings | None) -> int:
        """Takes the next row, which holds the prompt only. Returns it."""
        row = self.count
        self.count += 1
        length = len(prompt)
        self.tokens[row, :length] = prompt
        self.lengths[row] = self.prompts[row] = length
        self.limits[row] = length + sampling.max_tokens
        self.keys[row] = key
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        ids = sampling.stop_token_ids
        if len(ids) > self.stop_ids.shape[1]:
            wider = np.full((self.slots, len(ids)), -1, dtype=np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(ids)] = ids
        self.request_ids[row] = request_id
        self.indices[row] = index
        self.watchers[row] = watcher
        return row

    def append(self, draw: Draw, version: int) -> dict[int, FinishReason]:
        """Appends a token to every active row. Returns the rows that end with it."""
        count = self.count
        rows = np.arange(count)
        columns = self.lengths[:count].copy()
        self.tokens[rows, columns] = draw.tokens
        self.logprobs[rows, columns] = draw.logprobs
        self.sampled_logprobs[rows, columns] = draw.sampled_logprobs
        self.versions[rows, columns] = version
        self.lengths[:count] += 1
        stopped = (self.stop_ids[:count] == draw.tokens[:, None]).any(axis=1)
        ended: dict[int, FinishReason] = {int(row): "length" for row in rows[columns + 1 >= self.limits[:count]]}
        ended.update((int(row), "stop") for row in rows[stopped])
        for row, watcher in enumerate(self.watchers[:count]):
            if watcher is not None and watcher.push(int(draw.tokens[row])):
                ended[row] = "stop"
        return ended

    def remove(self, ended: dict[int, FinishReason], moved: Callable[[int, int, int], None]) -> list[EngineOutput]:
        """Takes rows out, in row order. The last active row moves into each hole; `moved(source, target, length)` moves its cache."""
        outputs = [self._output(row, ended[row]) for row in sorted(ended)]
        for row in sorted(ended, reverse=True):
            last = self.count - 1
            if row != last:
                length = int(self.lengths[last])
                for array in (self.tokens, self.logprobs, self.sampled_logprobs, self.versions):
                    array[row, :length] = array[last, :length]
                for array in self._arrays():
                    array[row] = array[last]
                self.watchers[row] = self.watchers[last]
                moved(last, row, length)
            self.watchers[last] = None
            self.count = last
        return outputs

    def _output(self, row: int, reason: FinishReason) -> EngineOutput:
        response = slice(int(self.prompts[row]), int(self.lengths[row]))
        return EngineOutput(
            request_id=int(self.request_ids[row]),
            index=int(self.indices[row]),
            token_ids=self.tokens[row, response].copy(),
            logprobs=self.logprobs[row, response].copy(),
            sampled_logprobs=self.sampled_logprobs[row, response].copy(),
            versions=self.versions[row, response].copy(),
            finish_reason=reason,
        )
