"""The attention of the embedded engine, registered with transformers' AttentionInterface under the name `tandem`.

It follows the contract of the flash-attention functions: no mask tensor comes in; causality and lengths are known from the plan, the window
from `sliding_window`, and soft-capping and sinks from `softcap` and `s_aux`. For a running row, the query heads that share a key/value
head are the rows of one small matrix (packed grouped-query attention), so keys and values are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from workers.engines.kv_cache import Plan

NAME = "tandem"
_current: ContextVar[Plan | None] = ContextVar("plan", default=None)


@contextmanager
def attending(plan: Plan) -> Iterator[None]:
    """The plan that attention calls follow inside the block."""
    token = _current.set(plan)
    try:
        yield
    finally:
        _current.reset(token)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`query` [1, heads, T, dim], packed as the current plan says; returns [1, T, heads, value_dim] and no weights."""
    plan = _current.get()
    if plan is None:
        raise RuntimeError(f"attention '{NAME}' only works inside TransformersEngine; load another copy of the model for other uses")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is not None or position_bias is not None or not causal:
        raise ValueError(f"{type(module).__name__} needs an attention mask or bias of its own, which the transformers engine does not have")
    if plan.given is None or key is not plan.given[0] or value is not plan.given[1]:
        raise ValueError(f"{type(module).__name__} changes its keys and values after caching them, which the transformers engine cannot follow")
    plan.layers += 1
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    rows = plan.decoding
    if not plan.segments:
        return _decode(plan, query, scaling, softcap, s_aux, sliding_window), None
    if not rows:
        return _prefill(plan, query, key, value, scaling, softcap, s_aux, sliding_window), None
    decoded = _decode(plan, query[:, :, :rows], scaling, softcap, s_aux, sliding_window)
    filled = _prefill(plan, query[:, :, rows:], key[:, :, rows:], value[:, :, rows:], scaling, softcap, s_aux, sliding_window)
    return torch.cat([decoded, filled], dim=1), None


def _decode(
    plan: Plan, query: torch.Tensor, scaling: float, softcap: float | None, sinks: torch.Tensor | None, window: int | None
) -> torch.Tensor:
    """One token for each of R rows: query [1, heads, R, dim] to [1, R, heads, value_dim]."""
    assert plan.stored is not None
    key, value = plan.stored
    _, heads, rows, dim = query.shape
    shared = key.shape[1]
    packed = query.transpose(1, 2).reshape(rows, shared, heads // shared, dim)
    bias = plan.decode_bias(window, query.dtype)
    if query.is_cuda and softcap is None and sinks is None:
        output = scaled_dot_product_attention(packed, key, value, attn_mask=bias[:, None], scale=scaling)
        return output.reshape(1, rows, heads, value.shape[-1])
    scores = torch.bmm((packed * scaling).flatten(0, 1), key.flatten(0, 1).transpose(1, 2)).view(rows, heads, -1)
    weights = _softmax(scores, bias, softcap, sinks, head_dim=1)
    output = torch.bmm(weights.view(rows * shared, heads // shared, -1), value.flatten(0, 1))
    return output.view(1, rows, heads, value.shape[-1])


def _prefill(
    plan: Plan,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Whole sequences packed in a row: query [1, heads, T, dim] to [1, T, heads, value_dim]."""
    heads = query.shape[1]
    query, key, value = (_unpack(plan, tensor) for tensor in (query, key, value))
    if key.shape[1] != heads:
        key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    if window is not None and window >= plan.longest:
        window = None
    if softcap is None and sinks is None:
        bias = plan.segment_bias(window, query.dtype) if window is not None else None
        output = scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=bias is None, scale=scaling)
    else:
        scores = torch.matmul(query * scaling, key.transpose(2, 3))
        output = torch.matmul(_softmax(scores, plan.segment_bias(window, query.dtype), softcap, sinks, head_dim=1), value)
    if plan.segments == 1:
        return output.transpose(1, 2)
    return output.transpose(1, 2).flatten(0, 1).index_select(0, plan.packed)[None]


def _unpack(plan: Plan, states: torch.Tensor) -> torch.Tensor:
    """[1, heads, T, dim] to [N, heads, L, dim]; places after a sequence's end repeat its last token and are never looked at."""
    if plan.segments == 1:
        return states
    _, heads, _, dim = states.shape
    return states.index_select(2, plan.padded).view(heads, plan.segments, plan.longest, dim).transpose(0, 1)


def _softmax(scores: torch.Tensor, bias: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None, *, head_dim: int) -> torch.Tensor:
    """Attention weights from scaled scores, whose `head_dim` counts heads. Sinks are one more logit a head that takes weight and gives no value."""
    if softcap is not None:
        scores = torch.tanh_(scores.div_(softcap)).mul_(softcap)
    scores = scores.add_(bias)
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    shape = [1] * scores.ndim
    shape[head_dim] = -1
    extra = sinks.to(scores.dtype).view(shape).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1].contiguous()


AttentionInterface.register(NAME, slot_attention)
