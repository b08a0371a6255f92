"""From a reward's name to something that scores answers, whatever signature its function has."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from workers.rewards.answer import Answer, Outcome, RewardFault, to_outcome
from workers.rewards.builtin import check_builtin, is_custom

MAX_MESSAGE = 2000  # characters of an exception's text that are kept
Style = Literal["builtin", "verl", "trl"]
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded reward. `verl` and built-in functions take one answer a call, `trl` functions the whole group."""

    spec: str
    style: Style
    function: Callable[..., Any]
    accepts: frozenset[str] | None  # argument names; None: any
    kwargs: Mapping[str, Any]
    needs_ground_truth: bool = False

    @property
    def batched(self) -> bool:
        return self.style == "trl"

    def score(self, answers: Sequence[Answer]) -> list[Outcome]:
        """One outcome for every answer. What the function raises becomes an outcome with an error; nothing is raised."""
        if self.batched:
            return self._score_batch(answers)
        return [self._score_one(answer) for answer in answers]

    def _score_one(self, answer: Answer) -> Outcome:
        try:
            if self.needs_ground_truth and answer.ground_truth in (None, "", []):
                raise RewardFault("missing", f"the prompt has no ground truth, which {self.spec} compares with")
            if self.style == "builtin":
                return to_outcome(self.function(answer, **self.kwargs))
            arguments = {
                "data_source": answer.data_source,
                "solution_str": answer.text,
                "ground_truth": answer.ground_truth,
                "extra_info": answer.extra_info,
            }
            return to_outcome(self._call(arguments))
        except BaseException as error:  # the boundary to foreign code: SystemExit and KeyboardInterrupt are its failures, too
            return failed(error)

    def _score_batch(self, answers: Sequence[Answer]) -> list[Outcome]:
        metrics: list[dict[str, float]] = [{} for _ in answers]

        def log_metric(name: str, value: float) -> None:
            for entry in metrics:
                entry[str(name)] = float(value)

        def log_extra(name: str, values: Sequence[Any]) -> None:
            for entry, value in zip(metrics, values, strict=False):
                if isinstance(value, (bool, int, float)):
                    entry[str(name)] = float(value)

        try:
            names = list(dict.fromkeys(name for answer in answers for name in answer.columns))
            arguments: dict[str, Any] = {
                "data_source": [answer.data_source for answer in answers],
                "ground_truth": [answer.ground_truth for answer in answers],
                "extra_info": [answer.extra_info for answer in answers],
                **{name: [answer.columns.get(name) for answer in answers] for name in names},
                "prompts": [answer.prompt_text if answer.messages is None else answer.messages for answer in answers],
                "completions": [
                    answer.text if answer.messages is None else [{"role": "assistant", "content": answer.text}] for answer in answers
                ],
                "completion_ids": [list(answer.token_ids) for answer in answers],
                "trainer_state": None,
                "log_extra": log_extra,
                "log_metric": log_metric,
            }
            result = self._call(arguments)
            if hasattr(result, "tolist"):
                result = result.tolist()
            if not isinstance(result, (list, tuple)) or len(result) != len(answers):
                shown = f"{len(result)} scores" if isinstance(result, (list, tuple)) else type(result).__name__
                raise RewardFault("value", f"the reward returned {shown} for {len(answers)} completions; a list with one score each is expected")
        except BaseException as error:  # the boundary to foreign code, as above
            return [failed(error)] * len(answers)
        outcomes = []
        for item, extra in zip(result, metrics, strict=True):
            try:
                outcome = to_outcome(item)
                outcomes.append(Outcome(outcome.value, {**outcome.metrics, **extra}))
            except RewardFault as fault:
                outcomes.append(failed(fault))
        return outcomes

    def _call(self, arguments: dict[str, Any]) -> Any:
        arguments |= self.kwargs
        if self.accepts is not None:
            arguments = {name: value for name, value in arguments.items() if name in self.accepts}
        result = self.function(**arguments)
        return _runner().run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


