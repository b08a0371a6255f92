"""What every benchmark shares: arguments, the machine's description, alternating measurement, a table, the JSON.

    from benchmarks.harness import Bench, alternate, median, print_table, spread, write_json

A benchmark is run as `python benchmarks/NAME.py [--quick] [--json FILE]`. It puts the repository's root on sys.path first (see the
first lines of any of them), because a script's own folder is what Python looks in.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

Direction = Literal[">=", "<="]
Target = tuple[float | None, float, Direction]  # value (None: not measured in this run), target, direction


@dataclass(frozen=True, slots=True)
class Bench:
    """The arguments of a run. `extra` holds what the benchmark's own `configure` added."""

    quick: bool
    json_path: Path | None
    extra: argparse.Namespace

    @classmethod
    def parse(
        cls,
        description: str,
        argv: Sequence[str] | None = None,
        *,
        configure: Callable[[argparse.ArgumentParser], None] | None = None,
    ) -> Bench:
        """Reads `[--quick] [--json FILE]` and whatever `configure(parser)` adds."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer rounds; done within a minute")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and targets to this file")
        if configure is not None:
            configure(parser)
        arguments = parser.parse_args(argv)
        return cls(quick=arguments.quick, json_path=arguments.json, extra=arguments)

    def rounds(self, full: int = 5, quick: int = 3) -> int:
        """How often each side is measured."""
        return quick if self.quick else full


def alternate(fns: Mapping[str, Callable[[], float]], rounds: int, *, warmup: int = 1) -> dict[str, list[float]]:
    """Calls all functions in turn, `rounds` times, and returns each one's values by name.

    Turns rather than blocks, so that a slow minute of the machine hits all sides alike; every second round goes backwards, so that
    none is always first. `warmup` rounds before that are not recorded.
    """
    values: dict[str, list[float]] = {name: [] for name in fns}
    for turn in range(-warmup, rounds):
        order = list(fns) if turn % 2 == 0 else list(reversed(fns))
        for name in order:
            value = fns[name]()
            if turn >= 0:
                values[name].append(value)
    return values


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """`min-max` with three significant digits."""
    return f"{min(values):.3g}-{max(values):.3g}"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    versions: dict[str, str] = {}
    for package in ("torch", "transformers", "trl", "sglang", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "versions": versions,
    }


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def print_table(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Prints rows of equal or different keys as one aligned table; columns in the order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    if title:
        print(f"\n{title}")
    for number, line in enumerate(cells):
        print("  ".join(text.ljust(width) if index == 0 else text.rjust(width) for index, (text, width) in enumerate(zip(line, widths, strict=True))))
        if number == 0:
            print("  ".join("-" * width for width in widths))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def judge(targets: Mapping[str, Target]) -> dict[str, dict[str, Any]]:
    """Each target's value, goal and whether it is met (a value of None is never met)."""
    return {
        name: {
            "value": value,
            "target": goal,
            "direction": direction,
            "met": value is not None and (value >= goal if direction == ">=" else value <= goal),
        }
        for name, (value, goal, direction) in targets.items()
    }


def write_json(path: Path | None, benchmark: str, rows: Sequence[Mapping[str, Any]], targets: Mapping[str, Target]) -> None:
    """Prints how the targets fared, and writes `{"benchmark", "machine", "rows", "targets"}` when a path is given."""
    judged = judge(targets)
    if judged:
        lines = [
            {
                "target": name,
                "value": "not measured" if item["value"] is None else float(item["value"]),
                "goal": f"{item['direction']} {item['target']:g}",
                "met": "yes" if item["met"] else "NO",
            }
            for name, item in judged.items()
        ]
        print_table(lines, "targets")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": benchmark, "machine": machine(), "rows": [dict(row) for row in rows], "targets": judged}
        path.write_text(json.dumps(content, indent=2) + "\n")
        print(f"\nwritten to {path}")
