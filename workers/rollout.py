"""The rollout worker: turns requests into scored groups and adopts new weights between decode steps."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.engines.base import Engine, EngineOutput, EngineRequest
from workers.link import Link, StopWatch
from workers.messages import (
    PauseRollout,
    RolloutFailed,
    RolloutGroup,
    RolloutRequest,
    RolloutStats,
    Span,
    StopWorker,
    Trajectory,
    WeightsAdopted,
    WeightsPublished,
)
from workers.rewards import Score, Scorer
from workers.weights import WeightReader

STATS_EVERY_S = 1.0
Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True)
class _Open:
    """A request that is being generated or scored."""

    request: RolloutRequest
    started_s: float
    outputs: list[EngineOutput | None]
    texts: tuple[str, ...] = ()
    generated_s: float = 0.0


class RolloutWorker:
    """Serves RolloutRequests on one engine until it is stopped.

    Consumes: RolloutRequest, WeightsPublished, PauseRollout from its link. Waits for: a message, when nothing is generated or
    scored. Unblocked by: any message, or the end of the link. Produces: RolloutGroup or RolloutFailed for every request,
    WeightsAdopted, RolloutStats, Span. Ends: when the link raises WorkerStopped.
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
        partial_rollout: bool = True,
        stop_on_reward_error: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.engine = engine
        self._scorer = scorer
        self._reader = reader
        self._link = link
        self._decode = decode
        self._partial = partial_rollout
        self._stop_on_reward_error = stop_on_reward_error
        self._clock = clock
        self._queue: deque[RolloutRequest] = deque()
        self._open: dict[int, _Open] = {}
        self._announced: WeightsPublished | None = None
        self._announced_s = 0.0
        self._paused = False
        self._watch = StopWatch(clock)
        self._trajectories = 0
        self._stats_s = clock()

    def run(self) -> None:
        """Serves until the link raises WorkerStopped."""
        while True:
            if not self.step():
                # Scoring runs elsewhere and announces nothing, so it is polled.
                self._take(self._link.receive(0.005 if self._scorer.pending else STATS_EVERY_S))

    def step(self) -> bool:
        """One round: messages, adoption, submission, one decode step, finished scores. Returns whether anything was done."""
        worked = False
        while (message := self._link.receive(0.0)) is not None:
            self._take(message)
            worked = True
        if self._announced is not None and (self._partial or not self.engine.has_work):
            self._adopt(self._announced)
            worked = True
        if not self._paused and self._announced is None:
            while self._queue:
                self._submit(self._queue.popleft())
        if self.engine.has_work and not self._paused:
            self._watch.enter("busy")
            for output in self.engine.step():
                self._collect(output)
            worked = True
        for request_id, scores in self._scorer.poll():
            assert isinstance(request_id, int)
            self._finish(self._open.pop(request_id), scores)
            worked = True
        if not worked:
            self._watch.enter("paused" if self._paused else "idle")
        if self._clock() - self._stats_s >= STATS_EVERY_S:
            self.report()
        return worked

    def report(self) -> None:
        """Sends the totals, and what the timeline shows."""
        self._stats_s = self._clock()
        totals = self._watch.totals()
        stats = self.engine.stats()
        for name, start, end in self._watch.spans():
            if name != "idle":
                self._link.send(Span(worker=self.name, name={"busy": "rollout"}.get(name, name), started_s=start, ended_s=end))
        self._link.send(
            RolloutStats(
                worker=self.name,
                time_s=self._stats_s,
                busy_s=totals.get("busy", 0.0),
                idle_s=totals.get("idle", 0.0),
                paused_s=totals.get("paused", 0.0),
                adopt_s=totals.get("adopt", 0.0),
                tokens=stats.tokens,
                trajectories=self._trajectories,
                running=stats.running,
                queued=stats.waiting + len(self._queue),
            )
        )

    def _take(self, message: object) -> None:
        match message:
            case None:
                pass
            case RolloutRequest():
                self._queue.append(message)
            case WeightsPublished():
                if self._announced is None:
                    self._announced_s = self._clock()
                self._announced = message
            case PauseRollout():
                self._paused = message.paused
                self._watch.enter("paused" if message.paused else "idle")
                self.report()
            case StopWorker():
                raise AssertionError("the link turns StopWorker into WorkerStopped")
            case _:
                raise AssertionError(f"a rollout worker cannot handle {type(message).__name__}")

    def _adopt(self, message: WeightsPublished) -> None:
        start = self._clock()
        self._watch.enter("adopt")
        views = self._reader.views(message.slot, message.version)
        self.engine.adopt(views, message.version, copy=True)
        self._reader.verify(message.slot, message.version)
        self._announced = None
        self._watch.enter("idle")
        self._link.send(
            WeightsAdopted(worker=self.name, version=message.version, wait_s=start - self._announced_s, copy_s=self._clock() - start)
        )
        self.report()

    def _submit(self, request: RolloutRequest) -> None:
        assert request.min_version <= self.engine.version, "a request overtook the weights that it must be born with"
        try:
            self.engine.submit(
                EngineRequest(request_id=request.request_id, prompt_ids=request.prompt.token_ids, sampling=request.sampling, seeds=request.seeds)
            )
        except ValueError as error:
            self._fail(request, error)
            return
        self._open[request.request_id] = _Open(request, self._clock(), [None] * len(request.seeds))

    def _collect(self, output: EngineOutput) -> None:
        entry = self._open[output.request_id]
        entry.outputs[output.index] = output
        self._trajectories += 1
        if any(item is None for item in entry.outputs):
            return
        entry.generated_s = self._clock()
        outputs = [item for item in entry.outputs if item is not None]
        entry.texts = tuple(self._decode(item.token_ids.tolist()) for item in outputs)
        self._scorer.submit(output.request_id, entry.request.prompt, entry.texts, [item.token_ids for item in outputs])

    def _finish(self, entry: _Open, scores: Sequence[Score]) -> None:
        trajectories = []
        for output, text, score in zip(entry.outputs, entry.texts, scores, strict=True):
            assert output is not None
            if score.error is not None and self._stop_on_reward_error:
                self._link.send(
                    RolloutFailed(
                        request=entry.request,
                        worker=self.name,
                        kind="RewardError",
                        traceback=f"scoring {entry.request.prompt.prompt_id} failed and reward.on_error is 'stop': {score.error}",
                        fatal=True,
                    )
                )
                return
            trajectories.append(
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
            )
        self._link.send(
            RolloutGroup(
                request=entry.request,
                trajectories=tuple(trajectories),
                worker=self.name,
                started_s=entry.started_s,
                generated_s=entry.generated_s,
                ended_s=self._clock(),
            )
        )

    def _fail(self, request: RolloutRequest, error: Exception) -> None:
        self._link.send(
            RolloutFailed(request=request, worker=self.name, kind=type(error).__name__, traceback="".join(traceback.format_exception(error)))
        )