@functools.cache
def _runner() -> asyncio.Runner:
    # One event loop for all calls, so that what an async reward keeps open (an HTTP client) stays usable.
    return asyncio.Runner()


def failed(error: BaseException) -> Outcome:
    """The outcome of a call that raised."""
    if isinstance(error, RewardFault):
        return Outcome(None, {}, f"{error.kind}: {error.message[:MAX_MESSAGE]}")
    if isinstance(error, MemoryError):
        return Outcome(None, {}, "memory: the reward needs more memory than reward.max_memory_gb allows")
    return Outcome(None, {}, f"exception: {type(error).__name__}: {str(error)[:MAX_MESSAGE]}{_place(error)}")


def _place(error: BaseException) -> str:
    """Where the exception was raised, in a few characters."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace is not None else ""


def load_reward(spec: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """Imports a reward: a built-in name, `file.py:name`, or `package.module:name`. ValueError says what is wrong and how to mend it."""
    if not is_custom(spec):
        builtin = check_builtin(spec)
        function = getattr(importlib.import_module(builtin.module), spec)
        _check_kwargs(spec, function, kwargs)
        return RewardFunction(spec, "builtin", function, None, dict(kwargs), builtin.ground_truth)
    source, _, name = spec.rpartition(":")
    module = _import(spec, source)
    function: Any = module
    for part in name.split("."):
        if not hasattr(function, part):
            own = [value for value in vars(module).values() if callable(value) and getattr(value, "__module__", None) == module.__name__]
            there = [getattr(value, "__name__", "?") for value in own]
            raise ValueError(f"reward {spec!r}: {source} has no {name!r}; it defines {', '.join(there) or 'no function'}")
        function = getattr(function, part)
    if inspect.isclass(function):
        function = function()
    if not callable(function):
        raise ValueError(f"reward {spec!r}: {name!r} is a {type(function).__name__}, not a function")
    style, accepts = detect_style(spec, function)
    if accepts is not None and (unknown := set(kwargs) - accepts):
        raise ValueError(f"reward {spec!r}: reward.kwargs gives {', '.join(sorted(unknown))}, which the function does not take")
    return RewardFunction(spec, style, function, accepts, dict(kwargs))


def detect_style(spec: str, function: Callable[..., Any]) -> tuple[Style, frozenset[str] | None]:
    """Which signature a function has, by its argument names, and which names it takes (None: any)."""
    parameters = inspect.signature(function).parameters.values()
    names = [item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    accepts = None if any(item.kind is item.VAR_KEYWORD for item in parameters) else frozenset(names)
    if "completions" in names:
        return "trl", accepts
    if "solution_str" in names:
        return "verl", accepts
    raise ValueError(
        f"reward {spec!r} takes ({', '.join(names) or 'nothing by name'}); write it as compute_score({', '.join(VERL_ARGUMENTS)}) for one answer, "
        "or as reward(prompts, completions, **columns) for a list of them"
    )


def _check_kwargs(spec: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = [item.name for item in parameters]
    if unknown := [name for name in kwargs if name not in names]:
        raise ValueError(f"reward.kwargs: {spec!r} takes no {', '.join(map(repr, unknown))}; it takes {', '.join(names) or 'none'}")
    if missing := [item.name for item in parameters if item.default is item.empty and item.name not in kwargs]:
        raise ValueError(f"reward.kwargs: {spec!r} needs {', '.join(missing)}")


def _import(spec: str, source: str) -> ModuleType:
    if not source.endswith(".py"):
        try:
            return importlib.import_module(source)
        except BaseException as error:  # foreign code may raise anything while it is imported
            raise ValueError(f"reward {spec!r}: module {source!r} cannot be imported: {type(error).__name__}: {error}") from error
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"reward {spec!r}: the file {path} does not exist")
    name = f"tandem_reward_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that the file can import its neighbours
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:  # foreign code may raise anything while it is imported
        del sys.modules[name]
        raise ValueError(f"reward {spec!r}: {path} cannot be imported: {type(error).__name__}: {error}{_place(error)}") from error
    return module
