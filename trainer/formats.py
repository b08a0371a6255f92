"""The shapes in which people keep prompts and answers, and how a row of each is read.

verl      prompt (messages), data_source, reward_model{ground_truth, style}, extra_info
dapo      the same with DAPO-Math-17k's data_source; or its flattened form (prompt, solution)
gsm8k     question, answer with the result after ####
messages  messages (or ShareGPT's conversations); a last assistant turn is the answer
trl       prompt (text or messages) and an answer column
text      a prompt_template over the columns, or one column of text, and an answer column
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal

from configs.data import SourceConfig

FormatName = Literal["verl", "trl", "messages", "dapo", "gsm8k", "text", "reasoning_gym"]
Messages = list[dict[str, Any]]
ANSWER_COLUMNS = (
    "ground_truth", "answer", "solution", "final_answer", "expected_answer", "gt_answer", "gold", "target", "label", "output", "completion", "response",
)  # fmt: skip
TEXT_COLUMNS = ("question", "problem", "instruction", "query", "input", "text")
MESSAGE_COLUMNS = ("messages", "conversations")
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How the rows of a source are read."""

    name: FormatName
    prompt_key: str | None  # dotted; None: a template makes the prompt
    answer_key: str | None = None  # dotted; None: rows have no answer of their own
    template: str | None = None
    detected: bool = True  # False: set by hand


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A row as a prompt, before it is rendered and tokenised."""

    content: str | Messages
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)


class BadRow(Exception):
    """A row that cannot be used. `reason` is counted in the report."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """A column by its dotted name; None when any level is missing or null."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def detect_format(source: SourceConfig, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], where: str) -> Format:
    """The format of a source from its configuration, columns and first rows. ValueError lists the columns that exist."""
    name = _name(source, columns, rows)
    if name is None:
        raise ValueError(
            f"{where}: the format is not recognised; it has the columns {_listing(columns)}. "
            "Set prompt_key and answer_key, or format: text with a prompt_template such as '{question}'"
        )
    prompt_key, answer_key = source.prompt_key, source.answer_key
    if name in ("verl", "dapo"):
        prompt_key = prompt_key or "prompt"
        answer_key = answer_key or ("reward_model.ground_truth" if "reward_model" in columns else _first(ANSWER_COLUMNS, columns))
    elif name == "gsm8k":
        prompt_key, answer_key = prompt_key or "question", answer_key or "answer"
    elif name == "messages":
        prompt_key = prompt_key or _first(MESSAGE_COLUMNS, columns) or "messages"
        answer_key = answer_key or _first(ANSWER_COLUMNS, columns)
    elif name == "trl":
        prompt_key = prompt_key or "prompt"
        answer_key = answer_key or _first(ANSWER_COLUMNS, columns)
    elif name == "text":
        prompt_key = prompt_key or (None if source.prompt_template else _first(("prompt", *TEXT_COLUMNS), columns))
        answer_key = answer_key or _first([key for key in ANSWER_COLUMNS if key != prompt_key], columns)
        if prompt_key is None and source.prompt_template is None:
            raise ValueError(f"{where}: format text needs a prompt_key or a prompt_template; the columns are {_listing(columns)}")
    template = source.prompt_template
    if template is not None and source.prompt_key is not None:
        raise ValueError(f"{where}: prompt_key and prompt_template exclude each other; keep one")
    for setting, key in (("prompt_key", prompt_key), ("answer_key", answer_key)):
        if key is not None and not _exists(key, columns, rows):
            raise ValueError(f"{where}: there is no column {key!r} ({setting} of format {name}); it has the columns {_listing(columns)}")
    if template is not None:
        prompt_key = None
        unknown = [key for key in _template_keys(template, where) if key.split(".")[0].split("[")[0] not in columns]
        if unknown:
            raise ValueError(f"{where}: prompt_template names {', '.join(unknown)}, which is not among the columns {_listing(columns)}")
    return Format(name=name, prompt_key=prompt_key, answer_key=answer_key, template=template, detected=source.format == "auto")


