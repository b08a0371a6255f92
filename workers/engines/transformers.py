"""The embedded engine: continuous batching over fixed slots with a transformers model's ordinary forward, on a CPU or a GPU.

One `step` is one forward pass over one token of every running sequence and the whole prompts of the starting ones, packed without padding
(workers/engines/kv_cache.py), through the attention of workers/engines/attention.py, into the sampler of workers/engines/sampler.py.
Finished sequences leave at once, the last active row moves into the hole, and free slots refill in the same step.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from workers.engines import attention
from workers.engines.base import Engine, EngineError, EngineOutput, EngineRequest, EngineStats
from workers.engines.kv_cache import Plan, SlotCache
from workers.engines.rows import RowTable
from workers.engines.sampler import Sampler, stream_key, uniforms
from workers.engines.stop import StopStrings
from workers.engines.support import cache_argument, check_model, fit_slots, layer_geometries, plan_kv_cache

__all__ = ["TransformersEngine", "plan_kv_cache"]

SEGMENT_TOKENS = 8192  # whole sequences of one forward pass, padded to the longest in attention: bounds the activations


@dataclass(slots=True)
class _Group:
    """A request with sequences that have not started."""

    request: EngineRequest
    prompt: np.ndarray  # [P] int32
    started: int = 0
    logits: torch.Tensor | None = None  # [1, V] after the prompt, while its keys and values lie in the spare row

    @property
    def waiting(self) -> int:
        return len(self.request.seeds) - self.started


@dataclass(slots=True)
class _Segment:
    """A whole sequence to compute in this step; its logits serve all of `rows`, which share it."""

    rows: list[int]
    tokens: np.ndarray
    group: _Group | None = None  # the group that goes on waiting with this prompt


class TransformersEngine(Engine):
    """Generates with `model`, whose weights, attention implementation and mode now belong to the engine.

    `slots` sequences of up to `max_length` tokens (prompt and response) are generated at once, fewer when `kv_cache_bytes` holds fewer.
    After an adoption, `kv_after_update="recompute"` computes the running sequences' keys and values again under the new weights, so that later
    tokens have the new policy's log-probabilities; `"keep"` goes on with the old ones, which is cheaper and only approximately the new policy.
    `tokenizer` is needed for stop strings only. ValueError when the model type cannot work or not one slot fits.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_length: int,
        kv_cache_bytes: int | None = None,
        kv_after_update: Literal["recompute", "keep"] = "recompute",
        tokenizer: Any = None,
    ) -> None:
        self.version = -1
        check_model(model, max_length)
        model.set_attn_implementation(attention.NAME)
        self._model = model.eval().requires_grad_(False)
        self._cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._device = model.device
        self._max_length = max_length
        self._recompute = kv_after_update == "recompute"
        self._tokenizer = tokenizer
        self._borrowed = False  # whether the parameters lie in memory that is not ours
        self._stale = False  # whether the running rows' keys and values are those of older weights, to be computed again
        self._slots = fit_slots(model.config, slots, max_length, model.dtype, kv_cache_bytes)
        self._rows = RowTable(self._slots, max_length)
        self._waiting: deque[_Group] = deque()
        self._tokens = 0
        self._steps = 0
        head = model.get_output_embeddings()
        self._vocabulary = head.weight.shape[0] if head is not None else model.config.get_text_config().vocab_size
        with self._errors():
            self._cache = SlotCache(layer_geometries(model.config), self._slots + 1, max_length, model.dtype, self._device)
            self._sampler = Sampler(self._slots, self._vocabulary, self._device)
            self._probe()

    @property
    def has_work(self) -> bool:
        return bool(self._rows.count or self._waiting)

    def submit(self, request: EngineRequest) -> None:
        sampling = request.sampling
        length = len(request.prompt_ids)
        if length < 1 or sampling.max_tokens < 1 or not request.seeds:
            raise ValueError("a request needs at least one prompt token, max_tokens >= 1 and one seed")
        if length + sampling.max_tokens > self._max_length:
            raise ValueError(
                f"prompt of {length} + max_tokens of {sampling.max_tokens} = {length + sampling.max_tokens} tokens, but a slot holds "
                f"{self._max_length} (data.max_prompt_length + data.max_response_length); shorten one or raise the limits"
            )
        if not 0 <= int(np.min(request.prompt_ids)) <= int(np.max(request.prompt_ids)) < self._vocabulary:
            raise ValueError(f"the prompt has token ids outside the model's vocabulary of {self._vocabulary}: model and tokenizer do not match")
        if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
            raise ValueError("temperature must be >= 0, top_p in (0, 1] and min_p in [0, 1]")
        if sampling.stop and self._tokenizer is None:
            raise ValueError("stop strings need the engine to have a tokenizer; give stop_token_ids instead")
        self._waiting.append(_Group(request, np.asarray(request.prompt_ids, dtype=np.int32)))

    @torch.inference_mode()
    def step(self) -> list[EngineOutput]:
        rows = self._rows
        running = rows.count
        segments, cached = self._start()
        if not rows.count:
            return []
        if self._stale:
            segments[:0] = [_Segment([row], rows.tokens[row, : rows.lengths[row]]) for row in range(running)]
            running, self._stale = 0, False
        with self._errors():
            logits = self._logits(running, segments, cached)
            count = rows.count
            draw = self._sampler.draw(
                logits,
                uniforms(rows.keys[:count], rows.lengths[:count] - rows.prompts[:count]),
                rows.temperature[:count],
                rows.top_k[:count],
                rows.top_p[:count],
                rows.min_p[:count],
            )
        self._tokens += count
        self._steps += 1
        return rows.remove(rows.append(draw, self.version), self._cache.copy_row)

    def abort(self, request_id: int) -> list[EngineOutput]:
        rows = self._rows
        mine = np.flatnonzero(rows.request_ids[: rows.count] == request_id)
        outputs = rows.remove({int(row): "abort" for row in mine}, self._cache.copy_row)
        for group in [item for item in self._waiting if item.request.request_id == request_id]:
            self._waiting.remove(group)
            outputs += [_unstarted(group.request, index) for index in range(group.started, len(group.request.seeds))]
        return outputs

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, torch.Tensor], version: int, *, copy: bool = True) -> None:
        names = dict(self._model.named_parameters(remove_duplicate=False))  # a tied parameter has several names; one of them suffices
        missing = {id(parameter): name for name, parameter in reversed(names.items())}
        for name in weights:
            if name in names:
                missing.pop(id(names[name]), None)
        unknown = [name for name in weights if name not in names]
        if missing or unknown:
            raise KeyError(f"weights do not match the model: missing {_some(missing.values())}, unknown {_some(unknown)}")
        for name, value in weights.items():
            parameter = names[name]
            if parameter.shape != value.shape:
                raise ValueError(f"weight '{name}' has shape {tuple(value.shape)}, but the model's is {tuple(parameter.shape)}")
            if not copy and (value.dtype != parameter.dtype or value.device != parameter.device):
                raise ValueError(
                    f"weight '{name}' is {value.dtype} on {value.device}, the model {parameter.dtype} on {parameter.device}: computing on given "
                    "memory needs the same; adopt with copy=True"
                )
            if copy and self._borrowed:
                parameter.data = torch.empty_like(parameter)
            if copy:
                parameter.data.copy_(value)
            else:
                parameter.data = value
        self._borrowed = not copy
        self.version = version
        self._stale = self._recompute and self._rows.count > 0
        for group in self._waiting:
            group.logits = None
        if copy and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the caller may overwrite its memory as soon as this returns

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._rows.count,
            waiting=sum(group.waiting for group in self._waiting),
            capacity=self._slots,
            tokens=self._tokens,
            steps=self._steps,
            kv_cache_bytes=self._cache.nbytes,
        )

    def close(self) -> None:
        self._waiting.clear()
        self._rows = RowTable(0, 0)
        self._cache.release()

    def _start(self) -> tuple[list[_Segment], list[_Segment]]:
        """Gives free rows to waiting sequences in order. Returns the prompts to compute, and those whose logits are known already."""
        rows = self._rows
        segments: list[_Segment] = []
        cached: list[_Segment] = []
        while self._waiting and rows.count < rows.slots:
            group = self._waiting[0]
            request = group.request
            taken = []
            for index in range(group.started, min(len(request.seeds), group.started + rows.slots - rows.count)):
                watcher = StopStrings(request.sampling.stop, self._tokenizer) if request.sampling.stop else None
                key = stream_key(request.seeds[index])
                taken.append(rows.add(request.request_id, index, group.prompt, key, request.sampling, watcher))
            group.started += len(taken)
            if not group.waiting:
                self._waiting.popleft()
            (segments if group.logits is None else cached).append(_Segment(taken, group.prompt, group))
        return segments, cached

    def _logits(self, running: int, segments: list[_Segment], cached: list[_Segment]) -> torch.Tensor:
        """The next token's logits [count, V] of all rows: of the first `running` by one token each, of others by their segments."""
        parts = []
        owners = np.arange(self._rows.count)  # row -> row of the concatenated parts
        done = 0
        for segment in cached:  # first of all: a prompt of this step may take the spare row
            for row in segment.rows:
                self._cache.copy_row(self._slots, row, len(segment.tokens))
        for chunk in _chunks(segments) or [[]]:
            part = self._forward(running, chunk)
            for offset, segment in enumerate(chunk, start=done + running):
                owners[segment.rows] = offset
                first, *others = segment.rows
                for row in others:
                    self._cache.copy_row(first, row, len(segment.tokens))
                if segment.group is not None and segment.group.waiting:
                    self._cache.copy_row(first, self._slots, len(segment.tokens))
                    segment.group.logits = part[offset - done, None].clone()
            done += len(part)
            running = 0
            parts.append(part)
        for segment in cached:
            assert segment.group is not None and segment.group.logits is not None
            owners[segment.rows] = done
            done += 1
            parts.append(segment.group.logits)
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        if len(logits) == len(owners) and (owners == np.arange(len(owners))).all():
            return logits
        return logits.index_select(0, torch.from_numpy(owners).to(self._device))

    def _forward(self, running: int, segments: list[_Segment]) -> torch.Tensor:
        """Logits [R + N, V] after the last token of rows 0..R-1 and of N segments, whose keys and values go to their first row."""
        rows = self._rows
        positions = rows.lengths[:running] - 1
        last = rows.tokens[np.arange(running), positions]
        plan = Plan(positions, [item.rows[0] for item in segments], [len(item.tokens) for item in segments], self._device)
        tokens = torch.from_numpy(np.concatenate([last, *(item.tokens for item in segments)]).astype(np.int64)).to(self._device)
        return self._call(plan, tokens)

    def _call(self, plan: Plan, tokens: torch.Tensor) -> torch.Tensor:
        self._cache.plan = plan
        arguments = {self._cache_argument: self._cache}
        if self._keeps_logits:
            arguments["logits_to_keep"] = plan.last if plan.segments else 0
        with attention.attending(plan):
            logits = self._model(input_ids=tokens[None], position_ids=plan.positions[None], use_cache=True, return_dict=True, **arguments).logits[0]
        self._cache.plan = None
        if plan.segments and not self._keeps_logits:
            logits = logits.index_select(0, plan.last)
        return logits

    @torch.inference_mode()
    def _probe(self) -> None:
        """ValueError when the model's attention is not ours in every layer. Values do not matter: the weights may not be there yet."""
        if self._device.type == "meta":
            return
        for plan in (Plan(np.zeros(0, dtype=np.int64), [0], [2], self._device), Plan(np.array([2]), [], [], self._device)):
            self._call(plan, torch.zeros(len(plan.positions), dtype=torch.int64, device=self._device))
            if plan.layers != self._cache.layer_count:
                raise ValueError(
                    f"model type '{self._model.config.model_type}' attends {plan.layers} times through transformers' AttentionInterface, but has "
                    f"{self._cache.layer_count} layers; choose another decoder-only model, or rollout.engine: sglang"
                )
        self._cache.clear_row(0, 3)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns running out of memory, and a broken policy, into an EngineError that says what to do."""
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise EngineError(self._out_of_memory()) from error
        except FloatingPointError as error:
            raise EngineError(f"{error} under policy version {self.version}: training has diverged, or the weights are damaged") from error
        except RuntimeError as error:
            if "allocate memory" not in str(error):  # the CPU allocator has no exception of its own
                raise
            raise EngineError(self._out_of_memory()) from error

    def _out_of_memory(self) -> str:
        cache = plan_kv_cache(self._model.config, self._slots, self._max_length, self._model.dtype)
        return (
            f"out of memory on {self._device} with {self._slots} slots of {self._max_length} tokens ({cache / 2**30:.3g} GiB of keys and values, "
            f"{self._slots * self._vocabulary * 8 / 2**30:.3g} GiB of logits); lower rollout.slots or rollout.kv_cache_gb"
        )


def _chunks(segments: list[_Segment]) -> list[list[_Segment]]:
    """Segments in order, cut so that no chunk, padded to its longest, exceeds SEGMENT_TOKENS (a single one may)."""
    chunks: list[list[_Segment]] = []
    longest = 0
    for segment in segments:
        longest = max(longest, len(segment.tokens))
        if not chunks or longest * (len(chunks[-1]) + 1) > SEGMENT_TOKENS:
            chunks.append([])
            longest = len(segment.tokens)
        chunks[-1].append(segment)
    return chunks


def _unstarted(request: EngineRequest, index: int) -> EngineOutput:
    """The output of a sequence that was aborted before its first token."""
    integers, floats = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
    return EngineOutput(
        request_id=request.request_id,
        index=index,
        token_ids=integers,
        logprobs=floats,
        sampled_logprobs=floats,
        versions=integers,
        finish_reason="abort",
    )


def _some(names: Iterable[str]) -> str:
    """The first few names, for a message."""
    listed = sorted(names)
    return (", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")) or "none"
