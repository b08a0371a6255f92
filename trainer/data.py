"""Training and validation prompts of a run, and the resumable stream that the rollouts are fed from."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.data import SourceConfig
from configs.schema import Config
from trainer.lanes import Lane, ListLane, Sampler, StreamLane, generator
from trainer.prompts import PromptBuilder
from trainer.reading import SourceReader
from workers.messages import Prompt, SamplingParams, ValidationSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A slice of the training prompts that is drawn with a weight of its own."""

    name: str
    weight: float
    prompts: Sequence[Prompt] = ()
    stream: SourceReader | None = None  # instead of prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptData:
    """What `load_prompts` found. `train` is empty when the training data are streamed."""

    train: Sequence[Prompt]
    validation: tuple[ValidationSet, ...]
    report: dict[str, Any]  # {"sources": [...], "train": count or None, "validation": {set: count}}; for people and --check
    shares: tuple[Share, ...] = field(repr=False)

    def source(self, config: Config) -> PromptSource:
        """The stream of training prompts in the configured order and mix."""
        data = config.data
        return PromptSource(
            self.train,
            sampler=data.sampler,
            seed=_seed(config),
            difficulty_key=data.difficulty_key,
            shares=self.shares,
            shuffle_buffer=data.shuffle_buffer,
        )


