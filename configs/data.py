"""`data` and `reward`: where prompts come from and how answers are scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from configs.base import Bool, Float, Fraction, Int, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class SourceConfig(Section):
    """One source of prompts. A plain string in `train_files` or `val_files` is short for `{path: STRING}`.

    `path` is a file, folder, glob or hub name; `builtin:arithmetic` is the quickstart's task, and `reasoning_gym:NAME` a generated one.
    """

    path: str
    name: str | None = None  # data_source where the rows do not carry one; default: derived from the path
    split: str | None = None  # of a hub data set or folder
    subset: str | None = None  # configuration name of a hub data set
    weight: PositiveFloat | None = None  # share of training prompts when several sources are mixed; null for all: by size
    format: Literal["auto", "verl", "trl", "messages", "dapo", "gsm8k", "text"] = "auto"
    prompt_key: str | None = None
    answer_key: str | None = None  # a dot goes into nested columns: reward_model.ground_truth
    prompt_template: str | None = None  # Python format string over the row's columns, for `format: text`
    options: dict[str, Any] = Field(default_factory=dict)  # generator settings, e.g. of a reasoning_gym task
    size: PositiveInt | None = None  # how many rows a generated source makes
    max_samples: PositiveInt | None = None
    reward: str | None = None  # overrides reward.function for this source
    # Only for validation sets; null inherits from `validation`.
    n: PositiveInt | None = None
    temperature: NonNegativeFloat | None = None
    top_p: Fraction | None = None
    max_response_length: PositiveInt | None = None


class DataConfig(Section):
    train_files: list[SourceConfig] = Field(default_factory=list)
    val_files: list[SourceConfig] = Field(default_factory=list)
    val_fraction: Fraction = 0.0  # of the training prompts held out for validation; only without val_files
    max_prompt_length: PositiveInt = 512  # tokens
    max_response_length: PositiveInt = 512  # tokens
    overlong_prompts: Literal["error", "filter", "truncate_left"] = "filter"
    system_prompt: str | None = None
    apply_chat_template: Literal["auto", "always", "never"] = "auto"
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # e.g. {enable_thinking: false}
    train_max_samples: Int = -1  # -1: all (verl's convention)
    val_max_samples: Int = -1
    sampler: Literal["shuffle", "sequential", "difficulty"] = "shuffle"
    difficulty_key: str | None = None  # a column to sort by with `sampler: difficulty`; null: by solved rate
    seed: Int | None = None  # null: run.seed
    streaming: Bool = False  # read training rows as they are needed; needs a run length in steps and one source
    shuffle_buffer: PositiveInt = 10_000  # rows among which a streamed source is shuffled

    @field_validator("train_files", "val_files", mode="before")
    @classmethod
    def _strings_are_paths(cls, value: Any) -> Any:
        if value is None:
            return []
        items = value if isinstance(value, list) else [value]
        return [{"path": item} if isinstance(item, str) else item for item in items]


class RewardConfig(Section):
    """`function` is a built-in name, `file.py:name` or `package.module:name`; `weights` mixes several into a weighted sum."""

    function: str | None = "auto"  # auto: by the format of the source and verl's data_source, else exact_match
    weights: dict[str, Float] = Field(default_factory=dict)  # {name or path: weight}; replaces `function` when not empty
    by_source: dict[str, str] = Field(default_factory=dict)  # {data_source: name or path}, before `function` and `weights`
    kwargs: dict[str, Any] = Field(default_factory=dict)  # arguments of `function`; of several: {name or path: {argument: value}}
    url: str | None = None  # an HTTP scorer; replaces `function`
    workers: NonNegativeInt = 1  # scoring processes per rollout worker; 0: everything in place, without limits (for debugging)
    timeout_s: PositiveFloat = 30.0  # of one call, from the moment that scoring starts
    max_retries: NonNegativeInt = 1
    on_error: Literal["exclude", "score", "stop"] = "exclude"
    error_score: Float = 0.0  # with `on_error: score`
    max_memory_gb: PositiveFloat = 4.0  # address space of one scoring process
    max_concurrency: PositiveInt = 8  # simultaneous HTTP requests per worker
