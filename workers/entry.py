"""Entry points of the worker processes: build the parts, load weights, report ready, serve."""

from __future__ import annotations

import time

from workers.build import WorkerPayload, adopt_first, build_decoder, build_engine, make_scorer, report_ready
from workers.link import Link
from workers.rollout import RolloutWorker
from workers.validation import ValidationWorker
from workers.weights import WeightReader


def rollout_main(link: Link, payload: WorkerPayload) -> None:
    """A rollout process. Ends when the link raises WorkerStopped."""
    started_s = time.monotonic()
    _set_threads(payload)
    config = payload.config
    engine = build_engine(config, device=payload.device, validation=False)
    reader = WeightReader(payload.handle, _device(payload))
    scorer = make_scorer(config)
    try:
        adopt_first(payload, link, engine, reader, started_s, time.monotonic)
        build_rollout_worker(payload, link, engine, reader, scorer).run()
    finally:
        scorer.close()
        engine.close()
        reader.close()


def validation_main(link: Link, payload: WorkerPayload) -> None:
    """The validation process. Ends when the link raises WorkerStopped."""
    started_s = time.monotonic()
    _set_threads(payload)
    config = payload.config
    engine = build_engine(config, device=payload.device, validation=True, sets=payload.sets)
    reader = WeightReader(payload.handle, _device(payload))
    scorer = make_scorer(config)
    try:
        report_ready(payload, link, engine, started_s, time.monotonic)
        build_validation_worker(payload, link, engine, reader, scorer).run()
    finally:
        scorer.close()
        engine.close()
        reader.close()


def build_rollout_worker(payload: WorkerPayload, link: Link, engine, reader, scorer) -> RolloutWorker:  # type: ignore[no-untyped-def]
    """The rollout worker of a payload on the given parts."""
    config = payload.config
    return RolloutWorker(
        payload.name,
        engine=engine,
        scorer=scorer,
        reader=reader,
        link=link,
        decode=build_decoder(config),
        partial_rollout=config.async_training.partial_rollout,
        stop_on_reward_error=config.reward.on_error == "stop",
    )


def build_validation_worker(payload: WorkerPayload, link: Link, engine, reader, scorer) -> ValidationWorker:  # type: ignore[no-untyped-def]
    """The validation worker of a payload on the given parts."""
    config = payload.config
    return ValidationWorker(
        payload.name,
        engine=engine,
        scorer=scorer,
        reader=reader,
        link=link,
        decode=build_decoder(config),
        sets=payload.sets,
        seed=config.validation.seed,
        pass_at=config.validation.pass_at,
        copy_weights=payload.copy_weights,
        checksum=config.weights.checksum,
        log_generations=config.validation.log_generations,
    )


def _device(payload: WorkerPayload):  # type: ignore[no-untyped-def]
    import torch

    return torch.device(payload.device)


def _set_threads(payload: WorkerPayload) -> None:
    import torch

    torch.set_num_threads(payload.threads)
