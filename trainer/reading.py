"""Reads one source into prompts and counts what it leaves out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from configs.data import SourceConfig
from configs.schema import Config
from trainer.formats import BadRow, Draft, Format, detect_format, read_row
from trainer.prompts import Overlong, PromptBuilder, question_id
from trainer.sources import Rows, open_source
from workers.messages import Prompt
from workers.rewards.builtin import reward_of_source

BATCH = 512  # rows that are tokenised at once
LOOK = 20  # rows from which the format is detected


class SourceReader:
    """One entry of `train_files` or `val_files`.

    `report` is a plain dictionary: name, path, format, detected, columns, reward, counts {rows, kept, duplicate, missing_prompt, ...},
    prompt_tokens {mean, max}, first_prompt, first_prompt_tokens, first_answer.
    """

    def __init__(
        self, source: SourceConfig, config: Config, builder: PromptBuilder, *, role: str, seed: int, taken: set[str], where: str
    ) -> None:
        self.source = source
        self._config = config
        self._builder = builder
        self._where = where
        self._streaming = role == "train" and config.data.streaming
        self._rows: Rows = open_source(
            source, role="train" if role == "train" else "validation", seed=seed, streaming=self._streaming, taken=taken, where=where
        )
        self.name = self._rows.name
        first = list(itertools.islice(iter(self._rows.rows), LOOK))
        if not first:
            raise ValueError(f"{where}: {source.path} holds no rows")
        self._format = self._detect(first)
        self._counts: Counter[str] = Counter()
        self._held_out: set[str] = set()
        self._tokens = 0
        self.questions: set[str] = set()
        self.report: dict[str, Any] = {
            "name": self.name,
            "role": role,
            "path": source.path,
            "format": self._format.name,
            "detected": self._format.detected,
            "prompt_key": self._format.prompt_key,
            "answer_key": self._format.answer_key,
            "columns": list(self._rows.columns),
            "counts": self._counts,
        }

    def read(self, *, questions_seen: set[str], held_out: set[str] | None = None) -> list[Prompt]:
        """All usable prompts. Adds their questions to `questions_seen` and leaves out those that it has; counts those in `held_out`.

        ValueError when nothing is left.
        """
        prompts: list[Prompt] = []
        drafts = self.drafts(questions_seen, held_out)
        while batch := list(itertools.islice(drafts, BATCH)):
            prompts += [prompt for prompt in self._build(batch) if prompt is not None]
        if not prompts:
            raise ValueError(f"{self._where}: {self.source.path} has no usable prompt: {self._summary()}")
        return prompts

    def open_stream(self, held_out: set[str]) -> None:
        """Prepares for being read as a stream, and looks at one prompt for the report."""
        self._held_out = held_out
        if not any(self.build(draft) is not None for draft in itertools.islice(self.drafts(), BATCH)):
            raise ValueError(f"{self._where}: the first {BATCH} rows of {self.source.path} hold no usable prompt: {self._summary()}")
        self._counts.clear()
        self._tokens = 0

    def drafts(self, questions_seen: set[str] | None = None, held_out: set[str] | None = None) -> Iterator[Draft]:
        """Usable rows in order, each question once."""
        seen = set() if questions_seen is None else questions_seen
        held_out = self._held_out if held_out is None else held_out
        for row in itertools.islice(iter(self._rows.rows), self.source.max_samples):
            self._counts["rows"] += 1
            try:
                draft = read_row(self._format, row, self.name)
            except BadRow as bad:
                self._counts[bad.reason] += 1
                continue
            question = question_id(draft)
            if question in seen:
                self._counts["duplicate"] += 1
                continue
            seen.add(question)
            self.questions.add(question)
            if question in held_out:
                # A training problem that is also a validation problem would be measured after it was learned.
                self._counts["in_validation"] += 1
                continue
            yield draft

    def build(self, draft: Draft) -> Prompt | None:
        """One draft as a prompt; None when it is too long."""
        return self._build([draft])[0]

    def _build(self, drafts: list[Draft]) -> list[Prompt | None]:
        try:
            built = self._builder.build(drafts, [self._reward(draft) for draft in drafts])
        except ValueError as error:
            raise ValueError(f"{self._where}: {error}") from error
        prompts: list[Prompt | None] = []
        for draft, (item, truncated) in zip(drafts, built, strict=True):
            if isinstance(item, Overlong):
                self._counts["overlong" if item.tokens else "empty"] += 1
                prompts.append(None)
                continue
            self._counts["kept"] += 1
            self._counts.update({"truncated": 1} if truncated else {})
            self._note(item)
            prompts.append(item)
        return prompts

    def _note(self, prompt: Prompt) -> None:
        length = len(prompt.token_ids)
        self._tokens += length
        if "first_prompt" not in self.report:
            self.report |= {
                "first_prompt": prompt.text,
                "first_prompt_tokens": length,
                "first_answer": prompt.ground_truth,
                "reward": prompt.reward,
                "prompt_tokens": {"mean": 0.0, "max": 0},
            }
        tokens = self.report["prompt_tokens"]
        tokens["max"] = max(tokens["max"], length)
        tokens["mean"] = self._tokens / self._counts["kept"]

    def _detect(self, first: list[dict[str, Any]]) -> Format:
        if self._rows.generated and self.source.path.startswith("reasoning_gym:"):
            return Format(name="reasoning_gym", prompt_key="question", answer_key="answer")
        return detect_format(self.source, self._rows.columns, first, self._where)

    def _reward(self, draft: Draft) -> str | None:
        """The reward that this source chooses for its prompts; None leaves it to the reward section."""
        reward = self._config.reward
        if self.source.reward is not None:
            return self.source.reward
        if draft.data_source in reward.by_source or reward.url is not None or reward.weights or reward.function not in (None, "auto"):
            return None
        known = {"gsm8k": "gsm8k", "dapo": "dapo_math", "reasoning_gym": "reasoning_gym"}.get(self._format.name) or reward_of_source(draft.data_source)
        if known is None and self._format.name == "verl":
            raise ValueError(
                f"no built-in reward belongs to data_source {draft.data_source!r}; set reward.function, or reward.by_source: {{{draft.data_source}: NAME}}"
            )
        return known

    def _summary(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self._counts.items()) if count) or "it is empty"