class PromptSource:
    """Training prompts without end: each lane gives every prompt once an epoch; lanes alternate by weight.

    Thread-safe. The same state gives the same continuation, prompt for prompt.
    """

    def __init__(
        self,
        train: Sequence[Prompt],
        *,
        sampler: Sampler = "shuffle",
        seed: int = 0,
        difficulty_key: str | None = None,
        shares: Sequence[Share] = (),
        shuffle_buffer: int = 10_000,
    ) -> None:
        self._lock = threading.Lock()
        self._solved: dict[str, float] = {}
        self._track_solved = sampler == "difficulty" and difficulty_key is None
        self._returned: deque[tuple[str, int]] = deque()
        self._lanes: list[Lane] = []
        for share in shares or (Share(name="train", weight=1.0, prompts=train),):
            if share.stream is not None:
                lane: Lane = StreamLane(
                    share.stream.drafts,
                    share.stream.build,
                    shuffle=sampler == "shuffle",
                    buffer=shuffle_buffer,
                    seed=seed,
                    name=share.name,
                    weight=share.weight,
                )
            else:
                lane = ListLane(
                    share.prompts,
                    sampler=sampler,
                    seed=seed,
                    solved=self._solved,
                    difficulty_key=difficulty_key,
                    name=share.name,
                    weight=share.weight,
                )
            self._lanes.append(lane)
        self._drawn = [0] * len(self._lanes)

    def __len__(self) -> int:
        """Prompts in one epoch of all lanes. ValueError for a stream, whose length nobody knows."""
        sizes = [lane.size for lane in self._lanes]
        if any(size is None for size in sizes):
            raise ValueError("the length of streamed data is unknown; set trainer.total_training_steps, or data.streaming: false")
        return sum(size for size in sizes if size is not None)

    def next(self) -> tuple[int, Prompt]:
        """The next (epoch, prompt); returned ones first."""
        with self._lock:
            if self._returned:
                prompt_id, epoch = self._returned.popleft()
                return epoch, self._find(prompt_id, epoch)
            # The lane that is furthest behind its share: exact proportions, without chance.
            lane = min(range(len(self._lanes)), key=lambda index: ((self._drawn[index] + 1) / self._lanes[index].weight, index))
            self._drawn[lane] += 1
            return self._lanes[lane].draw()

    def push_back(self, prompt_id: str, epoch: int) -> None:
        """Gives a prompt again before all others, in the order of the calls. ValueError when the data do not have it."""
        with self._lock:
            self._find(prompt_id, epoch)
            self._returned.append((prompt_id, epoch))

    def report_solved(self, prompt_id: str, rate: float) -> None:
        """The share of a prompt's answers that were right, for `sampler: difficulty`; counts from the next epoch on."""
        if not self._track_solved:
            return
        with self._lock:
            before = self._solved.get(prompt_id)
            self._solved[prompt_id] = rate if before is None else (before + rate) / 2

    def state(self) -> dict[str, Any]:
        """Everything that decides the continuation; plain JSON."""
        with self._lock:
            return {
                "fingerprints": [lane.fingerprint() for lane in self._lanes],
                "lanes": [lane.state() for lane in self._lanes],
                "drawn": list(self._drawn),
                "returned": [[prompt_id, epoch] for prompt_id, epoch in self._returned],
                "solved": dict(self._solved),
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken. ValueError when the data or their order are not the same."""
        with self._lock:
            if list(state["fingerprints"]) != [lane.fingerprint() for lane in self._lanes]:
                raise ValueError(
                    "the training prompts are not those of the checkpoint: files, sampler, seed, limits or tokenizer changed; "
                    "resume with the same data section, or start a new run from the checkpoint's model"
                )
            self._solved.clear()
            self._solved.update({str(key): float(rate) for key, rate in state["solved"].items()})
            for lane, lane_state in zip(self._lanes, state["lanes"], strict=True):
                lane.load_state(lane_state)
            self._drawn = [int(count) for count in state["drawn"]]
            self._returned = deque((str(prompt_id), int(epoch)) for prompt_id, epoch in state["returned"])

    def _find(self, prompt_id: str, epoch: int) -> Prompt:
        for lane in self._lanes:
            prompt = lane.find(prompt_id, epoch)
            if prompt is not None:
                return prompt
        raise ValueError(f"the training data have no prompt {prompt_id!r}; they changed since it was drawn")


def load_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, *, stop_token_ids: Sequence[int] | None = None) -> PromptData:
    """Reads, renders and tokenises all sources of the data section.

    `stop_token_ids`: what ends an answer in validation; None: the tokenizer's end of sequence. ValueError, naming the remedy,
    for anything that makes a source unusable.
    """
    data = config.data
    builder = PromptBuilder(tokenizer, data)
    if stop_token_ids is None:
        stop_token_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    seed = _seed(config)
    taken: set[str] = set()

    def reader(source: SourceConfig, role: str, index: int) -> SourceReader:
        return SourceReader(source, config, builder, role=role, seed=seed, taken=taken, where=f"data.{role}_files.{index}")

    # Validation first: what it holds, a generated training source does not make again.
    held_out = [reader(source, "val", index) for index, source in enumerate(data.val_files)]
    validation: list[tuple[str, SourceConfig, list[Prompt]]] = []
    questions: set[str] = set()
    for item in held_out:
        prompts = item.read(questions_seen=set())
        questions |= item.questions
        validation.append((item.name, item.source, prompts))
    readers = [reader(source, "train", index) for index, source in enumerate(data.train_files)]
    shares, split = _training(config, readers, questions, seed)
    validation += [(share.name, source, list(share.prompts)) for share, source in split]
    limit = data.val_max_samples
    sets = []
    for name, source, prompts in validation:
        prompts = prompts if limit < 0 else prompts[:limit]
        taken_names = {item.name for item in sets}
        unique = name if name not in taken_names else next(f"{name}-{number}" for number in range(2, 1000) if f"{name}-{number}" not in taken_names)
        sets.append(_validation_set(config, unique, source, prompts, tuple(stop_token_ids)))
    train = [prompt for share in shares for prompt in share.prompts]
    streamed = any(share.stream is not None for share in shares)
    report = {
        "sources": [item.report for item in [*readers, *held_out]],
        "train": None if streamed else len(train),
        "validation": {item.name: len(item.prompts) for item in sets},
    }
    return PromptData(train=train, validation=tuple(sets), report=report, shares=shares)


def _training(
    config: Config, readers: Sequence[SourceReader], held_out: set[str], seed: int
) -> tuple[tuple[Share, ...], list[tuple[Share, SourceConfig]]]:
    """(the shares of the training mix, the prompts held out of them by val_fraction)."""
    data = config.data
    if data.streaming:
        if data.val_fraction:
            raise ValueError("data.val_fraction: streamed data cannot be split; give data.val_files, or set data.streaming: false")
        if data.sampler == "difficulty":
            raise ValueError("data.sampler: streamed data cannot be sorted by difficulty; use shuffle or sequential, or set data.streaming: false")
        for item in readers:
            item.open_stream(held_out)
        return tuple(Share(name=name, weight=item.source.weight or 1.0, stream=item) for name, item in _named(readers)), []
    seen: set[str] = set()
    weighted = any(item.source.weight is not None for item in readers)
    parts: list[tuple[str, SourceReader, list[Prompt]]] = []
    split: list[tuple[Share, SourceConfig]] = []
    for name, item in _named(readers):
        prompts = item.read(questions_seen=seen, held_out=held_out)
        if data.val_fraction:
            prompts, chosen = _hold_out(prompts, data.val_fraction, seed, name)
            item.report["held_out"] = len(chosen)
            split.append((Share(name=name, weight=1.0, prompts=chosen), item.source))
        parts.append((name, item, prompts))
    total = sum(len(prompts) for _, _, prompts in parts)
    limit = data.train_max_samples
    if 0 <= limit < total:
        if limit == 0:
            raise ValueError("data.train_max_samples: 0 leaves nothing to train on; use -1 for all")
        order = generator(seed, "train_max_samples", 0).permutation(total) if data.sampler == "shuffle" else range(total)
        keep = {int(index) for index in order[:limit]}
        start = 0
        for index, (name, item, prompts) in enumerate(parts):
            parts[index] = (name, item, [prompt for offset, prompt in enumerate(prompts) if start + offset in keep])
            start += len(prompts)
    parts = [part for part in parts if part[2]]
    if weighted:
        return tuple(Share(name=name, weight=item.source.weight or 1.0, prompts=prompts) for name, item, prompts in parts), split
    return (Share(name="train", weight=1.0, prompts=[prompt for _, _, prompts in parts for prompt in prompts]),), split


def _named(readers: Sequence[SourceReader]) -> list[tuple[str, SourceReader]]:
    """Readers under different names."""
    names = [item.name for item in readers]
    return [(item.name if names.count(item.name) == 1 else f"{item.name}-{index}", item) for index, item in enumerate(readers)]


def _hold_out(prompts: list[Prompt], fraction: float, seed: int, name: str) -> tuple[list[Prompt], list[Prompt]]:
    """(kept, held out): at least one prompt on either side, drawn by seed alone."""
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    if len(prompts) < 2:
        raise ValueError(f"data.val_fraction: {name} has {len(prompts)} prompts, at least 2 are needed to split them")
    chosen = {int(index) for index in generator(seed, f"validation|{name}", 0).permutation(len(prompts))[:count]}
    kept = [prompt for index, prompt in enumerate(prompts) if index not in chosen]
    return kept, [prompt for index, prompt in enumerate(prompts) if index in chosen]


def _validation_set(config: Config, name: str, source: SourceConfig, prompts: Sequence[Prompt], stop_token_ids: tuple[int, ...]) -> ValidationSet:
    default = config.validation

    def first(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    return ValidationSet(
        name=name,
        prompts=tuple(prompts),
        n=first(source.n, default.n),
        sampling=SamplingParams(
            max_tokens=first(source.max_response_length, default.max_response_length, config.data.max_response_length),
            temperature=first(source.temperature, default.temperature),
            top_p=first(source.top_p, default.top_p),
            top_k=default.top_k,
            stop_token_ids=tuple(dict.fromkeys([*stop_token_ids, *config.rollout.stop_token_ids])),
            stop=tuple(config.rollout.stop),
        ),
    )


def _seed(config: Config) -> int:
    return config.run.seed if config.data.seed is None else config.data.seed
