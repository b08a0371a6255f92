"""The scorer of a worker: gives each answer to the rewards of its prompt and adds up what comes back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from configs.data import RewardConfig
from workers.messages import Prompt
from workers.rewards import Score
from workers.rewards.answer import Answer, Outcome
from workers.rewards.builtin import BUILTINS, check_builtin, is_custom, is_url
from workers.rewards.function import RewardFunction, load_reward
from workers.rewards.plan import Part, configured_specs, kwargs_of, parts_of


class Backend(Protocol):
    """Where rewards are computed that are not computed in place."""

    def submit(self, tag: Hashable, spec: str, kwargs: Mapping[str, Any], answers: Sequence[Answer]) -> None: ...

    def poll(self) -> list[tuple[Hashable, list[Outcome]]]: ...

    def close(self) -> None: ...


class _Group:
    """The answers to one prompt while they are scored."""

    def __init__(self, key: Hashable, parts: tuple[Part, ...], size: int) -> None:
        self.key = key
        self.parts = parts
        self.outcomes: list[list[Outcome | None]] = [[None] * size for _ in parts]
        self.missing = size * len(parts)

    def put(self, part: int, index: int, outcome: Outcome) -> None:
        assert self.outcomes[part][index] is None
        self.outcomes[part][index] = outcome
        self.missing -= 1


class RewardScorer:
    """Scores groups by the configured rewards: cheap built-ins in place, everything else in scoring processes or over HTTP.

    Consumes: groups of answers. Waits for: nothing; `submit` and `poll` return at once. Produces: one Score per answer.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._groups: dict[int, _Group] = {}
        self._next = 0
        self._finished: list[_Group] = []
        self._local: dict[str, RewardFunction] = {}
        self._processes: Backend | None = None
        self._http: Backend | None = None
        specs = configured_specs(config)
        for spec in specs:
            if not is_custom(spec) and not is_url(spec):
                check_builtin(spec)
            if self._in_place(spec):
                self._local_reward(spec)
        preload = [spec for spec in specs if not is_url(spec) and not self._in_place(spec)]
        if preload:
            self._scoring_processes(preload)

    @property
    def pending(self) -> int:
        return len(self._groups) + len(self._finished)

    def submit(self, key: Hashable, prompt: Prompt, completions: Sequence[str], completion_ids: Sequence[NDArray[np.int32]]) -> None:
        answers = [_answer(prompt, text, ids) for text, ids in zip(completions, completion_ids, strict=True)]
        group = _Group(key, parts_of(self._config, prompt), len(answers))
        number, self._next = self._next, self._next + 1
        self._groups[number] = group
        for index, part in enumerate(group.parts):
            tag = (number, index)
            if not answers:
                continue
            if is_url(part.spec):
                self._http_scorer().submit(tag, part.spec, {}, answers)
            elif self._in_place(part.spec):
                self._enter(tag, self._local_reward(part.spec).score(answers))
            else:
                self._scoring_processes().submit(tag, part.spec, kwargs_of(self._config, part.spec), answers)
        self._settle(number)

    def poll(self) -> list[tuple[Hashable, list[Score]]]:
        for backend in (self._processes, self._http):
            for tag, outcomes in backend.poll() if backend is not None else ():
                self._enter(tag, outcomes)
        finished, self._finished = self._finished, []
        return [(group.key, self._scores(group)) for group in finished]

    def close(self) -> None:
        for backend in (self._processes, self._http):
            if backend is not None:
                backend.close()
        self._processes = self._http = None
        self._groups.clear()
        self._finished.clear()

    def _in_place(self, spec: str) -> bool:
        if is_url(spec):
            return False
        return self._config.workers == 0 or (spec in BUILTINS and BUILTINS[spec].in_place)

    def _local_reward(self, spec: str) -> RewardFunction:
        if spec not in self._local:
            self._local[spec] = load_reward(spec, kwargs_of(self._config, spec))
        return self._local[spec]

    def _scoring_processes(self, preload: Sequence[str] = ()) -> Backend:
        if self._processes is None:
            from workers.rewards.processes import ScoringProcesses

            config = self._config
            self._processes = ScoringProcesses(
                [(spec, kwargs_of(config, spec)) for spec in preload],
                workers=config.workers,
                timeout_s=config.timeout_s,
                max_retries=config.max_retries,
                max_memory_bytes=int(config.max_memory_gb * 2**30),
            )
        return self._processes

    def _http_scorer(self) -> Backend:
        if self._http is None:
            from workers.rewards.http import HttpScorer

            config = self._config
            self._http = HttpScorer(timeout_s=config.timeout_s, max_retries=config.max_retries, max_concurrency=config.max_concurrency)
        return self._http

    def _enter(self, tag: Hashable, outcomes: Sequence[Outcome]) -> None:
        """Puts a backend's outcomes in their places. Tags are (group, part), or ((group, part), index) for a single answer."""
        assert isinstance(tag, tuple)
        first, second = tag
        (number, part), start = (first, second) if isinstance(first, tuple) else (tag, 0)
        group = self._groups[number]
        for offset, outcome in enumerate(outcomes):
            group.put(part, start + offset, outcome)
        self._settle(number)

    def _settle(self, number: int) -> None:
        group = self._groups.get(number)
        if group is not None and group.missing == 0:
            del self._groups[number]
            self._finished.append(group)

    def _scores(self, group: _Group) -> list[Score]:
        columns = zip(*group.outcomes, strict=True)
        return [self._combine(group.parts, [item for item in column if item is not None]) for column in columns]

    def _combine(self, parts: tuple[Part, ...], outcomes: Sequence[Outcome]) -> Score:
        """The weighted sum. A reward that returned None is left out of it; when all did, the answer is excluded."""
        metrics: dict[str, float] = {}
        total: float | None = None
        error: str | None = None
        for part, outcome in zip(parts, outcomes, strict=True):
            metrics |= outcome.metrics
            error = error or outcome.error
            if outcome.value is not None:
                total = (total or 0.0) + part.weight * outcome.value
                if len(parts) > 1:
                    metrics[part.name] = outcome.value
        if error is not None:
            return Score(value=self._config.error_score if self._config.on_error == "score" else None, metrics=metrics, error=error)
        return Score(value=total, metrics=metrics)


def _answer(prompt: Prompt, text: str, ids: NDArray[np.int32]) -> Answer:
    return Answer(
        text=text,
        token_ids=np.asarray(ids).tolist(),
        data_source=prompt.data_source,
        prompt_text=prompt.text,
        messages=prompt.messages,
        ground_truth=prompt.ground_truth,
        extra_info=dict(prompt.extra_info),
        columns=dict(prompt.columns),
    )
