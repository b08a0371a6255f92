"""`exact_match`: the answer equals the ground truth as text."""

from __future__ import annotations

from workers.rewards.answer import Answer
from workers.rewards.extraction import as_texts, extract


def exact_match(answer: Answer, *, extract_from: str = "full", ignore_case: bool = False, ignore_space: bool = False) -> float:
    """1 when the answer equals (one of) the ground truth, else 0. Space around both never counts.

    `extract_from`: which part of the completion is the answer (see extraction.EXTRACTIONS).
    """
    given = extract(answer.text, extract_from)
    if given is None:
        return 0.0

    def normal(text: str) -> str:
        text = text.casefold() if ignore_case else text
        return "".join(text.split()) if ignore_space else text.strip()

    return float(any(normal(given) == normal(gold) for gold in as_texts(answer.ground_truth)))