def _name(source: SourceConfig, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> FormatName | None:
    if source.format != "auto":
        return source.format
    if source.prompt_template is not None:
        return "text"
    first = rows[0] if rows else {}
    if "prompt" in columns and isinstance(first.get("reward_model"), Mapping):
        return "dapo" if "dapo" in str(first.get("data_source", "")) else "verl"
    if source.prompt_key is not None:
        value = lookup(first, source.prompt_key)
        return "messages" if source.prompt_key in MESSAGE_COLUMNS else "trl" if source.prompt_key == "prompt" or not isinstance(value, str) else "text"
    if _first(MESSAGE_COLUMNS, columns) is not None:
        return "messages"
    if "prompt" in columns:
        return "trl"
    if {"question", "answer"} <= set(columns) and any("####" in str(row.get("answer")) for row in rows):
        return "gsm8k"
    return "text" if _first(TEXT_COLUMNS, columns) is not None else None


def read_row(how: Format, row: Mapping[str, Any], data_source: str) -> Draft:
    """One row as a Draft. BadRow when it has no prompt, no answer although its source has them, or a content that is not text."""
    content: Any
    if how.template is not None:
        content = _fill(how.template, row)
    else:
        assert how.prompt_key is not None
        content = lookup(row, how.prompt_key)
    answer = lookup(row, how.answer_key) if how.answer_key is not None else None
    if not isinstance(content, str) and content is not None:
        content = _messages(content)
        if how.name == "messages" and content and content[-1]["role"] == "assistant":
            last = content.pop()
            answer = _text(last["content"]) if how.answer_key is None else answer
            # A conversation that is all answer has no prompt.
            if not any(message["role"] == "user" for message in content):
                raise BadRow("missing_prompt")
    if content is None or not (content.strip() if isinstance(content, str) else any(_text(message["content"]).strip() for message in content)):
        raise BadRow("missing_prompt")
    if how.name == "gsm8k" and isinstance(answer, str) and "####" in answer:
        answer = answer.rpartition("####")[2].strip().replace(",", "")
    if isinstance(answer, list) and answer and isinstance(answer[0], Mapping) and "content" in answer[0]:
        answer = _text(answer[-1].get("content"))  # TRL's conversational `completion`
    expected = how.answer_key is not None or how.name == "messages"
    if expected and (answer is None or answer == [] or (isinstance(answer, str) and not answer.strip())):
        raise BadRow("missing_answer")
    given = row.get("data_source")
    extra = row.get("extra_info")
    skip = {how.prompt_key, "extra_info", "data_source"}
    return Draft(
        content=content,
        ground_truth=answer,
        data_source=given if isinstance(given, str) and given else data_source,
        extra_info=dict(extra) if isinstance(extra, Mapping) else {},
        columns={name: value for name, value in row.items() if name not in skip},
    )


def _messages(value: Any) -> Messages:
    """Messages with role and content, from OpenAI's or ShareGPT's form. BadRow when they are neither, or hold anything but text."""
    if not isinstance(value, (list, tuple)):
        raise BadRow("malformed_messages")
    messages: Messages = []
    for item in value:
        if not isinstance(item, Mapping):
            raise BadRow("malformed_messages")
        if "role" in item:
            message = {key: entry for key, entry in item.items() if entry is not None}  # Arrow fills absent keys with null
            message.setdefault("content", "")
        elif "from" in item and item.get("from") in SHAREGPT_ROLES:
            message = {"role": SHAREGPT_ROLES[item["from"]], "content": item.get("value") or ""}
        else:
            raise BadRow("malformed_messages")
        _text(message["content"])
        messages.append(message)
    return messages


def _text(content: Any) -> str:
    """The text of a message's content, which may be a list of parts. BadRow for images and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    raise BadRow("not_text")


def plain_text(content: str | Messages) -> str:
    """The contents of a conversation in order, separated by blank lines: what a model without a chat template sees."""
    if isinstance(content, str):
        return content
    return "\n\n".join(text for message in content if (text := _text(message["content"]).strip()))


def _template_keys(template: str, where: str) -> list[str]:
    try:
        keys = [key for _, key, _, _ in Formatter().parse(template) if key is not None]
    except ValueError as error:
        raise ValueError(f"{where}: prompt_template is not a format string: {error}; a literal brace is written twice") from error
    if not keys or "" in keys or any(key.isdigit() for key in keys):
        raise ValueError(f"{where}: prompt_template must name columns, as in '{{question}}'")
    return keys


def _fill(template: str, row: Mapping[str, Any]) -> str | None:
    keys = [key.split(".")[0].split("[")[0] for _, key, _, _ in Formatter().parse(template) if key]
    if any(row.get(key) is None for key in keys):
        raise BadRow("missing_prompt")
    try:
        return template.format(**row)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        raise BadRow("template_failed") from error


def _first(candidates: Sequence[str], columns: Sequence[str]) -> str | None:
    return next((name for name in candidates if name in columns), None)


def _exists(key: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> bool:
    if key in columns:
        return True
    head, dot, _ = key.partition(".")
    # A nested column counts as missing only when no row looked at has it, not even as null.
    return bool(dot) and head in columns and (not rows or any(_has(row, key) for row in rows) or all(row.get(head) is None for row in rows))


def _has(row: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(row, Mapping) or part not in row:
            return False
        row = row[part]
    return True


def _listing(columns: Sequence[str]) -> str:
    return ", ".join(columns) or "(none)"
