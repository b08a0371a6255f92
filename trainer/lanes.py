"""Lanes of prompts: each goes through its prompts once an epoch, in an order that seed and epoch decide."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from trainer.formats import lookup
from workers.messages import Prompt

Sampler = Literal["shuffle", "sequential", "difficulty"]
UNKNOWN_RATE = 0.5  # of a prompt that was never answered: as informative as one that is solved half of the time
RECENT = 4096  # streamed prompts that are kept, to be found again when a group is returned


class Lane(Protocol):
    """A part of the training prompts with an order and an epoch of its own."""

    name: str
    weight: float

    @property
    def size(self) -> int | None:
        """Prompts in an epoch; None when only the end of the stream will tell."""

    def draw(self) -> tuple[int, Prompt]:
        """The next prompt and its epoch."""

    def find(self, prompt_id: str, epoch: int) -> Prompt | None:
        """The prompt of this name, or None when it is not in this lane."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def fingerprint(self) -> str:
        """Changes when the prompts or their order would."""


class ListLane:
    """Prompts in memory."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        sampler: Sampler,
        seed: int,
        solved: Mapping[str, float],
        difficulty_key: str | None = None,
        name: str = "train",
        weight: float = 1.0,
    ) -> None:
        if not prompts:
            raise ValueError(f"{name}: there is no training prompt")
        self.name = name
        self.weight = weight
        self._prompts = prompts
        self._sampler = sampler
        self._seed = seed
        self._solved = solved
        self._index = {prompt.prompt_id: index for index, prompt in enumerate(prompts)}
        if len(self._index) != len(prompts):
            raise ValueError(f"{name}: prompt ids repeat; every prompt needs its own")
        self._difficulty: np.ndarray | None = None
        if sampler == "difficulty" and difficulty_key is not None:
            self._difficulty = np.array([_difficulty(prompt, difficulty_key) for prompt in prompts])
        self._rates: dict[str, float] = {}  # solved rates when the epoch began; they decide its order
        self._epoch = 0
        self._position = 0
        self._order = self._make_order()

    @property
    def size(self) -> int | None:
        return len(self._prompts)

    def draw(self) -> tuple[int, Prompt]:
        if self._position == len(self._order):
            self._epoch += 1
            self._position = 0
            if self._sampler == "difficulty" and self._difficulty is None:
                self._rates = {key: rate for key, rate in self._solved.items() if key in self._index}
            self._order = self._make_order()
        prompt = self._prompts[int(self._order[self._position])]
        self._position += 1
        return self._epoch, prompt

    def find(self, prompt_id: str, epoch: int) -> Prompt | None:
        index = self._index.get(prompt_id)
        return None if index is None else self._prompts[index]

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "rates": dict(self._rates)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._rates = {str(key): float(rate) for key, rate in state["rates"].items()}
        self._order = self._make_order()

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(f"{self.name}|{self._sampler}|{self._seed}|{self.weight}".encode(), digest_size=8)
        for prompt in self._prompts:
            digest.update(prompt.prompt_id.encode())
        return digest.hexdigest()

    def _make_order(self) -> np.ndarray:
        count = len(self._prompts)
        if self._sampler == "sequential":
            return np.arange(count)
        shuffled = generator(self._seed, self.name, self._epoch).permutation(count)
        if self._sampler == "shuffle":
            return shuffled
        if self._difficulty is not None:
            keys = self._difficulty[shuffled]  # easy ones first
        else:
            # Prompts that are always or never solved give no gradient to a group-relative method: they come last.
            keys = np.array([abs(self._rates.get(self._prompts[int(index)].prompt_id, UNKNOWN_RATE) - 0.5) for index in shuffled])
        return shuffled[np.argsort(keys, kind="stable")]


class StreamLane:
    """Prompts that are read while the run goes on; shuffled within a buffer.

    A resumed lane reads the epoch again up to its position, without tokenising, and so continues exactly.
    """

    def __init__(
        self,
        rows: Callable[[], Iterator[Any]],
        build: Callable[[Any], Prompt | None],
        *,
        shuffle: bool,
        buffer: int,
        seed: int,
        name: str = "train",
        weight: float = 1.0,
    ) -> None:
        self.name = name
        self.weight = weight
        self._rows = rows
        self._build = build  # None: too long
        self._shuffle = shuffle
        self._buffer = buffer
        self._seed = seed
        self._epoch = 0
        self._position = 0  # rows taken from the shuffled stream in this epoch, unused ones included
        self._yielded = 0  # prompts given in this epoch
        self._stream = self._open(0)
        self._recent: OrderedDict[tuple[str, int], Prompt] = OrderedDict()

    @property
    def size(self) -> int | None:
        return None

    def draw(self) -> tuple[int, Prompt]:
        while True:
            row = next(self._stream, None)
            if row is None:
                if self._yielded == 0:
                    raise ValueError(f"{self.name}: a whole pass over the stream gave no usable prompt; see the counts in the data report")
                self._epoch, self._position, self._yielded = self._epoch + 1, 0, 0
                self._stream = self._open(self._epoch)
                continue
            self._position += 1
            prompt = self._build(row)
            if prompt is not None:
                self._yielded += 1
                self._recent[prompt.prompt_id, self._epoch] = prompt
                if len(self._recent) > RECENT:
                    self._recent.popitem(last=False)
                return self._epoch, prompt

    def find(self, prompt_id: str, epoch: int) -> Prompt | None:
        recent = self._recent.get((prompt_id, epoch))
        if recent is not None:
            return recent
        return next((prompt for row in self._rows() if (prompt := self._build(row)) is not None and prompt.prompt_id == prompt_id), None)

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "yielded": self._yielded}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position, self._yielded = int(state["epoch"]), int(state["position"]), int(state["yielded"])
        self._stream = self._open(self._epoch)
        for taken in range(self._position):
            if next(self._stream, None) is None:
                raise ValueError(f"{self.name}: the stream ends after {taken} rows, the checkpoint had read {self._position}; the data changed")

    def fingerprint(self) -> str:
        return f"{self.name}|{self._shuffle}|{self._buffer}|{self._seed}|{self.weight}"

    def _open(self, epoch: int) -> Iterator[Any]:
        rows = self._rows()
        return buffered_shuffle(rows, self._buffer, generator(self._seed, self.name, epoch)) if self._shuffle else rows


def buffered_shuffle(rows: Iterator[Any], size: int, random: np.random.Generator) -> Iterator[Any]:
    """Each row once, drawn at random from a buffer of `size` rows that is refilled in the order of the stream."""
    buffer: list[Any] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        index = int(random.integers(size))
        yield buffer[index]
        buffer[index] = row
    for index in random.permutation(len(buffer)):
        yield buffer[int(index)]


def generator(seed: int, name: str, epoch: int) -> np.random.Generator:
    """The random numbers of one epoch of one lane."""
    digest = hashlib.blake2b(f"{seed}|{name}|{epoch}".encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))


def _difficulty(prompt: Prompt, key: str) -> float:
    value = lookup({"extra_info": prompt.extra_info, **prompt.extra_info, **prompt.columns}, key)
    try:
        return float(value)
    except (TypeError, ValueError):
        there = ", ".join([*prompt.columns, *prompt.extra_info]) or "none"
        raise ValueError(
            f"data.difficulty_key: {key!r} is {value!r} in a prompt of {prompt.data_source}, a number is needed; its columns are {there}"
        ) from None
