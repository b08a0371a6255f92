"""Which rewards score a prompt, with which weights and arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from configs.data import RewardConfig
from workers.messages import Prompt
from workers.rewards.builtin import is_custom, is_url, reward_of_source

FALLBACK = "exact_match"


@dataclass(frozen=True, slots=True)
class Part:
    """One reward of a weighted sum."""

    spec: str
    weight: float

    @property
    def name(self) -> str:
        """For metrics."""
        return short_name(self.spec)


def short_name(spec: str) -> str:
    """A reward's name without the place where it lives."""
    if is_url(spec):
        return "http"
    return spec.rpartition(":")[2] if is_custom(spec) else spec


def parts_of(config: RewardConfig, prompt: Prompt) -> tuple[Part, ...]:
    """The rewards of a prompt: its source's own, else by data_source, else the configured one or mix."""
    if prompt.reward is not None:
        return (Part(prompt.reward, 1.0),)
    if prompt.data_source in config.by_source:
        return (Part(config.by_source[prompt.data_source], 1.0),)
    return default_parts(config) or (Part(reward_of_source(prompt.data_source) or FALLBACK, 1.0),)


def default_parts(config: RewardConfig) -> tuple[Part, ...]:
    """What scores a prompt that chooses nothing itself; empty with `function: auto`."""
    if config.url is not None:
        return (Part(config.url, 1.0),)
    if config.weights:
        return tuple(Part(spec, weight) for spec, weight in config.weights.items())
    if config.function is None or config.function == "auto":
        return ()
    return (Part(config.function, 1.0),)


def configured_specs(config: RewardConfig) -> tuple[str, ...]:
    """Every reward that the section names."""
    return tuple(dict.fromkeys([*(part.spec for part in default_parts(config)), *config.by_source.values()]))


def kwargs_of(config: RewardConfig, spec: str) -> Mapping[str, Any]:
    """A reward's arguments: `kwargs.SPEC` when that is a mapping; else, for `reward.function` alone, all of `kwargs`."""
    own = config.kwargs.get(spec)
    if isinstance(own, Mapping):
        return dict(own)
    if spec == config.function and not config.weights and config.url is None:
        names = configured_specs(config)
        return {name: value for name, value in config.kwargs.items() if name not in names or not isinstance(value, Mapping)}
    return {}
