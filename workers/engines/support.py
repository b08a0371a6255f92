"""Which models the embedded engine can run, and what their key/value cache costs. Needs a configuration, no weights."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ROPES_THAT_DEPEND_ON_THE_BATCH = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one layer caches per token."""

    heads: int  # key/value heads
    key_dim: int
    value_dim: int


def text_config(config: Any) -> Any:
    """The part of a composite configuration that describes the language model."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def _first(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def layer_geometries(config: Any) -> list[LayerGeometry]:
    """One entry per layer. ValueError when the configuration does not say what a layer caches."""
    config = text_config(config)
    layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    heads = _first(config, "num_attention_heads", "n_head")
    hidden = _first(config, "hidden_size", "n_embd")
    if layers is None or heads is None or hidden is None:
        raise ValueError(
            f"model type '{config.model_type}' does not state its layers, attention heads and hidden size in its configuration; "
            "choose a decoder-only model, or rollout.engine: sglang"
        )
    if getattr(config, "kv_lora_rank", None) is not None and getattr(config, "qk_head_dim", None) is not None:
        raise ValueError(
            f"model type '{config.model_type}' uses multi-head latent attention, for which the transformers engine has no cache; use rollout.engine: sglang"
        )
    head_dim = _first(config, "head_dim") or hidden // heads
    return [LayerGeometry(_first(config, "num_key_value_heads") or heads, head_dim, head_dim)] * layers


def row_bytes(config: Any, max_length: int, itemsize: int) -> int:
    """Bytes of the keys and values of one sequence of `max_length` tokens."""
    return max_length * itemsize * sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in layer_geometries(config))


def plan_kv_cache(hf_config: Any, slots: int, max_length: int, dtype: Any) -> int:
    """Bytes of the cache of `slots` sequences of `max_length` tokens, and of one spare row for a prompt that waits for slots.

    `dtype` is a torch dtype or its name."""
    if isinstance(dtype, str):
        import torch

        dtype = getattr(torch, dtype)
    return (slots + 1) * row_bytes(hf_config, max_length, dtype.itemsize)


def fit_slots(hf_config: Any, slots: int, max_length: int, dtype: Any, budget: int | None) -> int:
    """How many of `slots` fit into `budget` bytes. ValueError, with the numbers, when not even one does."""
    if budget is None:
        return slots
    one = plan_kv_cache(hf_config, 0, max_length, dtype)
    fitting = min(slots, budget // one - 1)
    if fitting < 1:
        raise ValueError(
            f"a key/value cache of {budget / 2**30:.3g} GiB does not hold one sequence of {max_length} tokens: one slot and one "
            f"spare row need {2 * one / 2**30:.3g} GiB. Raise rollout.kv_cache_gb or lower data.max_prompt_length and "
            "data.max_response_length"
        )
    return fitting


def cache_argument(model: PreTrainedModel) -> str:
    """The name of `forward`'s cache argument: `cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def check_model(model: PreTrainedModel, max_length: int) -> None:
    """ValueError, naming the model type and the reason, when this engine would compute something wrong or nothing at all."""
    config = text_config(model.config)
    name = model.config.model_type
    remedy = "choose a decoder-only attention model (Qwen, Llama, Gemma, Phi, Mistral, ...), or rollout.engine: sglang"
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model type '{name}' is an encoder-decoder, which the transformers engine cannot roll out; {remedy}")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"model type '{name}' keeps a recurrent state (state space or linear attention), not a key/value cache; {remedy}")
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if foreign:
        raise ValueError(f"model type '{name}' has layers of type {', '.join(foreign)}, for which the engine has no cache; {remedy}")
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"model type '{name}' shares keys and values between layers, which the engine does not; {remedy}")
    if getattr(config, "use_bidirectional_attention", None):
        raise ValueError(f"model type '{name}' attends in both directions here, so it does not generate from left to right; {remedy}")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"model type '{name}' does not route its attention through transformers' AttentionInterface; {remedy}")
    parameters = inspect.signature(model.forward).parameters
    missing = [item for item in ("input_ids", "position_ids") if item not in parameters]
    if missing or not {"cache", "past_key_values"} & set(parameters):
        raise ValueError(f"model type '{name}' takes no {' and '.join(missing) or 'cache'} in its forward pass; {remedy}")
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope] if "rope_type" in rope else [item for item in rope.values() if isinstance(item, dict)]
    for item in ropes:
        original = item.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        original = original or config.max_position_embeddings
        if item.get("rope_type") in _ROPES_THAT_DEPEND_ON_THE_BATCH and max_length > original:
            raise ValueError(
                f"model type '{name}' rotates positions by '{item['rope_type']}', which beyond {original} tokens depends on the longest "
                f"sequence of the batch; keep data.max_prompt_length + data.max_response_length (now {max_length}) within {original}"
            )
    longest = _first(config, "max_position_embeddings", "n_positions")
    if longest is not None and max_length > longest:
        raise ValueError(
            f"model type '{name}' knows {longest} positions, but data.max_prompt_length + data.max_response_length is {max_length}; "
            "lower one of them"
        )
    layer_geometries(config)
