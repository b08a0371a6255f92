"""Validation metrics: from scored answers to named numbers. Pure functions, no process, no model.

Names and meanings follow verl's `process_validation_metrics`: `val-core/<source>/<variable>/mean@n`, `best@n/mean`, `maj@n/mean`
for the variable that matters (`acc` where the reward reports one, else `reward`), `val-aux/...` for everything else. Beyond verl:
confidence intervals over problems, unbiased pass@k, and the share of truncated and unscored answers.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workers.messages import FinishReason, Trajectory

RESAMPLES = 1000  # of every bootstrap
CONFIDENCE = 0.95
SOLVED = 1.0  # pass@k counts a score of at least this as solved

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """One answer to one validation problem."""

    data_source: str
    prompt_id: str
    score: float | None  # None: the reward failed
    text: str = ""
    vote: str | None = None  # the extracted final answer, for maj@n; None: there is none
    response_length: int = 0  # tokens
    finish_reason: FinishReason = "stop"
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    reward_error: str | None = None

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory, *, data_source: str, prompt_id: str) -> ScoredAnswer:
        return cls(
            data_source=data_source,
            prompt_id=prompt_id,
            score=trajectory.reward,
            text=trajectory.text,
            vote=final_answer(trajectory.text),
            response_length=len(trajectory.token_ids),
            finish_reason=trajectory.finish_reason,
            reward_metrics=trajectory.reward_metrics,
            reward_error=trajectory.reward_error,
        )


_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARKED = re.compile(r"(?:####|(?:final answer|answer)\s*(?:is|:|=))\s*([^\n]+)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")


def final_answer(text: str) -> str | None:
    """The answer that a text ends in, normalised so that equal answers compare equal, or None.

    In this order: the last `\\boxed{}`, the last `<answer>`, the last `####` or `answer:`, a single short line as a whole, the last
    number. It only decides which answers of one problem agree with one another (maj@n); scores come from the reward.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return _normalise(boxed)
    for pattern in (_TAGGED, _MARKED):
        found = pattern.findall(text)
        if found:
            return _normalise(found[-1])
    stripped = text.strip()
    if stripped and "\n" not in stripped and len(stripped) <= 40:
        return _normalise(stripped)
    numbers = _NUMBER.findall(text)
    return _normalise(numbers[-1]) if numbers else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for position in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 7 : position]
    return None  # cut off in the middle


def _normalise(answer: str) -> str | None:
    plain = re.sub(r"\s+", " ", answer.strip().strip("$").strip().rstrip(".")).lower()
    if _NUMBER.fullmatch(plain):
        plain = plain.replace(",", "")
        if "/" not in plain:
            return f"{float(plain):.12g}"
    return plain or None


def validation_metrics(
    answers: Sequence[ScoredAnswer], *, n: int | None = None, pass_at: Sequence[int] = (), seed: int = 0
) -> tuple[float, dict[str, float]]:
    """(accuracy, metrics by name) of one measured policy version.

    Accuracy is the mean over all problems of the mean score of their answers; a problem none of whose answers was scored is left
    out, and NaN is returned when that leaves nothing. `n` is the planned number of answers per problem and gives `@n` its figure;
    None takes it from the answers, problem by problem. `pass_at` lists the k of pass@k; empty means the powers of two up to n, and
    k > n is left out. Equal arguments give equal results: resampling is seeded.
    """
    by_problem: dict[tuple[str, str], list[ScoredAnswer]] = defaultdict(list)
    for answer in answers:
        by_problem[answer.data_source, answer.prompt_id].append(answer)
    groups: dict[tuple[str, int], list[list[ScoredAnswer]]] = defaultdict(list)
    for (source, _), problem in by_problem.items():
        groups[source, n if n is not None else len(problem)].append(problem)
    metrics: dict[str, float] = {}
    for (source, count), problems in sorted(groups.items()):
        metrics.update(_source_metrics(source, count, problems, pass_at, seed))
    means = _problem_means([[item.score for item in problem] for problem in by_problem.values()])
    if not len(means):
        return float("nan"), metrics
    low, high = confidence_interval(means, seed=seed)
    accuracy = float(means.mean())
    metrics.update({"val-core/overall/accuracy/mean": accuracy, "val-core/overall/accuracy/ci_low": low, "val-core/overall/accuracy/ci_high": high})
    return accuracy, metrics


def _source_metrics(source: str, n: int, problems: Sequence[Sequence[ScoredAnswer]], pass_at: Sequence[int], seed: int) -> dict[str, float]:
    """The metrics of one data source whose problems were answered n times each."""
    flat = [item for problem in problems for item in problem]
    variables: dict[str, list[list[float | None]]] = {"reward": [[item.score for item in problem] for problem in problems]}
    for name in sorted({name for item in flat for name in item.reward_metrics} - {"reward"}):
        variables[name] = [[item.reward_metrics.get(name) for item in problem] for problem in problems]
    core = "acc" if "acc" in variables else "reward"
    metrics: dict[str, float] = {}
    for variable, values in variables.items():
        prefix = f"{'val-core' if variable == core else 'val-aux'}/{source}/{variable}"
        means = _problem_means(values)
        if not len(means):
            continue
        metrics[f"{prefix}/mean@{n}"] = float(means.mean())
        if variable == core or variable == "reward":
            low, high = confidence_interval(means, seed=seed)
            metrics[f"{prefix}/mean@{n}/ci_low"], metrics[f"{prefix}/mean@{n}/ci_high"] = low, high
            metrics.update(_repeated_metrics(source, variable, prefix, n, values, problems, pass_at, seed))
    lengths = np.array([item.response_length for item in flat], dtype=np.float64)
    metrics[f"val-aux/{source}/response_length/mean@{n}"] = float(lengths.mean())
    metrics[f"val-aux/{source}/response_length/max@{n}"] = float(lengths.max())
    metrics[f"val-aux/{source}/truncated/mean@{n}"] = _share(item.finish_reason == "length" for item in flat)
    metrics[f"val-aux/{source}/unscored/mean@{n}"] = _share(item.score is None for item in flat)
    metrics[f"val-aux/{source}/reward_error/mean@{n}"] = _share(item.reward_error is not None for item in flat)
    metrics[f"val-aux/{source}/problems@{n}"] = float(len(problems))
    return metrics


