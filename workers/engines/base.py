"""The contract of a rollout engine. One test suite, tests/workers/engines/, runs on every implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from workers.messages import FinishReason, SamplingParams

if TYPE_CHECKING:
    import torch


class EngineError(RuntimeError):
    """The engine cannot go on (out of memory, a dead server). Its worker ends and is restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Sample `len(seeds)` sequences after one prompt. The prompt is computed once for all of them."""

    request_id: int
    prompt_ids: NDArray[np.int32]  # [P], P >= 1
    sampling: SamplingParams
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """One finished sequence."""

    request_id: int
    index: int  # which of the request's seeds
    token_ids: NDArray[np.int32]  # [T], the stop token included
    logprobs: NDArray[np.float32]  # [T] under softmax(logits / temperature) over the full vocabulary (greedy: temperature 1)
    sampled_logprobs: NDArray[np.float32]  # [T] under the distribution sampled from (after top-k, top-p, min-p); greedy: 0
    versions: NDArray[np.int32]  # [T] policy version of each token
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    running: int  # sequences being generated
    waiting: int  # sequences submitted and not started
    capacity: int  # sequences generated at once
    tokens: int  # response tokens generated since construction
    steps: int  # decode steps since construction
    kv_cache_bytes: int


class Engine(ABC):
    """Generates from token ids. Not thread-safe: one thread calls everything.

    Consumes: submitted requests. Waits for: nothing; `step` computes and returns. Produces: EngineOutput, in the order of finishing.
    """

    version: int  # policy version of the weights in use; -1 before the first `adopt`

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` would compute something."""

    @abstractmethod
    def submit(self, request: EngineRequest) -> None:
        """Queues a request. ValueError, naming the limits, when prompt + max_tokens can never fit."""

    @abstractmethod
    def step(self) -> list[EngineOutput]:
        """Generates at least one token for every running sequence (an empty list when there is no work), starts waiting ones, and
        returns the sequences that finished."""

    @abstractmethod
    def abort(self, request_id: int) -> list[EngineOutput]:
        """Ends all unfinished sequences of a request at once; they come back with their tokens so far and reason `abort`."""

    @abstractmethod
    def adopt(self, weights: Mapping[str, torch.Tensor], version: int, *, copy: bool = True) -> None:
        """Computes with `weights` (names of the model's state_dict parameters) from the next token on.

        With `copy` the values are copied out before it returns. Without, the engine computes straight on the given memory,
        which must stay unchanged until the next `adopt`. KeyError names missing or unknown parameters."""

    @abstractmethod
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def close(self) -> None:
        """Frees what the engine holds. Idempotent; unfinished requests are forgotten."""
