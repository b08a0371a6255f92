"""Opens a source of rows: local files, folders and globs, the hub, and generated tasks."""

from __future__ import annotations

import difflib
import glob
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs.data import SourceConfig
from trainer.generators import arithmetic_source, reasoning_gym_source

Role = Literal["train", "validation"]
Row = dict[str, Any]
READERS = {
    ".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
PACKED = (".gz", ".zst", ".xz", ".bz2")
SPLITS: dict[Role, tuple[str, ...]] = {"train": ("train",), "validation": ("validation", "val", "valid", "test", "dev", "eval")}
HUB_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one source. Iterating again starts from the first row."""

    where: str  # for messages
    name: str  # data_source of rows that do not carry one
    rows: Iterable[Row]
    columns: tuple[str, ...]
    generated: bool = False


def open_source(source: SourceConfig, *, role: Role, seed: int, streaming: bool, taken: set[str], where: str) -> Rows:
    """Opens a source. ValueError, naming the remedy, when it is missing, unreadable, or empty.

    `taken`: questions that a generated source must not repeat; it adds its own.
    """
    if source.path.startswith("reasoning_gym:"):
        rows, columns = reasoning_gym_source(source, role=role, seed=seed, taken=taken, where=where)
        return Rows(where=where, name=source.name or "reasoning_gym/" + source.path.partition(":")[2], rows=rows, columns=columns, generated=True)
    if source.path.startswith("builtin:"):
        rows, columns = arithmetic_source(source, role=role, seed=seed, taken=taken, where=where)
        return Rows(where=where, name=source.name or source.path.partition(":")[2], rows=rows, columns=columns, generated=True)
    if source.size is not None or source.options:
        raise ValueError(f"{where}: size and options are for generated sources (reasoning_gym:NAME); use max_samples to take the first rows")
    path = Path(source.path).expanduser()
    if path.exists() or glob.has_magic(source.path) or _looks_local(source.path):
        rows_of_files = _open_local(source, path, role, streaming, where)
        return Rows(where=where, name=source.name or _stem(path), rows=rows_of_files, columns=_columns(rows_of_files, where))
    rows_of_hub = _open_hub(source, role, streaming, where)
    return Rows(where=where, name=source.name or source.path, rows=rows_of_hub, columns=_columns(rows_of_hub, where))


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or _suffix(Path(path)) in READERS or path.count("/") > 1


def _suffix(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _stem(path: Path) -> str:
    name = path.name
    for suffix in reversed(path.suffixes):
        if suffix.lower() in READERS or suffix.lower() in PACKED:
            name = name[: -len(suffix)]
    return (path.parent.name or "data") if glob.has_magic(name) else name


def _open_local(source: SourceConfig, path: Path, role: Role, streaming: bool, where: str) -> Any:
    if path.is_dir() and ((path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()):
        return _load_saved(source, path, role, streaming, where)
    files = _files(source, path, role, where)
    kinds = sorted({READERS.get(_suffix(file), _suffix(file) or "no suffix") for file in files})
    if len(kinds) > 1:
        raise ValueError(f"{where}: {source.path} holds files of several kinds ({', '.join(kinds)}); give a glob of one kind, such as '*.parquet'")
    if kinds[0] not in READERS.values():
        raise ValueError(f"{where}: {files[0]} has an unknown suffix; readable are {', '.join(READERS)}, also packed as {', '.join(PACKED)}")
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(f"{where}: {file} is empty")
    return _read(kinds[0], files, streaming, where)


def _files(source: SourceConfig, path: Path, role: Role, where: str) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _suffix(file) in READERS and not file.name.startswith("."))
        if not files:
            raise ValueError(f"{where}: the folder {path} holds no data file; readable are {', '.join(READERS)}")
        return _of_split(files, source.split, role, where)
    if glob.has_magic(source.path):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            raise ValueError(f"{where}: no file matches {source.path}")
        return files
    near = difflib.get_close_matches(path.name, [file.name for file in path.parent.iterdir()], n=1) if path.parent.is_dir() else []
    hint = f"; did you mean {path.parent / near[0]}?" if near else "" if path.parent.is_dir() else f"; the folder {path.parent} does not exist either"
    raise ValueError(f"{where}: the file {path} does not exist{hint}")


def _of_split(files: list[Path], split: str | None, role: Role, where: str) -> list[Path]:
    """The files of a split, where their names or folders tell splits apart; else all."""
    known = [name for names in SPLITS.values() for name in names]
    split_of = {file: next((name for name in known if name in _words(file)), None) for file in files}
    present = sorted({name for name in split_of.values() if name})
    if split is not None:
        chosen = [file for file in files if split in _words(file)]
        if not chosen:
            raise ValueError(f"{where}: no file belongs to split {split!r}; there are {', '.join(present) or 'no splits'} ({files[0].name}, ...)")
        return chosen
    if len(present) <= 1 and not (present and any(name is None for name in split_of.values())):
        return files
    wanted = next((name for name in SPLITS[role] if name in present), None)
    return [file for file in files if split_of[file] == wanted] if wanted else files


def _words(file: Path) -> list[str]:
    name = f"{file.parent.name}-{file.name}".lower()
    return "".join(char if char.isalnum() else " " for char in name).split()


def _read(kind: str, files: Sequence[Path], streaming: bool, where: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    names = [str(file) for file in files]
    extra: dict[str, Any] = {"sep": "\t"} if kind == "csv" and _suffix(files[0]) == ".tsv" else {}
    try:
        return datasets.load_dataset(kind, data_files={"train": names}, split="train", streaming=streaming, **extra)
    except Exception as error:  # the library raises many kinds for a malformed file
        if kind == "json":
            return _read_json(files, where)  # rows whose types differ, which Arrow refuses, are fine for us
        cause = error.__cause__ or error
        raise ValueError(f"{where}: {names[0]} cannot be read as {kind}: {type(cause).__name__}: {str(cause)[:300]}") from error


def _read_json(files: Sequence[Path], where: str) -> list[Row]:
    """JSON lines, or one JSON list, row by row. ValueError names the line that is at fault."""
    rows: list[Row] = []
    for file in files:
        if file.suffix.lower() in PACKED:
            raise ValueError(f"{where}: {file} cannot be read as JSON; unpack it to see which line is at fault")
        text = file.read_text(encoding="utf-8", errors="replace")
        if text.lstrip().startswith("["):
            try:
                items = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: {file} is not valid JSON: {error}") from error
        else:
            items = [_parse(line, f"{where}: line {number} of {file}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        for number, item in enumerate(items, 1):
            if not isinstance(item, dict):
                raise ValueError(f"{where}: row {number} of {file} is a {type(item).__name__}; an object with named columns is expected")
        rows += items
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [{key: row.get(key) for key in columns} for row in rows]


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error


def _load_saved(source: SourceConfig, path: Path, role: Role, streaming: bool, where: str) -> Any:
    """A folder written by `save_to_disk`; it is memory-mapped, streaming or not."""
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds for a damaged folder
        raise ValueError(f"{where}: {path} cannot be read as a saved data set: {type(error).__name__}: {error}") from error
    return _choose(loaded, source, role, where) if isinstance(loaded, datasets.DatasetDict) else loaded


def _choose(loaded: Any, source: SourceConfig, role: Role, where: str) -> Any:
    names = list(loaded)
    split = source.split or next((name for name in SPLITS[role] if name in names), names[0] if len(names) == 1 else None)
    if split not in names:
        raise ValueError(f"{where}: {source.path} has the splits {', '.join(names)}; set split to one of them")
    return loaded[split]


def _open_hub(source: SourceConfig, role: Role, streaming: bool, where: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(source.path, source.subset, split=source.split, streaming=streaming)
    except Exception as error:  # no network, no such name, no permission: each its own class
        raise ValueError(
            f"{where}: {source.path} is neither a file or folder here nor could it be loaded from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}); check the name, the network and split/subset, or download it "
            "and give its path"
        ) from error
    is_dict = isinstance(loaded, (datasets.DatasetDict, datasets.IterableDatasetDict))
    return _choose(loaded, source, role, where) if is_dict else loaded


def _columns(rows: Any, where: str) -> tuple[str, ...]:
    names = getattr(rows, "column_names", None)
    if names:
        return tuple(names)
    first = next(_iterate(rows), None)
    if first is None:
        raise ValueError(f"{where}: the data set is empty")
    return tuple(first)


def _iterate(rows: Iterable[Row]) -> Iterator[Row]:
    return iter(rows)
