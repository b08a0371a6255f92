"""What a worker is made of: engine, scorer, decoder. Used by the processes' entry points and by the inline mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from configs.schema import Config
from workers.engines.base import Engine
from workers.link import Link
from workers.messages import ValidationSet, WeightsAdopted, WeightsPublished, WorkerReady
from workers.rewards import Scorer
from workers.weights import WeightHandle, WeightReader


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPayload:
    """Everything that a worker process starts from."""

    name: str
    config: Config  # with model.path resolved to a local folder
    device: str  # in the child's own numbering
    threads: int
    handle: WeightHandle
    sets: tuple[ValidationSet, ...] = ()  # of the validation worker
    copy_weights: bool = True  # validation: whether the slots lie on another device


def max_sequence_length(config: Config, validation: bool, sets: Sequence[ValidationSet] = ()) -> int:
    """Prompt and response tokens of the longest sequence that a worker must hold."""
    response = config.data.max_response_length
    if validation:
        response = max([config.validation.max_response_length or response, *(item.sampling.max_tokens for item in sets)])
    return config.data.max_prompt_length + response


def build_engine(config: Config, *, device: str, validation: bool, sets: Sequence[ValidationSet] = ()) -> Engine:
    """The engine of a rollout or validation worker, without weights: it computes only after its first `adopt`."""
    kind = config.rollout.engine
    if validation and config.validation.engine != "rollout":
        kind = config.validation.engine
    slots = config.validation.slots if validation else config.rollout.slots
    if kind == "simulated":
        from workers.engines.simulated import SimulatedEngine

        return SimulatedEngine(config.rollout.simulated, slots=slots)
    length = max_sequence_length(config, validation, sets)
    if kind == "sglang":
        from workers.engines.sglang import SGLangEngine

        arguments = {**config.rollout.sglang, **(config.validation.sglang if validation else {})}
        return SGLangEngine(
            model_path=config.model.path,
            dtype=config.model.dtype,
            slots=slots,
            max_length=length,
            device=device,
            kv_after_update=config.rollout.kv_after_update,
            server_args=arguments,
            startup_timeout_s=config.run.startup_timeout_s,
        )
    import torch

    from workers.engines.transformers import TransformersEngine
    from workers.policy import load_policy, load_tokenizer

    model = load_policy(config.model, device=torch.device(device), dtype=getattr(torch, config.model.dtype), weights=False)
    budget = config.rollout.kv_cache_gb
    return TransformersEngine(
        model,
        slots=slots,
        max_length=length,
        kv_cache_bytes=int(budget * 2**30) if budget is not None else None,
        kv_after_update=config.rollout.kv_after_update,
        tokenizer=load_tokenizer(config.model),
    )


def build_decoder(config: Config) -> Callable[[Sequence[int]], str]:
    """Token ids to text without special tokens."""
    if config.model.path == "simulated":
        return lambda token_ids: ""
    from workers.policy import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


def make_scorer(config: Config) -> Scorer:
    """The configured scorer; without a model, one that needs no text."""
    if config.model.path == "simulated":
        from workers.rewards.simulated import SimulatedScorer

        return SimulatedScorer()
    from workers.rewards import build_scorer

    return build_scorer(config.reward)


def adopt_first(payload: WorkerPayload, link: Link, engine: Engine, reader: WeightReader, started_s: float, clock: Callable[[], float]) -> None:
    """Waits for the first announced version, loads it, and reports ready. The trainer announces the newest one at once."""
    while True:
        message = link.receive(payload.config.run.startup_timeout_s)
        if message is None:
            raise TimeoutError(f"{payload.name} received no weights within run.startup_timeout_s = {payload.config.run.startup_timeout_s:g} s")
        if isinstance(message, WeightsPublished):
            break
        raise AssertionError(f"{payload.name} received {type(message).__name__} before its first weights")
    start = clock()
    engine.adopt(reader.views(message.slot, message.version), message.version, copy=True)
    reader.verify(message.slot, message.version)
    link.send(WeightsAdopted(worker=payload.name, version=message.version, wait_s=0.0, copy_s=clock() - start))
    report_ready(payload, link, engine, started_s, clock)


def report_ready(payload: WorkerPayload, link: Link, engine: Engine, started_s: float, clock: Callable[[], float]) -> None:
    """Tells the trainer that requests may come."""
    import os

    link.send(
        WorkerReady(
            worker=payload.name,
            pid=os.getpid(),
            device=payload.device,
            version=engine.version,
            capacity=engine.stats().capacity,
            startup_s=clock() - started_s,
        )
    )
