"""Sources that make their rows: the quickstart's arithmetic, and the tasks of reasoning-gym."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.util
from typing import Any, Literal

from configs.data import SourceConfig

DEFAULT_SIZE = {"train": 1000, "validation": 100}
Role = Literal["train", "validation"]


def arithmetic_source(source: SourceConfig, *, role: Role, seed: int, taken: set[str], where: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The quickstart's task. Training and validation are disjoint by construction."""
    if source.path != "builtin:arithmetic":
        raise ValueError(f"{where}: {source.path!r} is unknown; the one built-in task is builtin:arithmetic")
    if source.options:
        raise ValueError(f"{where}: builtin:arithmetic takes no options")
    from trainer.tiny import arithmetic_rows

    rows = arithmetic_rows(role, source.size or DEFAULT_SIZE[role], seed)
    rows = [row for row in rows if row["prompt"] not in taken]
    taken.update(row["prompt"] for row in rows)
    return rows, ("prompt", "answer")


def reasoning_gym_source(source: SourceConfig, *, role: Role, seed: int, taken: set[str], where: str) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """`size` different problems of a task, none of which is in `taken`. ValueError when the task has not so many.

    The whole entry travels in extra_info, because the task's own scorer needs it.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(f'{where}: reasoning_gym tasks need the package reasoning_gym, which is not installed; run: pip install "tandem[gym]"')
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task = source.path.partition(":")[2]
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        raise ValueError(f"{where}: reasoning_gym has no task {task!r}" + (f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(DATASETS)}"))
    size = source.size or DEFAULT_SIZE[role]
    tries = 10 * size + 1000
    options = dict(source.options)
    known = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{where}: reasoning_gym's {task} has no option {', '.join(unknown)}; it has {', '.join(known)} (seed and size come from the run)")
    try:
        # A seed of its own for each role: the same seed would repeat the same problems in the same order.
        data = reasoning_gym.create_dataset(task, seed=_seed(seed, task, role), size=tries, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: reasoning_gym's {task} refuses the options {options}: {error}") from error
    rows: list[dict[str, Any]] = []
    for index in range(tries):
        entry = data[index]
        question = entry["question"]
        if question in taken:
            continue
        taken.add(question)
        extra = {"reasoning_gym": {"task": task, "options": options, "entry": entry}}
        rows.append({"question": question, "answer": entry["answer"], "extra_info": extra})
        if len(rows) == size:
            return rows, ("question", "answer", "extra_info")
    raise ValueError(
        f"{where}: reasoning_gym's {task} gave only {len(rows)} further different problems in {tries} tries, {size} are wanted; lower size, or widen options"
    )


def _seed(seed: int, task: str, role: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}|{task}|{role}".encode(), digest_size=4).digest(), "little")
