"""Finds stop strings in a response while it grows, whatever the boundaries of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\ufffd"  # what a decoder prints for bytes that do not make a character yet


class StopStrings:
    """Watches one sequence. Decodes only the few tokens since the last complete character, so that a step costs the same at any length."""

    def __init__(self, stop: Sequence[str], tokenizer: Any) -> None:
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        self._keep = max(len(item) for item in self._stop) - 1
        self._context: list[int] = []  # tokens whose text is known; decoders print a token differently at the start of a text
        self._fresh: list[int] = []  # tokens whose text is not
        self._tail = ""

    def push(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        self._fresh.append(token)
        before = self._decode(self._context)
        after = self._decode(self._context + self._fresh)
        text = after[len(before) :]
        found = any(item in self._tail + text for item in self._stop)
        if text and not text.endswith(_REPLACEMENT):
            self._tail = (self._tail + text)[-self._keep :] if self._keep else ""
            self._context, self._fresh = self._fresh, []
        return found

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) if ids else ""
