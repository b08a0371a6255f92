"""Finding the final answer in a completion, and comparing it as text. Every pattern here takes linear time."""

from __future__ import annotations

import re
from typing import Any

# Digits with optional thousands separators, sign and exponent. The sign belongs to the number only where no operand precedes it.
NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<![\w.])-?\.\d+(?:[eE][-+]?\d+)?")
EXTRACTIONS = ("full", "last_line", "last_number", "boxed", "answer_line", "answer_tag")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` (or `\fbox`, or `\boxed 5`), braces balanced; None when there is none."""
    end = len(text)
    while True:
        start = max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))
        if start < 0:
            return None
        body = text[start + (6 if text.startswith("\\boxed", start) else 5) :]
        stripped = body.lstrip()
        if stripped.startswith("{"):
            content = _balanced(stripped)
            if content is not None:
                return content.strip()
        elif body[:1] == " " and stripped:
            return re.split(r"[\s$]", stripped, maxsplit=1)[0].rstrip(".,") or None
        end = start


def _balanced(text: str) -> str | None:
    """The content of the brace group that `text` starts with; None when it is never closed. Escaped braces are content."""
    depth = 0
    index = 0
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 2
            continue
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[1:index]
        index += 1
    return None


def answer_line(text: str) -> str | None:
    """What follows the last `Answer:` on its line; None when there is none or the line is empty."""
    found = None
    for match in re.finditer(r"(?i)answer[ \t]*:[ \t]*([^\n]*)", text):
        found = match.group(1).strip().strip("*").strip() or found
    return found


def tag_content(text: str, tag: str) -> str | None:
    """The content of the last closed `<tag>...</tag>`; None when none is closed."""
    close = text.rfind(f"</{tag}>")
    opening = text.rfind(f"<{tag}>", 0, close) if close >= 0 else -1
    return text[opening + len(tag) + 2 : close].strip() if opening >= 0 else None


def last_number(text: str) -> str | None:
    """The last number in the text, thousands separators removed; None when there is none."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def extract(text: str, how: str) -> str | None:
    """The part of a completion that counts as its answer; None when it has no such part."""
    match how:
        case "full":
            return text.strip()
        case "last_line":
            lines = text.strip().splitlines()
            return lines[-1].strip() if lines else ""
        case "last_number":
            return last_number(text)
        case "boxed":
            return last_boxed(text)
        case "answer_line":
            return answer_line(text)
        case "answer_tag":
            return tag_content(text, "answer")
        case _:
            raise ValueError(f"extract: {how!r} is unknown; choose one of {', '.join(EXTRACTIONS)}")


def as_texts(ground_truth: Any) -> list[str]:
    """The accepted answers as text: a list means that any of them is right."""
    if isinstance(ground_truth, (list, tuple, set)):
        return [as_text(item) for item in ground_truth if item is not None]
    return [as_text(ground_truth)]


def as_text(value: Any) -> str:
    """A value as people write it: 3.0 from a float column is "3"."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value).strip()
