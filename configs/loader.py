"""Reads a YAML file and `section.key=value` overrides into a Config; reports every fault at once, with its dotted path."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from configs.schema import Config


class ConfigError(ValueError):
    """The configuration has faults; the message lists all of them, one a line."""


class _Loader(yaml.SafeLoader):
    """YAML without its traps: a repeated key is a fault, `1e-6` is a number, only true/false are booleans."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, (str, int, float, bool, type(None))):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a name", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float", "tag:yaml.org,2002:int",
                                                                        "tag:yaml.org,2002:timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


def load_yaml(text: str, name: str = "<text>") -> Any:
    """Parses YAML. ConfigError names the place of a syntax fault."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader subclass
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {error}") from error


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` with `overrides` applied. ConfigError lists every fault."""
    file = Path(path)
    if not file.is_file():
        presets = sorted(str(preset) for preset in file.parent.glob("*.yaml")) if file.parent.is_dir() else []
        near = difflib.get_close_matches(str(file), presets, n=1)
        listing = f"; did you mean {near[0]}?" if near else (f"; there are {', '.join(presets)}" if presets else "")
        raise ConfigError(f"configuration file {file} does not exist{listing}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {file} cannot be read: {error}") from error
    return build_config(load_yaml(text, str(file)), overrides)


def build_config(tree: Any, overrides: Sequence[str] = ()) -> Config:
    """A Config from a nested mapping. ConfigError lists every fault of the mapping and of the overrides."""
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"a mapping of sections is expected at the top of the file, not {type(tree).__name__}")
    faults = [fault for override in overrides if (fault := _apply(tree, override))]
    config: Config | None = None
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        faults += [_describe(item) for item in error.errors()]
    if config is not None:
        faults += list(cross_faults(config))
    if faults:
        raise ConfigError("\n".join(faults))
    assert config is not None
    return config


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` reads it back to an equal Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def _apply(tree: dict[str, Any], override: str) -> str | None:
    """Sets one `a.b=value` in the tree; returns the fault, if any."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return f"override {override!r}: write section.key=value"
    try:
        value = load_yaml(text, f"override {path}")
    except ConfigError as error:
        return str(error)
    node: Any = tree
    for depth, key in enumerate(keys[:-1]):
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                return f"{'.'.join(keys[:depth])}: has {len(node)} entries, {key!r} is not one of them"
            node = node[int(key)]
            continue
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, (dict, list)):
            return f"{'.'.join(keys[: depth + 1])}: is a single value, {'.'.join(keys[depth + 1:])!r} cannot be set in it"
    last = keys[-1]
    if isinstance(node, list):
        if not last.isdigit() or int(last) >= len(node):
            return f"{'.'.join(keys[:-1])}: has {len(node)} entries, {last!r} is not one of them"
        node[int(last)] = value
    else:
        node[last] = value
    return None


def _section(path: Sequence[str | int]) -> type[BaseModel] | None:
    """The section class that a path leads to, for suggestions."""
    section: type[BaseModel] = Config
    for key in path:
        if isinstance(key, int):
            continue
        field = section.model_fields.get(key)
        if field is None:
            return None
        candidates = [field.annotation, *get_args(field.annotation)]
        inner = next((item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel)), None)
        if inner is None:
            return None
        section = inner
    return section


def _all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        for item in [field.annotation, *get_args(field.annotation)]:
            if isinstance(item, type) and issubclass(item, BaseModel):
                yield from _all_keys(item, f"{prefix}{name}.")


def _describe(item: Any) -> str:
    location = [part for part in item["loc"] if not (isinstance(part, str) and ("[" in part or part in ("str", "list")))]
    path = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        section, key = _section(location[:-1]), str(location[-1])
        siblings = list(section.model_fields) if section else []
        near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
        if near:
            return f"{path}: unknown key, did you mean {'.'.join([*map(str, location[:-1]), near[0]])}?"
        elsewhere = [full for full in _all_keys(Config) if full.split(".")[-1] == key]
        if elsewhere:
            return f"{path}: unknown key, did you mean {elsewhere[0]}?"
        return f"{path}: unknown key; {'.'.join(map(str, location[:-1])) or 'the top level'} has {', '.join(siblings)}"
    given = item.get("input")
    shown = f" (given: {given!r})" if isinstance(given, (str, int, float, bool)) or given is None else ""
    return f"{path}: {item['msg'][0].lower() + item['msg'][1:]}{shown}"


def cross_faults(config: Config) -> Iterator[str]:
    """Faults that only several keys together make."""
    trainer, rollout, asynchronous = config.trainer, config.rollout, config.async_training
    lengths = {
        "trainer.total_training_steps": trainer.total_training_steps,
        "trainer.total_epochs": trainer.total_epochs,
        "rollout.total_rollout_steps": rollout.total_rollout_steps,
    }
    given = [name for name, value in lengths.items() if value is not None]
    if len(given) != 1:
        found = f"{' and '.join(given)} are given" if given else "none is given"
        yield f"the length of the run: exactly one of {', '.join(lengths)} is needed, {found}"
    per_step = trainer.ppo_mini_batch_size * asynchronous.require_batches
    if rollout.total_rollout_steps is not None and rollout.total_rollout_steps < per_step:
        yield (f"rollout.total_rollout_steps: {rollout.total_rollout_steps} groups are less than one training step "
               f"(ppo_mini_batch_size {trainer.ppo_mini_batch_size} x require_batches {asynchronous.require_batches} = {per_step})")
    simulated = config.model.path == "simulated"
    if not config.data.train_files and not simulated:
        yield "data.train_files: at least one source is needed (builtin:arithmetic needs no file)"
    if config.data.val_files and config.data.val_fraction:
        yield "data.val_fraction: cannot be used together with data.val_files; remove one of them"
    engines = {"rollout.engine": rollout.engine}
    if config.validation.engine != "rollout":
        engines["validation.engine"] = config.validation.engine
    for name, engine in engines.items():
        if (engine == "simulated") != simulated:
            yield f"{name}: {engine!r} and model.path {config.model.path!r} do not fit; 'simulated' must stand in both or in none"
    if config.algorithm.adv_estimator in ("grpo", "rloo", "dr_grpo", "reinforce_plus_plus_baseline") and rollout.n < 2:
        yield f"rollout.n: {config.algorithm.adv_estimator} compares the answers of a group, so at least 2 are needed (given: {rollout.n})"
    if rollout.slots < rollout.n:
        yield f"rollout.slots: {rollout.slots} is less than rollout.n = {rollout.n}; a group must fit at once"
    if config.run.inline and isinstance(config.placement.rollout, list) and len(config.placement.rollout) > 1:
        yield "run.inline: one process has one rollout device; shorten placement.rollout"
    if config.run.inline and "sglang" in engines.values():
        yield "run.inline: SGLang needs a process of its own; set rollout.engine: transformers or run.inline: false"
    stop = config.validation.early_stop
    if (stop.threshold is not None or stop.patience is not None) and trainer.test_freq == 0:
        yield "validation.early_stop: nothing is validated between first and last; set trainer.test_freq"
    if config.validation.temperature == 0 and config.validation.n > 1:
        yield f"validation.n: {config.validation.n} greedy answers to a problem are all equal; set validation.temperature or n: 1"
