"""The rewards that come with the project, by name."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Builtin:
    """Where a built-in reward lives and what it needs."""

    module: str  # holds a function of the reward's name: (Answer, **kwargs) -> number, mapping with `score`, or None
    in_place: bool  # cheap, and bounded whatever the input: computed without a process
    ground_truth: bool = True  # whether it compares with one
    package: str | None = None  # importable name of an optional package
    extra: str | None = None  # the project's extra that installs it


BUILTINS: Mapping[str, Builtin] = MappingProxyType(
    {
        "exact_match": Builtin(module="workers.rewards.exact_match", in_place=True),
        "gsm8k": Builtin(module="workers.rewards.gsm8k", in_place=True),
        "dapo_math": Builtin(module="workers.rewards.dapo_math", in_place=True),
        "format": Builtin(module="workers.rewards.format", in_place=True, ground_truth=False),
        "length_penalty": Builtin(module="workers.rewards.length_penalty", in_place=True, ground_truth=False),
        # A pattern or schema comes from the user and may take exponential time.
        "regex": Builtin(module="workers.rewards.regex", in_place=False, ground_truth=False),
        "json_schema": Builtin(module="workers.rewards.json_schema", in_place=False, ground_truth=False, package="jsonschema", extra="json"),
        "math_verify": Builtin(module="workers.rewards.math_verify", in_place=False, package="math_verify", extra="math"),
        "reasoning_gym": Builtin(module="workers.rewards.reasoning_gym", in_place=False, ground_truth=False, package="reasoning_gym", extra="gym"),
    }
)

# Which reward `function: auto` takes for verl's data_source names, matched by prefix. Anything else is compared as text.
AUTO_BY_SOURCE: tuple[tuple[str, str], ...] = (
    ("openai/gsm8k", "gsm8k"),
    ("gsm8k", "gsm8k"),
    ("math_dapo", "dapo_math"),
    ("dapo", "dapo_math"),
    ("aime", "dapo_math"),
    ("lighteval/MATH", "math_verify"),
    ("DigitalLearningGmbH/MATH-lighteval", "math_verify"),
    ("HuggingFaceH4/MATH-500", "math_verify"),
    ("HuggingFaceH4/aime_2024", "math_verify"),
    ("numina_", "math_verify"),
    ("reasoning_gym/", "reasoning_gym"),
)


def reward_of_source(data_source: str) -> str | None:
    """The built-in reward that belongs to a known data_source, or None."""
    return next((reward for prefix, reward in AUTO_BY_SOURCE if data_source.startswith(prefix)), None)


def is_url(spec: str) -> bool:
    return spec.startswith(("http://", "https://"))


def is_custom(spec: str) -> bool:
    """Whether a spec names a function of the user: `file.py:name` or `package.module:name`."""
    return ":" in spec and not is_url(spec)


def check_builtin(name: str) -> Builtin:
    """The built-in of this name. ValueError when there is none, or when the optional package it needs is not installed."""
    builtin = BUILTINS.get(name)
    if builtin is None:
        near = difflib.get_close_matches(name, BUILTINS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"reward {name!r} is unknown{hint} There are {', '.join(BUILTINS)}; your own is given as file.py:name")
    if builtin.package is not None and importlib.util.find_spec(builtin.package) is None:
        raise ValueError(f'reward {name!r} needs the package {builtin.package}, which is not installed; run: pip install "tandem[{builtin.extra}]"')
    return builtin