def _repeated_metrics(
    source: str,
    variable: str,
    prefix: str,
    n: int,
    values: Sequence[Sequence[float | None]],
    problems: Sequence[Sequence[ScoredAnswer]],
    pass_at: Sequence[int],
    seed: int,
) -> dict[str, float]:
    """Metrics that need several answers per problem: std, best, majority, pass@k."""
    metrics: dict[str, float] = {}
    scored = [np.array([value for value in row if value is not None], dtype=np.float64) for row in values]
    scored = [row for row in scored if len(row)]
    ks = sorted({k for k in pass_at if k <= n}) if pass_at else _powers_of_two(n)
    if n > 1:
        metrics[f"val-aux/{source}/{variable}/std@{n}"] = float(np.mean([row.std() for row in scored]))
        for k in _powers_of_two(n)[1:]:
            section = prefix if k == n else f"val-aux/{source}/{variable}"
            metrics[f"{section}/best@{k}/mean"] = float(np.mean([expected_best(row, k) for row in scored]))
        votes = [[item.vote for item in problem] for problem in problems]
        if any(vote is not None for row in votes for vote in row):
            rng = np.random.default_rng(seed)
            majority = [majority_value(row, vote, n, rng) for row, vote in zip(values, votes, strict=True) if any(v is not None for v in row)]
            metrics[f"{prefix}/maj@{n}/mean"] = float(np.mean(majority))
    if (n > 1 or pass_at) and all(((row <= 0) | (row >= SOLVED)).all() for row in scored):
        for k in ks:
            # A problem with fewer than k scored answers counts with those it has: leaving it out would favour the easy ones.
            metrics[f"{prefix}/pass@{k}"] = float(np.mean([pass_at_k(len(row), int((row >= SOLVED).sum()), min(k, len(row))) for row in scored]))
    return metrics


def _problem_means(values: Sequence[Sequence[float | None]]) -> Floats:
    """Mean of each problem over its answers that have the value; problems without any are left out."""
    rows = [[value for value in row if value is not None] for row in values]
    return np.array([sum(row) / len(row) for row in rows if row], dtype=np.float64)


def _share(flags: Iterable[bool]) -> float:
    marks = list(flags)
    return sum(marks) / len(marks)


def _powers_of_two(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n itself."""
    return [*(1 << power for power in range(n.bit_length()) if 1 << power < n), n]


def confidence_interval(means: Floats, *, seed: int, confidence: float = CONFIDENCE, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Percentile bootstrap over problems (Efron 1979): (low, high) of the mean of `means` [P].

    It collapses to a point when all problems have the same value; few problems that are all solved prove less than it says.
    """
    count = len(means)
    rng = np.random.default_rng(seed)
    chunk = max(1, 4_000_000 // count)  # bounds the memory of the index array to 32 MB
    sums = [means[rng.integers(0, count, (min(chunk, resamples - start), count))].mean(axis=1) for start in range(0, resamples, chunk)]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(sums), [tail, 1 - tail])
    return float(low), float(high)


def expected_best(scores: Floats, k: int) -> float:
    """Expected maximum of k draws with replacement from `scores`: the exact value of what verl estimates by resampling."""
    ordered = np.sort(scores)
    share = np.arange(len(ordered) + 1) / len(ordered)
    return float((ordered * np.diff(share**k)).sum())


def majority_value(scores: Sequence[float | None], votes: Sequence[str | None], k: int, rng: np.random.Generator) -> float:
    """Expected score of the majority answer among k draws with replacement, estimated by resampling.

    scores [m], votes [m]; at least one score is not None. An answer without a vote stands for itself; a tie goes to the answer drawn
    first; the majority answer's score is that of its first draw (verl's rule).
    """
    kept = [(score, vote if vote is not None else f"\0{index}") for index, (score, vote) in enumerate(zip(scores, votes, strict=True)) if score is not None]
    values = np.array([score for score, _ in kept], dtype=np.float64)
    names = sorted({vote for _, vote in kept})
    if (values == values[0]).all():
        return float(values[0])
    ids = np.array([names.index(vote) for _, vote in kept])
    draws = rng.integers(0, len(kept), (RESAMPLES, k))
    drawn = ids[draws]  # [resamples, k]
    counts = np.zeros((RESAMPLES, len(names)), dtype=np.int64)
    np.add.at(counts, (np.arange(RESAMPLES)[:, None], drawn), 1)
    support = np.take_along_axis(counts, drawn, axis=1)  # votes that each draw's answer received
    first = support.argmax(axis=1)  # the first draw whose answer has the most
    return float(values[draws[np.arange(RESAMPLES), first]].mean())


def pass_at_k(n: int, solved: int, k: int) -> float:
    """Unbiased probability that at least one of k answers is right, given `solved` of n (Chen et al. 2021, arXiv:2107.03374)."""
    assert 1 <= k <= n and 0 <= solved <= n, f"pass@{k} of {solved} in {n}"
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)
