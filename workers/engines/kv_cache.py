"""Keys and values of the running sequences: fixed rows, left-justified, so that a token's column is its position.

The model's ordinary forward sees a `transformers.Cache` and a batch of one, in which a `Plan` packs what one step computes: first
one token for each running row, then whole sequences (prompts, or everything so far after new weights). Nothing is padded in the
model's linear layers, and a step that starts new sequences reads the weights once, not twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from workers.engines.support import LayerGeometry


class Plan:
    """Positions and masks of one forward pass over T = R + (sum of segment lengths) tokens; computed once, used by all layers."""

    def __init__(
        self, decode_positions: np.ndarray, segment_rows: Sequence[int], segment_lengths: Sequence[int], device: torch.device
    ) -> None:
        """`decode_positions` [R]: where the next token of rows 0..R-1 goes. Segment i is a whole sequence for row `segment_rows[i]`."""
        self.decoding = len(decode_positions)  # R
        self.segments = len(segment_lengths)  # N
        self.width = int(decode_positions.max()) + 1 if self.decoding else 0  # W: columns that decoding rows read
        self.longest = max(segment_lengths, default=0)  # L
        self.layers = 0  # attention calls so far, to notice a model that does not use our attention
        self.stored: tuple[torch.Tensor, torch.Tensor] | None = None  # what the layer at hand has in the cache: [R, heads, W, dim]
        self.given: tuple[torch.Tensor, torch.Tensor] | None = None  # what the layer at hand has just computed
        lengths = np.asarray(segment_lengths, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        columns = np.concatenate([decode_positions, *(np.arange(length) for length in segment_lengths)])
        owner = np.repeat(np.arange(self.segments), lengths)
        rows = np.concatenate([np.arange(self.decoding), np.asarray(segment_rows, dtype=np.int64)[owner]])
        self.positions = torch.from_numpy(columns).to(device)  # [T]
        self.rows = torch.from_numpy(rows).to(device)  # [T]
        if self.segments:
            # [R + N] the tokens whose logits are wanted: of a segment, the last one
            self.last = torch.from_numpy(np.concatenate([np.arange(self.decoding), self.decoding + starts + lengths - 1])).to(device)
            padded = np.minimum(starts[:, None] + np.arange(self.longest), (starts + lengths - 1)[:, None])
            self.padded = torch.from_numpy(padded.reshape(-1)).to(device)  # [N * L] packed index of each padded place
            self.packed = torch.from_numpy(owner * self.longest + columns[self.decoding :]).to(device)  # padded index of each token
        self._targets: dict[int, torch.Tensor] = {}
        self._biases: dict[tuple[str, int | None, torch.dtype], torch.Tensor] = {}

    def targets(self, heads: int, length: int) -> torch.Tensor:
        """[T * heads] where to write in a buffer [rows, heads, length] seen as one dimension."""
        if heads not in self._targets:
            head = torch.arange(heads, device=self.rows.device)
            self._targets[heads] = (((self.rows * heads)[:, None] + head) * length + self.positions[:, None]).view(-1)
        return self._targets[heads]

    def decode_bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[R, 1, W] added to the scores: 0, or minus infinity where a row has no token or looks beyond its window."""
        key = ("decode", window, dtype)
        if key not in self._biases:
            position = self.positions[: self.decoding, None]
            self._biases[key] = _bias(position, torch.arange(self.width, device=position.device)[None], window, dtype)[:, None, :]
        return self._biases[key]

    def segment_bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[1, 1, L, L] causal, within the window. Places after a sequence's end come last, so no token of it sees them."""
        key = ("segment", window, dtype)
        if key not in self._biases:
            column = torch.arange(self.longest, device=self.positions.device)
            self._biases[key] = _bias(column[:, None], column[None, :], window, dtype)[None, None]
        return self._biases[key]


def _bias(query: torch.Tensor, key: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    hidden = key > query
    if window is not None:
        hidden = hidden | (key <= query - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


class SlotCache(Cache):
    """[rows, heads, length, dim] per layer, allocated once. Rows 0..slots-1 are sequences; one spare row follows."""

    def __init__(self, geometries: Sequence[LayerGeometry], rows: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)  # the layers are not used; `update` is ours
        self.length = length
        self.plan: Plan | None = None
        # Zeros, not merely empty: masked columns weigh 0, but 0 times whatever lies in fresh memory may be NaN. Layers of one shape lie
        # in one block, so that moving a row is one operation for all of them.
        shapes: dict[tuple[int, int], int] = {}
        places = []
        for layer in geometries:
            for dim in (layer.key_dim, layer.value_dim):
                shape = (layer.heads, dim)
                places.append((shape, shapes.get(shape, 0)))
                shapes[shape] = shapes.get(shape, 0) + 1
        self._blocks = {
            (heads, dim): torch.zeros(count, rows, heads, length, dim, dtype=dtype, device=device) for (heads, dim), count in shapes.items()
        }
        tensors = [self._blocks[shape][index] for shape, index in places]
        self._keys, self._values = tensors[0::2], tensors[1::2]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(block.numel() * block.element_size() for block in self._blocks.values())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one layer's new keys and values [1, heads, T, dim], and lays out for its attention what the rows hold so far."""
        plan = self.plan
        assert plan is not None, "the cache is only used inside the engine's forward"
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        self._write(keys, key_states, plan)
        self._write(values, value_states, plan)
        rows, width = plan.decoding, plan.width
        plan.stored = (keys[:rows, :, :width], values[:rows, :, :width])
        plan.given = (key_states, value_states)
        return key_states, value_states

    def _write(self, buffer: torch.Tensor, states: torch.Tensor, plan: Plan) -> None:
        heads, dim = buffer.shape[1], buffer.shape[3]
        if states.shape[1] != heads or states.shape[3] != dim:
            raise ValueError(f"the model caches {states.shape[1]} heads of {states.shape[3]}, but its configuration says {heads} of {dim}")
        buffer.view(-1, dim).index_copy_(0, plan.targets(heads, self.length), states.transpose(1, 2).reshape(-1, dim))

    def copy_row(self, source: int, target: int, columns: int) -> None:
        """Copies the first `columns` columns of a row to another."""
        for block in self._blocks.values():
            block[:, target, :, :columns].copy_(block[:, source, :, :columns])

    def clear_row(self, row: int, columns: int) -> None:
        """Forgets the first `columns` columns of a row."""
        for block in self._blocks.values():
            block[:, row, :, :columns].zero_()

    def release(self) -> None:
        """Frees the memory; nothing can be computed afterwards."""
        self._blocks.clear()
        self._keys, self._values = [], []

    @property
    def layer_count(self) -> int:
        return len(self._keys)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly; models that ask merely want a default."""
        return 0
