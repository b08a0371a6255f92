"""From a draft to the tokens that an engine gets: chat template, system prompt, special tokens, length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.data import DataConfig
from trainer.formats import Draft, Messages, plain_text
from workers.messages import Prompt


@dataclass(frozen=True, slots=True)
class Overlong:
    """A prompt above the limit that is not used."""

    tokens: int
    text: str


class PromptBuilder:
    """Renders and tokenises drafts as the data section says."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._bos = tokenizer.bos_token_id
        if config.apply_chat_template == "always" and not self._has_template:
            raise ValueError(
                "data.apply_chat_template: 'always', but the tokenizer has no chat template; use an instruction-tuned model's tokenizer "
                "(model.tokenizer_path), or set data.apply_chat_template: auto"
            )
        self._marks = [token for token in tokenizer.all_special_tokens if token] if self._has_template else []

    def build(self, drafts: Sequence[Draft], rewards: Sequence[str | None]) -> list[tuple[Prompt | Overlong, bool]]:
        """(prompt, or why it is not used; whether it was truncated) for every draft. ValueError with `overlong_prompts: error`."""
        rendered = [self.render(draft.content) for draft in drafts]
        ids = self._encode(rendered)
        return [self._finish(draft, text, tokens, reward) for draft, (text, _), tokens, reward in zip(drafts, rendered, ids, rewards, strict=True)]

    def render(self, content: str | Messages) -> tuple[str, bool]:
        """(the text that is tokenised, whether it holds its special tokens already)."""
        system = self._config.system_prompt
        if not self._templated(content):
            text = plain_text(content)
            starts_with_system = isinstance(content, list) and content[0]["role"] == "system"
            return (f"{system}\n\n{text}" if system and not starts_with_system else text), False
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if system and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        prefilled = messages[-1]["role"] == "assistant"
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
                **self._config.apply_chat_template_kwargs,
            )
        except Exception as error:  # templates raise whatever they like, e.g. for a system message they do not know
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"the chat template refuses a conversation of {roles}: {type(error).__name__}: {error}") from error
        assert isinstance(text, str)
        return text, True

    def _templated(self, content: str | Messages) -> bool:
        if self._config.apply_chat_template == "never" or not self._has_template:
            return False
        # Text that holds the tokenizer's special tokens was rendered before.
        return not (isinstance(content, str) and any(mark in content for mark in self._marks))

    def _encode(self, rendered: Sequence[tuple[str, bool]]) -> list[list[int]]:
        ids: list[list[int]] = [[] for _ in rendered]
        for complete in (True, False):
            chosen = [index for index, (_, is_complete) in enumerate(rendered) if is_complete is complete]
            if not chosen:
                continue
            # A template writes its own special tokens; adding them again would double BOS.
            encoded = self._tokenizer([rendered[index][0] for index in chosen], add_special_tokens=not complete, verbose=False)["input_ids"]
            for index, tokens in zip(chosen, encoded, strict=True):
                ids[index] = self._clean(list(tokens), rendered[index][0])
        return ids

    def _clean(self, tokens: list[int], text: str) -> list[int]:
        """One BOS at most, and no EOS that the tokenizer put after the prompt: nothing would be generated after it."""
        if self._bos is not None:
            while len(tokens) > 1 and tokens[0] == self._bos and tokens[1] == self._bos:
                tokens = tokens[1:]
        eos = self._tokenizer.eos_token
        if tokens and eos and tokens[-1] == self._tokenizer.eos_token_id and not text.rstrip().endswith(eos) and len(tokens) > 1:
            tokens = tokens[:-1]
        return tokens

    def _finish(self, draft: Draft, text: str, tokens: list[int], reward: str | None) -> tuple[Prompt | Overlong, bool]:
        limit = self._config.max_prompt_length
        truncated = False
        if len(tokens) > limit:
            if self._config.overlong_prompts == "error":
                raise ValueError(
                    f"a prompt of {draft.data_source} has {len(tokens)} tokens, data.max_prompt_length is {limit}; raise it, or set "
                    f"data.overlong_prompts to filter or truncate_left. It begins: {text[:200]!r}"
                )
            if self._config.overlong_prompts == "filter":
                return Overlong(len(tokens), text), False
            keep_bos = self._bos is not None and tokens[0] == self._bos and limit > 1
            tokens = [tokens[0], *tokens[-(limit - 1) :]] if keep_bos else tokens[-limit:]
            truncated = True
        if not tokens:
            return Overlong(0, text), False
        prompt = Prompt(
            prompt_id=prompt_id(draft),
            data_source=draft.data_source,
            token_ids=np.array(tokens, dtype=np.int32),
            text=text,
            messages=draft.content if isinstance(draft.content, list) else None,
            ground_truth=draft.ground_truth,
            extra_info=draft.extra_info,
            columns=draft.columns,
            reward=reward,
        )
        return prompt, truncated


def prompt_id(draft: Draft) -> str:
    """A name for a problem that depends on its content alone: the same in every run, and whatever the order of the files."""
    return _digest([draft.content, draft.ground_truth])


def question_id(draft: Draft) -> str:
    """The same for equal questions, whatever their answers: what must not be in two splits."""
    return _digest(draft.content)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
