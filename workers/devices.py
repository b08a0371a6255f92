"""Which process computes where. Pure functions on lists of device entries, but for `detect_devices`.

An entry is what may stand in CUDA_VISIBLE_DEVICES: an index ("3"), a UUID ("GPU-8f3e...", any unambiguous beginning of one) or a MIG
instance ("MIG-..."). The trainer keeps the environment it was started with; each child gets a CUDA_VISIBLE_DEVICES of its own, made of
the same entries, in the order [its own device, the trainer's device]: so a child always computes on `cuda:0`, and it sees the GPU whose
memory it opens through CUDA IPC. Indices in the configuration count within the visible list, as they do in torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from configs.schema import PlacementConfig

VARIABLE = "CUDA_VISIBLE_DEVICES"
CPU = "cpu"
CPU_ROLLOUT_WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDevice:
    """Where one process computes."""

    device: str  # for torch.device, in that process's own numbering: "cpu", "cuda:0"
    entry: str  # the same for people and across processes: "cpu", or the entry of the visible list
    env: dict[str, str] = field(default_factory=dict)  # to set before the process starts; empty for the trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAssignment:
    """Where the processes of a run compute."""

    trainer: ProcessDevice
    rollout: tuple[ProcessDevice, ...]  # one per rollout worker
    validation: ProcessDevice


def parse_visible(value: str) -> tuple[str, ...]:
    """The entries that CUDA takes from a value of CUDA_VISIBLE_DEVICES.

    As the CUDA driver reads it (CUDA C++ programming guide, "CUDA environment variables"): the list ends at the first entry that is
    invalid, -1 included; kinds cannot be mixed, the first entry decides; an index or UUID that occurs twice makes the whole list empty.
    """
    entries: list[str] = []
    kind: str | None = None
    for item in value.split(","):
        entry = item.strip()
        found = _kind(entry)
        if found is None or (kind is not None and found != kind):
            break
        kind = found
        entry = str(int(entry)) if kind == "index" else entry
        if entry in entries:
            return ()
        entries.append(entry)
    return tuple(entries)


def visible_devices(environment: Mapping[str, str], count: int) -> tuple[str, ...]:
    """The entries in torch's order, of which torch sees `count`. Without CUDA_VISIBLE_DEVICES these are "0", "1", ..."""
    value = environment.get(VARIABLE)
    entries = tuple(str(index) for index in range(count)) if value is None else parse_visible(value)
    return entries[:count]


def detect_devices() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(entries, UUIDs) of the GPUs that this process sees; both empty without any. Creates no CUDA context where there is none."""
    import torch

    count = torch.cuda.device_count()
    entries = visible_devices(os.environ, count)
    return entries, tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(len(entries)))


def planned_devices(placement: PlacementConfig, visible: Sequence[str] | None) -> tuple[str, ...]:
    """The devices to plan for: those there are, or as many as `placement.plan_gpus` says."""
    if placement.plan_gpus is None:
        return tuple(visible or ())
    return tuple(str(index) for index in range(placement.plan_gpus))


def assign_devices(placement: PlacementConfig, visible: Sequence[str] | None, uuids: Sequence[str] = ()) -> DeviceAssignment:
    """Turns `placement` into devices. `visible`: entries of the visible list, None or empty without GPUs; `uuids`: theirs, for
    configurations that name GPUs by UUID where the visible list has indices.

    `auto`: without GPUs everything is on the CPU. With one, everything shares it. With several the trainer takes the first one that the
    configuration gives to nobody else, validation sits on the trainer's device (it computes on the published slot itself, without
    a copy), and the rollout workers get the others, one each; `rollout_workers` spreads a different number of them over the same GPUs.

    ValueError, naming what exists, for a device that does not exist.
    """
    entries = tuple(visible or ())
    trainer_fixed = None if placement.trainer == "auto" else _find(placement.trainer, "placement.trainer", entries, uuids)
    validation_fixed = None if placement.validation == "auto" else _find(placement.validation, "placement.validation", entries, uuids)
    rollout_fixed: list[str] | None = None
    if placement.rollout != "auto":
        if not placement.rollout:
            raise ValueError("placement.rollout: at least one device is needed; use auto, or a list such as [cuda:0]")
        rollout_fixed = [_find(text, f"placement.rollout.{index}", entries, uuids) for index, text in enumerate(placement.rollout)]

    trainer = trainer_fixed
    if trainer is None:
        taken = {*(rollout_fixed or ()), validation_fixed}
        trainer = next((entry for entry in entries if entry not in taken), entries[0] if entries else CPU)
    validation = trainer if validation_fixed is None else validation_fixed
    rollout = rollout_fixed
    if rollout is None:
        rollout = _spread(placement.rollout_workers, _rollout_devices(entries, trainer, validation))
    return DeviceAssignment(
        trainer=ProcessDevice(device=CPU if trainer == CPU else f"cuda:{entries.index(trainer)}", entry=trainer),
        rollout=tuple(_child(entry, trainer) for entry in rollout),
        validation=_child(validation, trainer),
    )


def _rollout_devices(entries: Sequence[str], trainer: str, validation: str) -> list[str]:
    """The GPUs for automatic rollout workers: those that do nothing else; if there are none, all but the trainer's; if there is
    only the trainer's, that."""
    for busy in ({trainer, validation}, {trainer}, set()):
        free = [entry for entry in entries if entry not in busy]
        if free:
            return free
    return []


