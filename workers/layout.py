"""Where each tensor of a model lies in one flat buffer of bytes, and that buffer's checksum."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; a cache line, and more than any dtype or vector instruction asks for
_ROW_WORDS = 4096  # 64-bit words that share the checksum's row of weights
_BLOCK_ROWS = 8  # rows hashed at once on a CPU: 256 KiB of scratch memory, which a core's cache holds
_GPU_BLOCK_ROWS = 2048  # 64 MiB: few kernel launches
_MASK = (1 << 64) - 1
_ROW_FACTOR = 0x9E3779B97F4A7C15  # odd, so multiplication by it loses nothing
_SHOWN = 5  # names in an error message


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor's place: bytes [offset, offset + nbytes) of the buffer, contiguous."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class WeightLayout:
    """Names, shapes and dtypes of a model's tensors with 64-byte aligned offsets into one buffer of `nbytes` bytes.

    Names that are tied (the same memory, shape and strides) share one place, so that tied weights are stored and copied once.
    """

    def __init__(self, places: Mapping[str, Placed], nbytes: int) -> None:
        self._places = dict(places)
        self._nbytes = nbytes

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> WeightLayout:
        """The layout of these tensors, in their order. Their values and devices do not matter. ValueError if there are none."""
        if not tensors:
            raise ValueError("there are no weights to publish: the model has no parameters")
        places: dict[str, Placed] = {}
        seen: dict[tuple[object, ...], str] = {}
        end = 0
        for name, tensor in tensors.items():
            identity = _identity(tensor)
            if identity is not None and identity in seen:
                places[name] = places[seen[identity]]
                continue
            if identity is not None:
                seen[identity] = name
            places[name] = Placed(end, tuple(tensor.shape), tensor.dtype)
            end += -(-places[name].nbytes // ALIGNMENT) * ALIGNMENT
        return cls(places, max(end, ALIGNMENT))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._places)

    @property
    def nbytes(self) -> int:
        """Size of the buffer; a multiple of 64."""
        return self._nbytes

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Named tensors that are views into `buffer`, uint8 of at least [nbytes]. Tied names map to the same tensor object."""
        assert buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.numel() >= self._nbytes, "a flat uint8 buffer of nbytes is needed"
        made: dict[Placed, Tensor] = {}
        views: dict[str, Tensor] = {}
        for name, place in self._places.items():
            if place.nbytes == 0:
                views[name] = torch.empty(place.shape, dtype=place.dtype, device=buffer.device)
                continue
            if place not in made:
                made[place] = buffer[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)
            views[name] = made[place]
        return views

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """ValueError that names the differences when these tensors do not fill this layout.

        Names, shapes and ties must be equal. A dtype may differ only from one floating-point type to another: the copy converts,
        so that float32 master weights can be published as bfloat16 without an intermediate copy.
        """
        missing = [name for name in self._places if name not in tensors]
        extra = [name for name in tensors if name not in self._places]
        faults = []
        if missing:
            faults.append(f"missing: {_some(missing)}")
        if extra:
            faults.append(f"not in the layout: {_some(extra)}")
        changed, untied = [], []
        owners: dict[int, str] = {}
        for name, place in self._places.items():
            tensor = tensors.get(name)
            if tensor is None:
                continue
            convertible = tensor.dtype.is_floating_point and place.dtype.is_floating_point
            if tuple(tensor.shape) != place.shape or not (tensor.dtype == place.dtype or convertible):
                changed.append(f"{name} is {_describe(tensor.shape, tensor.dtype)}, was {_describe(place.shape, place.dtype)}")
            elif place.nbytes:
                owner = owners.setdefault(place.offset, name)
                if owner != name and _identity(tensors[owner]) != _identity(tensor):
                    untied.append(f"{name} and {owner}")
        if changed:
            faults.append(_some(changed))
        if untied:
            faults.append(f"no longer tied: {_some(untied)}")
        if faults:
            raise ValueError(f"the weights do not fit the layout fixed at the start: {'; '.join(faults)}. Publish the same parameters every time")

    def sources(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) for each place once: what a copy into the buffer has to move. `check` must have passed."""
        done: set[int] = set()
        for name, place in self._places.items():
            if place.nbytes and place.offset not in done:
                done.add(place.offset)
                yield name, tensors[name]


def _identity(tensor: Tensor) -> tuple[object, ...] | None:
    """Equal for tensors that are the same memory seen the same way; None for tensors without memory (empty, or on `meta`)."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _some(items: list[str]) -> str:
    return ", ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def checksum(buffer: Tensor) -> str:
    """16 hexadecimal digits that depend on every bit of `buffer` (uint8 [n], n a multiple of 8); equal on every device.

    A multilinear hash (Carter and Wegman, 1979; Lemire and Kaser, arXiv:1202.4961): 64-bit words times fixed random odd weights, summed
    modulo 2^64 row by row, the row sums joined by a polynomial. A word's upper half is first folded into its lower one, because a product modulo
    2^64 keeps little of the upper bits. Detects accidents, not attacks. It is computed where the weights are, which no library hash
    can do on a GPU, and at several times such a hash's speed on a CPU.
    """
    words = buffer.view(torch.int64)
    weights = _weights(buffer.device)
    whole = words.numel() // _ROW_WORDS
    rows = words[: whole * _ROW_WORDS].view(whole, _ROW_WORDS)
    step = _BLOCK_ROWS if buffer.device.type == "cpu" else _GPU_BLOCK_ROWS
    scratch = torch.empty(min(step, whole), _ROW_WORDS, dtype=torch.int64, device=buffer.device)
    sums = [_products(block, weights, scratch[: len(block)]).sum(dim=1) for block in rows.split(step)] if whole else []
    rest = words[whole * _ROW_WORDS :]
    sums.append(_products(rest, weights[: rest.numel()], torch.empty_like(rest)).sum().view(1))
    total = words.numel()
    for value in torch.cat(sums).cpu().tolist():
        total = (total * _ROW_FACTOR + value) & _MASK
    return f"{total:016x}"


def _products(words: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """Folded words times weights, int64 of the words' shape, written into `out`."""
    return torch.bitwise_right_shift(words, 32, out=out).bitwise_xor_(words).mul_(weights)


def _weights(device: torch.device) -> Tensor:
    """[_ROW_WORDS] fixed odd 64-bit numbers as int64, the same in every process and version of torch."""
    source = random.Random(20120214)
    values = [source.getrandbits(64) | 1 for _ in range(_ROW_WORDS)]
    return torch.tensor([value - (1 << 64) if value >> 63 else value for value in values], dtype=torch.int64).to(device)
