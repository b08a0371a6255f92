"""Where metrics go: metrics.jsonl always readable while the run lasts, TensorBoard and Weights & Biases when asked for.

Every result is logged against what it belongs to: training against its step, a validation against its own policy version. A
result that arrives late is therefore never out of order, and no sink drops it.

A sink that fails (a full disk, a lost connection) does not stop the training: the failure is counted, said once when it happens and
again at the end. metrics.jsonl goes on trying, so that it recovers when the disk does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from configs.schema import Config
from workers.messages import Generation

Kind = Literal["train", "validation"]
OnError = Callable[[str], None]


class Sink(Protocol):
    """One destination. Methods may raise anything; `Sinks` turns it into a counted failure."""

    name: str

    def log(self, kind: Kind, step: int, policy_version: int, time_s: float, metrics: Mapping[str, float], extra: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def finite(value: Any) -> Any:
    """The value as standard JSON can hold it: non-finite numbers become None, also inside lists and mappings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if hasattr(value, "item") and not hasattr(value, "__len__"):  # numpy and torch scalars
        return finite(value.item())
    return value


class JsonLines:
    """Appends one JSON object a line, complete or not at all as far as the reader is concerned.

    Unbuffered: a line is in the file when `write` returns, and a crash loses nothing that was logged.
    """

    def __init__(self, path: Path, *, limit_bytes: int | None = None) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self._file = open(path, "ab", buffering=0)
        self.bytes = os.fstat(self._file.fileno()).st_size
        self._torn = self.bytes > 0 and path.read_bytes()[-1:] != b"\n"

    def write(self, row: Mapping[str, Any]) -> bool:
        """Appends the row. False when the size limit leaves no room for it. OSError when the disk does not."""
        line = json.dumps(finite(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if self.limit_bytes is not None and self.bytes + len(line) > self.limit_bytes:
            return False
        if self._torn:  # an earlier write stopped in the middle of a line: it must not spoil this one
            line = b"\n" + line
        view = memoryview(line)
        while view:
            self._torn = True
            written = self._file.write(view)
            assert written is not None
            self.bytes += written
            view = view[written:]
        self._torn = False
        return True

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The complete objects of a file; half-written lines are left out. Empty when there is no file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


class JsonlSink:
    """metrics.jsonl: {"kind", "step", "policy_version", "time_s", further entries, metric names}."""

    name = "jsonl"

    def __init__(self, run_dir: Path) -> None:
        self._lines = JsonLines(run_dir / "metrics.jsonl")

    def log(self, kind: Kind, step: int, policy_version: int, time_s: float, metrics: Mapping[str, float], extra: Mapping[str, Any]) -> None:
        self._lines.write({"kind": kind, "step": step, "policy_version": policy_version, "time_s": round(time_s, 4), **extra, **metrics})

    def close(self) -> None:
        self._lines.close()


class TensorBoardSink:
    """Scalars under tensorboard/: training against the step, validation against its policy version."""

    name = "tensorboard"

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # heavy, and only installed with the extra

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, kind: Kind, step: int, policy_version: int, time_s: float, metrics: Mapping[str, float], extra: Mapping[str, Any]) -> None:
        at = step if kind == "train" else policy_version
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, at)
        if kind == "validation":
            self._writer.flush()  # rare and awaited by people

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run. Both axes are metrics of their own; its internal step, which must never go back, is left alone."""

    name = "wandb"

    def __init__(self, run_dir: Path, config: Config) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "tandem")
        self._run = wandb.init(project=project, name=f"{config.run.name}-{run_dir.name}", dir=str(run_dir), config=config.model_dump(mode="json"))
        self._run.define_metric("step")
        self._run.define_metric("policy_version")
        self._run.define_metric("*", step_metric="step")
        for prefix in ("val-core", "val-aux", "validation"):
            self._run.define_metric(f"{prefix}/*", step_metric="policy_version")

    def log(self, kind: Kind, step: int, policy_version: int, time_s: float, metrics: Mapping[str, float], extra: Mapping[str, Any]) -> None:
        axes = {"step": step, "policy_version": policy_version} if kind == "train" else {"policy_version": policy_version, "validation/step": step}
        self._run.log({**axes, "time_s": time_s, **metrics})

    def close(self) -> None:
        self._run.finish()


PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb"}


def check_sinks(config: Config, *, installed: Callable[[str], bool] = lambda package: find_spec(package) is not None) -> None:
    """ValueError naming every sink whose package is missing, before anything starts."""
    missing = [sink for sink in config.logging.sinks if sink in PACKAGES and not installed(PACKAGES[sink])]
    if missing:
        names = ", ".join(missing)
        extras = ",".join(missing)
        raise ValueError(
            f"logging.sinks: {names} needs a package that is not installed: pip install 'tandem[{extras}]' (from a checkout: pip install -e '.[{extras}]'), "
            f"or remove it from logging.sinks"
        )


class Sinks:
    """All sinks of a run. `log` never raises for what a sink does; see `failures`."""

    def __init__(self, config: Config, run_dir: Path, *, on_error: OnError | None = None, sinks: Sequence[Sink] | None = None) -> None:
        """ValueError when a sink's package is missing. `sinks` replaces the configured ones; `on_error` hears of each sink's first failure."""
        if sinks is None:
            check_sinks(config)
            made: list[Sink] = [JsonlSink(run_dir)]  # always: the report and every tool of the project read it
            if "tensorboard" in config.logging.sinks:
                made.append(TensorBoardSink(run_dir))
            if "wandb" in config.logging.sinks:
                made.append(WandbSink(run_dir, config))
            sinks = made
        self._sinks = list(sinks)
        self._on_error = on_error
        self.failures: dict[str, int] = {}  # by sink
        self._first_failure: dict[str, str] = {}
        self.nonfinite = 0  # metric values written as null
        self._generations = JsonLines(run_dir / "generations.jsonl", limit_bytes=int(config.logging.generations_mb * 1e6))
        self._generations_full = False
        self._closed = False

    def log(self, kind: Kind, step: int, policy_version: int, time_s: float, metrics: Mapping[str, float], **extra: Any) -> None:
        """Writes one line. `time_s` counts from the start of the run; `extra` holds entries that are not metrics (reason, status, ...)."""
        values = {name: finite(value) for name, value in metrics.items()}
        self.nonfinite += sum(value is None for value in values.values())
        known = {name: value for name, value in values.items() if value is not None}
        for sink in self._sinks:
            shown = values if sink.name == "jsonl" else known
            self._guard(sink.name, sink.log, kind, step, policy_version, time_s, shown, extra)

    def generations(self, policy_version: int, step: int, rows: Sequence[Generation]) -> None:
        """Appends sample answers of one validation to generations.jsonl, until `logging.generations_mb` is reached."""
        for row in rows:
            if self._generations_full:
                return
            self._guard("generations", self._generation, policy_version, step, row)

    def _generation(self, policy_version: int, step: int, row: Generation) -> None:
        fields = {name: getattr(row, name) for name in row.__dataclass_fields__}
        if not self._generations.write({"policy_version": policy_version, "step": step, **fields}):
            self._generations_full = True
            self._generations.limit_bytes = None  # the closing line is the one exception to the limit
            self._generations.write({"truncated": True, "policy_version": policy_version, "reason": "logging.generations_mb is reached; later answers are not kept"})

    def _guard(self, name: str, action: Callable[..., None], *arguments: Any) -> None:
        """The boundary to code and disks that are not ours: a failure is counted and reported, training goes on."""
        try:
            action(*arguments)
        except Exception as error:
            self.failures[name] = self.failures.get(name, 0) + 1
            if name not in self._first_failure:
                self._first_failure[name] = f"{type(error).__name__}: {error}"
                if self._on_error is not None:
                    self._on_error(f"logging to {name} failed ({self._first_failure[name]}); training goes on, failures are counted")

    def close(self) -> list[str]:
        """Flushes and closes all; idempotent. Returns one sentence per sink that failed and one on non-finite values, for the end of the run."""
        if self._closed:
            return []
        self._closed = True
        for sink in self._sinks:
            self._guard(sink.name, sink.close)
        self._guard("generations", self._generations.close)
        notes = [f"logging to {name} failed {count} times, first with {self._first_failure[name]}" for name, count in self.failures.items()]
        if self.nonfinite:
            notes.append(f"{self.nonfinite} metric values were not finite and are null in metrics.jsonl")
        return notes
