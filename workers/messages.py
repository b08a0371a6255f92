"""Everything that crosses a process boundary, and nothing else.

Frozen, slotted, keyword-only dataclasses. Tokens and log-probabilities are numpy arrays, never tensors (weights travel as
handles, see workers/weights.py). Times are `time.monotonic()` seconds, which on Linux all processes of one machine share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort"]
ValidationReason = Literal["first", "periodic", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one trajectory is sampled."""

    max_tokens: int  # response tokens, at least 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]; 1: off
    top_k: int = -1  # -1 or 0: off
    min_p: float = 0.0  # in [0, 1]; 0: off
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included; the stop token is part of the response
    stop: tuple[str, ...] = ()  # stop strings; the response ends with the token that completes one


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One problem, tokenised by the trainer."""

    prompt_id: str  # unique within its data set and stable over runs
    data_source: str  # which data set or task it comes from; chooses the reward and groups the metrics
    token_ids: NDArray[np.int32]  # [P] with the chat template applied
    text: str  # the rendered prompt, for people and for rewards
    messages: Any = None  # the conversation as the data has it (list of {role, content}), or None for plain text
    ground_truth: Any = None  # what a reward compares with
    extra_info: dict[str, Any] = field(default_factory=dict)  # verl's extra_info
    columns: dict[str, Any] = field(default_factory=dict)  # all other columns of the row, for TRL-style rewards
    reward: str | None = None  # the reward that scores it, where its source chooses one


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled answer."""

    token_ids: NDArray[np.int32]  # [T] response tokens; T may be 0 after an abort
    logprobs: NDArray[np.float32]  # [T] behaviour log-probabilities under softmax(logits / temperature), full vocabulary
    versions: NDArray[np.int32]  # [T] policy version that produced each token
    finish_reason: FinishReason
    text: str = ""  # decoded response without special tokens
    reward: float | None = None  # None: not scored (the group is excluded)
    reward_metrics: dict[str, float] = field(default_factory=dict)  # further entries that the reward returned
    reward_error: str | None = None  # kind and message when scoring failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """Trainer to rollout worker: sample `n = len(seeds)` trajectories of one prompt."""

    request_id: int  # unique in the run; grows in the order of the data
    prompt: Prompt
    epoch: int
    sampling: SamplingParams
    seeds: tuple[int, ...]  # one random stream per trajectory
    min_version: int  # the oldest policy version that may produce a token of this group
    attempt: int = 0  # how often it has been issued before


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """Rollout worker to trainer: the trajectories of one request, scored."""

    request: RolloutRequest
    trajectories: tuple[Trajectory, ...]  # [n], in the order of the seeds
    worker: str
    started_s: float  # first token's computation began
    generated_s: float  # last trajectory finished
    ended_s: float  # scored and sent


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailed:
    """Rollout worker to trainer: one request could not be completed; the worker lives on."""

    request: RolloutRequest
    worker: str
    kind: str  # class name of the exception, or the kind of reward error
    traceback: str
    fatal: bool = False  # the run must stop (reward.on_error: stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStats:
    """Rollout worker to trainer, about once a second and at every adoption: totals since the worker started."""

    worker: str
    time_s: float
    busy_s: float  # in the engine with at least one running sequence
    idle_s: float  # waiting for a request
    paused_s: float  # standing still because of a serial validation
    adopt_s: float  # standing still while adopting weights
    tokens: int  # response tokens generated
    trajectories: int
    running: int  # sequences in the engine now
    queued: int  # requests received and not started


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPublished:
    """Trainer to workers: `version` lies complete in `slot`, which is leased to the receiver until it answers."""

    version: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsAdopted:
    """Worker to trainer: all leases of this worker on versions <= `version` end."""

    worker: str
    version: int
    wait_s: float  # from receipt of the announcement to adoption
    copy_s: float  # standing still for the copy


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRollout:
    """Trainer to rollout worker: stand still (True) or go on (False). Only serial validation uses it."""

    paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSet:
    """One held-out set with its own sampling. Sent once, when the validation worker starts."""

    name: str
    prompts: tuple[Prompt, ...]
    n: int  # answers per problem
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRequest:
    """Trainer to validation worker: measure `version`, whose weights lie in `slot`, leased until the report."""

    version: int
    slot: int
    step: int  # optimizer steps that made this version
    reason: ValidationReason
    requested_s: float
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One validated answer, for the generations table."""

    data_source: str
    prompt_id: str
    prompt: str
    answer: str
    ground_truth: str
    score: float | None
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """Validation worker to trainer: what `request.version` achieves. Ends the lease on its slot."""

    request: ValidationRequest
    worker: str
    accuracy: float  # mean score over all sets' problems, each problem's answers averaged first
    metrics: dict[str, float]  # verl's names: val-core/<source>/<variable>/mean@n, val-aux/...
    problems: int
    unscored: int  # answers whose reward failed
    generations: tuple[Generation, ...]
    checksum: str | None  # of the weights that were computed on, taken after the last token; None when switched off
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationFailed:
    """Validation worker to trainer: measuring `request.version` raised; the worker lives on."""

    request: ValidationRequest
    worker: str
    kind: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorker:
    """Trainer to worker: abandon the work and end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """Worker to trainer: weights are loaded, requests may come."""

    worker: str
    pid: int
    device: str
    version: int  # policy version that is loaded
    capacity: int  # sequences generated at once
    startup_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """Worker to trainer: an exception ended the worker. Followed by WorkerExited."""

    worker: str
    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """The trainer's reader to the trainer: the end of a worker's pipe. Always the last message of an incarnation."""

    worker: str
    incarnation: int
    exitcode: int | None  # negative: killed by that signal; None: still running when the wait for it ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Worker to trainer: something that took time, for the timeline."""

    worker: str
    name: str  # "rollout", "validation", "adopt", "paused", ...
    started_s: float
    ended_s: float
    detail: str = ""


ToRollout = RolloutRequest | WeightsPublished | PauseRollout | StopWorker
ToValidation = ValidationRequest | StopWorker
FromWorker = (
    RolloutGroup
    | RolloutFailed
    | RolloutStats
    | WeightsAdopted
    | ValidationReport
    | ValidationFailed
    | WorkerReady
    | WorkerFailed
    | WorkerExited
    | Span
)
