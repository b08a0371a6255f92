"""Samples one token per row from logits, with one uniform number per (seed, position).

A two-level inverse cumulative distribution: the exponentials are summed in blocks of 256 tokens, the uniform number chooses a block by
the cumulative block sums and then a token within it. It is exact, reads the vocabulary a few times instead of sorting it, and gives the
log-probability for nothing. `torch.multinomial` draws V random numbers a row instead, and its draws depend on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 256
_FIRST_TOP_P_RANKS = 1024  # top-p looks at so many tokens before it sorts the vocabulary

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SEED_MASK = 0xFFFFFFFFFFFFFFFF


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def stream_key(seed: int) -> int:
    """The 64-bit key of a trajectory's random stream; any integer is a seed, and neighbouring seeds are unrelated."""
    return int(_mix(np.array([seed & _SEED_MASK], dtype=np.uint64) + _GAMMA)[0])


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for every (stream key, position in the response) [R]: counter-based, so without any state."""
    mixed = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Draw:
    """What was sampled for R rows."""

    tokens: NDArray[np.int64]  # [R]
    logprobs: NDArray[np.float32]  # [R] under softmax(logits / temperature)
    sampled_logprobs: NDArray[np.float32]  # [R] under the distribution that was sampled from; greedy: 0


class Sampler:
    """Holds the buffer of exponentials [slots, V], which is as large as one step's logits in float32."""

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self._vocabulary = vocabulary
        self._blocks = -(-vocabulary // BLOCK)
        self._device = device
        self._buffer = torch.zeros(slots, self._blocks * BLOCK, dtype=torch.float32, device=device)

    def draw(
        self,
        logits: torch.Tensor,
        uniform: NDArray[np.float64],
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float32],
        min_p: NDArray[np.float32],
    ) -> Draw:
        """`logits` [R, V] of any floating type, R <= slots; all others [R]. Temperature 0 is greedy. FloatingPointError, when a row has no
        finite maximum or its token no finite log-probability."""
        rows = len(logits)
        greedy = temperature == 0
        if logits.shape[1] > self._vocabulary or rows > len(self._buffer):
            raise AssertionError("more rows or tokens than the sampler was built for")
        best, best_token = logits.max(dim=1, keepdim=True) if greedy.any() else (logits.amax(dim=1, keepdim=True), None)
        best = best.float()
        weights = self._buffer[:rows]
        values = weights[:, : logits.shape[1]]
        torch.sub(logits, best, out=values)
        scale = np.where(greedy, np.float32(1), np.float32(1) / np.where(greedy, np.float32(1), temperature))
        if (scale != 1).any():
            values.mul_(self._put(scale)[:, None])
        values.exp_()
        blocks = weights.view(rows, self._blocks, BLOCK)
        sums = blocks.sum(dim=2)
        total = sums.sum(dim=1, dtype=torch.float64)
        kept_total = total
        filtered = ~greedy & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        if filtered.any():
            self._filter(values, np.flatnonzero(filtered), top_k, top_p, min_p)
            sums = blocks.sum(dim=2)
            kept_total = sums.sum(dim=1, dtype=torch.float64)
        if greedy.all():
            assert best_token is not None
            tokens = best_token
        else:
            tokens = self._invert(blocks, sums, self._put(uniform))
            if best_token is not None:
                tokens = torch.where(self._put(greedy)[:, None], best_token, tokens)
        chosen = (logits.gather(1, tokens).float() - best).double().squeeze(1) * self._put(scale)
        result = torch.stack([tokens.squeeze(1).double(), chosen - total.log(), chosen - kept_total.log()]).cpu().numpy()
        if not np.isfinite(result).all():
            raise FloatingPointError("the model's logits are not finite")
        return Draw(
            tokens=result[0].astype(np.int64),
            logprobs=result[1].astype(np.float32),
            sampled_logprobs=np.where(greedy, np.float32(0), result[2].astype(np.float32)),
        )

    def _put(self, array: NDArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _invert(self, blocks: torch.Tensor, sums: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        """Tokens [R, 1] where the cumulative weight passes `uniform` [R] of the total."""
        cumulative = sums.double().cumsum(dim=1)
        target = uniform[:, None] * cumulative[:, -1:]
        block = torch.searchsorted(cumulative, target, right=True).clamp_(max=self._blocks - 1)
        rest = target - (cumulative.gather(1, block) - sums.gather(1, block))
        inner = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(dim=1)
        # Rounding may leave a rest beyond the block's last weight; then the last token with any weight is meant.
        last = torch.searchsorted(inner, inner[:, -1:].contiguous())
        return block * BLOCK + torch.minimum(torch.searchsorted(inner, rest, right=True), last)

    def _filter(
        self, values: torch.Tensor, rows: NDArray[np.int64], top_k: NDArray[np.int64], top_p: NDArray[np.float32], min_p: NDArray[np.float32]
    ) -> None:
        """Sets the weights that top-k, top-p and min-p exclude to 0, in that order, in place. The largest weight of a row is 1.

        Equal weights at the boundary are all kept, so that the result does not depend on a sort's order."""
        index = self._put(rows)
        chosen = values.index_select(0, index)
        vocabulary = values.shape[1]
        threshold = self._put(min_p[rows])
        ks = np.where(top_k[rows] > 0, np.minimum(top_k[rows], vocabulary), vocabulary)
        nucleus = top_p[rows] < 1
        limited = ks < vocabulary
        if limited.any() or nucleus.any():
            wanted = int(ks[limited].max()) if limited.any() else 0
            if (nucleus & ~limited).any():
                wanted = max(wanted, min(vocabulary, _FIRST_TOP_P_RANKS))
            ranked = chosen.topk(wanted, dim=1).values
            k = self._put(ks)
            if nucleus.any():
                mass = self._put(np.where(nucleus, top_p[rows], np.float32(2)))
                inside, total = self._within_k(ranked, k, chosen)
                short = (inside.sum(dim=1) < mass * total) & self._put(nucleus & ~limited)
                if wanted < vocabulary and bool(short.any()):
                    ranked = chosen.sort(dim=1, descending=True).values
                    inside, total = self._within_k(ranked, k, chosen)
                before = inside.cumsum(dim=1) - inside
                count = ((before < (mass * total)[:, None]) & (inside > 0)).sum(dim=1).clamp_(min=1)
                cut = ranked.gather(1, (count - 1)[:, None]).squeeze(1)
                threshold = torch.maximum(threshold, torch.where(self._put(nucleus), cut, 0.0))
            if limited.any():
                kth = ranked.gather(1, (k - 1).clamp(max=ranked.shape[1] - 1)[:, None]).squeeze(1)
                threshold = torch.maximum(threshold, torch.where(self._put(limited), kth, 0.0))
        values.index_copy_(0, index, chosen.masked_fill_(chosen < threshold[:, None], 0.0))

    @staticmethod
    def _within_k(ranked: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The ranked weights [F, N] in float64 with those beyond rank k as 0, and the total that top-p is a share of [F]."""
        ranks = torch.arange(ranked.shape[1], device=ranked.device)
        inside = ranked.double().masked_fill(ranks[None, :] >= k[:, None], 0.0)
        limited = k < weights.shape[1]
        return inside, torch.where(limited, inside.sum(dim=1), weights.sum(dim=1, dtype=torch.float64))