def _spread(workers: int | None, gpus: Sequence[str]) -> list[str]:
    """One device per worker: round the GPUs, or the CPU for all."""
    if not gpus:
        return [CPU] * (workers or CPU_ROLLOUT_WORKERS)
    return [gpus[index % len(gpus)] for index in range(workers or len(gpus))]


def _child(entry: str, trainer: str) -> ProcessDevice:
    seen = [item for item in dict.fromkeys((entry, trainer)) if item != CPU]
    if entry.startswith("MIG-"):
        # A process can use one MIG instance, and instances share no memory: weights then travel through the host.
        seen = [entry]
    return ProcessDevice(device=CPU if entry == CPU else "cuda:0", entry=entry, env={VARIABLE: ",".join(seen)})


def _find(text: str, key: str, entries: Sequence[str], uuids: Sequence[str]) -> str:
    """The entry of the visible list that a configured device means, or "cpu"."""
    wanted = text.strip()
    if wanted == CPU:
        return CPU
    kind, _, index = wanted.partition(":")
    if kind == "cuda" and (index.isdecimal() or wanted == "cuda"):
        number = int(index or 0)
        if number < len(entries):
            return entries[number]
        raise ValueError(f"{key}: {text!r} does not exist; {_existing(entries)}")
    if _kind(wanted) in ("GPU", "MIG"):
        matches = {entry for entry in entries if entry.startswith(wanted) or (_kind(entry) == "GPU" and wanted.startswith(entry))}
        bare = wanted.removeprefix("GPU-")
        matches |= {entry for entry, uuid in zip(entries, uuids, strict=False) if uuid.removeprefix("GPU-").startswith(bare)}
        if len(matches) == 1:
            return matches.pop()
        if matches:
            raise ValueError(f"{key}: {text!r} fits several GPUs ({', '.join(sorted(matches))}); write more of the UUID")
        known = f"; their UUIDs are {', '.join(uuids)}" if uuids else ""
        raise ValueError(f"{key}: no visible GPU has the UUID {text!r}; {_existing(entries)}{known}")
    raise ValueError(f"{key}: {text!r} is no device; write auto, cpu, cuda:<index> or a GPU's UUID; {_existing(entries)}")


def _existing(entries: Sequence[str]) -> str:
    if not entries:
        return "no GPU is visible, only cpu"
    named = ", ".join(f"cuda:{index}" if entry == str(index) else f"cuda:{index} ({entry})" for index, entry in enumerate(entries))
    return f"there are cpu, {named}"


def _kind(entry: str) -> str | None:
    """"index", "GPU" or "MIG"; None for what CUDA does not accept."""
    if entry.isascii() and entry.isdecimal():
        return "index"
    prefix, dash, rest = entry.partition("-")
    return prefix if prefix in ("GPU", "MIG") and dash and rest else None
