"""The validation worker: measures one frozen policy version at a time, on an engine of its own."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Sequence

from workers.engines.base import Engine, EngineOutput, EngineRequest
from workers.link import Link, StopWatch
from workers.messages import (
    Generation,
    Prompt,
    Span,
    Trajectory,
    ValidationFailed,
    ValidationReport,
    ValidationRequest,
    ValidationSet,
)
from workers.rewards import Scorer
from workers.scores import ScoredAnswer, validation_metrics
from workers.weights import WeightReader

Decode = Callable[[Sequence[int]], str]


def answer_seed(seed: int, set_name: str, prompt_id: str, index: int) -> int:
    """The random stream of one validation answer. It does not depend on the version: differences between versions are the policy's."""
    text = f"{seed}|validation|{set_name}|{prompt_id}|{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Measurement:
    """One validation in progress: all answers to all sets' problems by one engine, then their scores."""

    def __init__(
        self, identity: tuple[int, int], sets: Sequence[ValidationSet], seed: int, engine: Engine, scorer: Scorer, decode: Decode
    ) -> None:
        self._identity = identity  # keeps its scores apart from those that a failed measurement left behind
        self._engine = engine
        self._scorer = scorer
        self._decode = decode
        self._items: dict[int, tuple[ValidationSet, Prompt]] = {}
        self._outputs: dict[int, list[EngineOutput | None]] = {}
        self._texts: dict[int, tuple[str, ...]] = {}
        self.answers: dict[int, list[Trajectory]] = {}
        for held_out in sets:
            for prompt in held_out.prompts:
                key = len(self._items)
                self._items[key] = (held_out, prompt)
                self._outputs[key] = [None] * held_out.n
                seeds = tuple(answer_seed(seed, held_out.name, prompt.prompt_id, index) for index in range(held_out.n))
                engine.submit(EngineRequest(request_id=key, prompt_ids=prompt.token_ids, sampling=held_out.sampling, seeds=seeds))

    @property
    def done(self) -> bool:
        return len(self.answers) == len(self._items)

    @property
    def computing(self) -> bool:
        """Whether answers are still being generated; afterwards only scores are missing."""
        return self._engine.has_work

    def advance(self) -> bool:
        """One decode step and the scores that are ready. Returns whether anything was done."""
        worked = self._engine.has_work
        for output in self._engine.step() if worked else ():
            outputs = self._outputs[output.request_id]
            outputs[output.index] = output
            if all(item is not None for item in outputs):
                _, prompt = self._items[output.request_id]
                complete = [item for item in outputs if item is not None]
                texts = tuple(self._decode(item.token_ids.tolist()) for item in complete)
                self._texts[output.request_id] = texts
                self._scorer.submit((self._identity, output.request_id), prompt, texts, [item.token_ids for item in complete])
        for tag, scores in self._scorer.poll():
            assert isinstance(tag, tuple)
            identity, key = tag
            if identity != self._identity:
                continue
            worked = True
            self.answers[key] = [
                Trajectory(
                    token_ids=output.token_ids,
                    logprobs=output.logprobs,
                    versions=output.versions,
                    finish_reason=output.finish_reason,
                    text=text,
                    reward=score.value,
                    reward_metrics=dict(score.metrics),
                    reward_error=score.error,
                )
                for output, text, score in zip(self._outputs[key], self._texts[key], scores, strict=True)
                if output is not None
            ]
        return worked

    def abandon(self) -> None:
        """Takes the unfinished sequences out of the engine."""
        for key in self._items:
            self._engine.abort(key)

    def metrics(self, pass_at: Sequence[int], seed: int) -> tuple[float, dict[str, float], int]:
        """(mean accuracy over all problems, metrics by name, number of unscored answers)."""
        by_n: dict[int, list[ScoredAnswer]] = {}
        unscored = 0
        for key, trajectories in self.answers.items():
            held_out, prompt = self._items[key]
            unscored += sum(item.reward is None for item in trajectories)
            by_n.setdefault(held_out.n, []).extend(
                ScoredAnswer.from_trajectory(item, data_source=prompt.data_source, prompt_id=f"{held_out.name}/{prompt.prompt_id}") for item in trajectories
            )
        merged: dict[str, float] = {}
        total, problems = 0.0, 0
        for n, answers in by_n.items():
            accuracy, metrics = validation_metrics(answers, n=n, pass_at=pass_at, seed=seed)
            merged.update(metrics)
            count = len({answer.prompt_id for answer in answers})
            total, problems = total + accuracy * count, problems + count
        return (total / problems if problems else float("nan")), merged, unscored

    def generations(self, limit: int) -> tuple[Generation, ...]:
        """The first answers of evenly spread problems, at most `limit`; the same problems for every version, so that they compare."""
        if limit == 0 or not self.answers:
            return ()
        keys = sorted(self.answers)
        chosen = keys[:: max(1, -(-len(keys) // limit))][:limit]
        rows = []
        for key in chosen:
            _, prompt = self._items[key]
            first = self.answers[key][0]
            rows.append(
                Generation(
                    data_source=prompt.data_source,
                    prompt_id=prompt.prompt_id,
                    prompt=prompt.text,
                    answer=first.text,
                    ground_truth=str(prompt.ground_truth),
                    score=first.reward,
                    finish_reason=first.finish_reason,
                )
            )
        return tuple(rows)


class ValidationWorker:
    """Answers every ValidationRequest with a report or a failure, one at a time.

    Consumes: ValidationRequest. Waits for: a request, when it measures nothing. Unblocked by: a request, or the end of the link.
    Produces: ValidationReport or ValidationFailed, and Span. Ends: when the link raises WorkerStopped.
    """

    def __init__(
        self,
        name: str,
        *,
        engine: Engine,
        scorer: Scorer,
        reader: WeightReader,
        link: Link,
        decode: Decode,
        sets: Sequence[ValidationSet],
        seed: int,
        pass_at: Sequence[int] = (),
        copy_weights: bool = False,
        checksum: bool = True,
        log_generations: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.engine = engine
        self._scorer = scorer
        self._reader = reader
        self._link = link
        self._decode = decode
        self._sets = tuple(sets)
        self._seed = seed
        self._pass_at = tuple(pass_at)
        self._copy = copy_weights
        self._checksum = checksum
        self._log_generations = log_generations
        self._clock = clock
        self._watch = StopWatch(clock)
        self._waiting: list[ValidationRequest] = []
        self._current: tuple[ValidationRequest, Measurement | None, float] | None = None

    def run(self) -> None:
        """Serves until the link raises WorkerStopped."""
        while True:
            if not self.step():
                self._take(self._link.receive(0.005 if self._current else 1.0))

    def step(self) -> bool:
        """One round: messages, the start of a measurement, one decode step, the report. Returns whether anything was done."""
        self._take(self._link.receive(0.0))
        if self._current is None:
            if not self._waiting:
                return False
            self._current = (self._waiting.pop(0), None, self._clock())
        request, measurement, started_s = self._current
        try:
            if measurement is None:
                self._watch.enter("validation")
                self.engine.adopt(self._reader.views(request.slot, request.version), request.version, copy=self._copy)
                measurement = Measurement((request.version, request.attempt), self._sets, self._seed, self.engine, self._scorer, self._decode)
                self._current = (request, measurement, started_s)
                return True
            worked = measurement.advance()
            if measurement.done:
                self._report(request, measurement, started_s)
                self._end(request)
            return worked
        except Exception as error:  # the boundary: whatever a measurement raises reaches the trainer with its traceback
            self._abandon()
            self._link.send(
                ValidationFailed(
                    request=request,
                    worker=self.name,
                    kind=type(error).__name__,
                    traceback="".join(traceback.format_exception(error)),
                )
            )
            self._end(request)
            return True

    def _take(self, message: object) -> None:
        if message is None:
            return
        assert isinstance(message, ValidationRequest), f"a validation worker cannot handle {type(message).__name__}"
        self._waiting.append(message)

    def _report(self, request: ValidationRequest, measurement: Measurement, started_s: float) -> None:
        checksum = self._reader.checksum(request.slot) if self._checksum else None
        # Proves after the last token that the memory held the same version all along.
        self._reader.verify(request.slot, request.version)
        accuracy, metrics, unscored = measurement.metrics(self._pass_at, self._seed)
        self._link.send(
            ValidationReport(
                request=request,
                worker=self.name,
                accuracy=accuracy,
                metrics=metrics,
                problems=len(measurement.answers),
                unscored=unscored,
                generations=measurement.generations(self._log_generations),
                checksum=checksum,
                started_s=started_s,
                ended_s=self._clock(),
            )
        )

    def _abandon(self) -> None:
        """Rids the engine of what a failed measurement left behind."""
        if self._current is not None and self._current[1] is not None:
            self._current[1].abandon()

    def _end(self, request: ValidationRequest) -> None:
        self._current = None
        self._watch.enter("idle")
        for name, start, end in self._watch.spans():
            if name != "idle":
                self._link.send(Span(worker=self.name, name=name, started_s=start, ended_s=end, detail=f"version {request.version}"))
