"""Weights in transit: both ends.

The publisher (in the trainer) owns K flat slots, allocated once. A publication copies the parameters into a slot that nobody leases and
makes it visible with a version; what is sent to the workers is `(version, slot)`. A reader (in a worker) received the slots' handle when
its process started and sees named views into them.

Two things keep a reader from seeing half of one version and half of another. The lease table, which lives in the trainer alone, keeps
the publisher from writing into a slot that somebody reads: leases are taken before a version is announced and end when the reader answers
or has died. And each slot's header carries its version and a sequence number, which show a reader that the first was not respected.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workers import cuda_ipc
from workers.layout import WeightLayout, checksum
from workers.slots import EMPTY, HostSlots, TornReadError, check_capacity, free_host_memory

__all__ = ["TornReadError", "Transport", "WeightHandle", "WeightLayout", "WeightPublisher", "WeightReader", "check_capacity", "free_host_memory"]

Transport = Literal["auto", "cuda_ipc", "shared_memory"]
WAIT_S = 0.05  # longest single wait for a free slot, so that the caller looks at its peers often enough
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """What a process needs to read the weights. Goes through the arguments of a spawned process, any number of times."""

    layout: WeightLayout
    host: HostSlots  # headers, and the weights themselves unless they lie on a GPU
    cuda: cuda_ipc.CudaSlots | None = None

    def buffer(self, slot: int) -> Tensor:
        """uint8 [layout.nbytes], where the weights lie."""
        return self.host.tensor(slot) if self.cuda is None else self.cuda.tensor(slot)


class WeightPublisher:
    """Writes versions into slots and keeps the table of who reads which.

    `publish` is called from one thread; leases may be taken and released from any.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        slots: int,
        transport: Transport,
        device: torch.device,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocates slots laid out for `tensors` (their values are not published). `device` is the trainer's; `timeout_s` limits
        the wait for a free slot. ValueError when memory does not suffice or the transport is impossible here, with the remedy."""
        assert slots >= 2, "one slot to read and one to write are the least"
        self._layout = WeightLayout.from_tensors(tensors)
        self._device = device
        self._timeout_s = timeout_s
        self._clock = clock
        self._transport = choose_transport(transport, device)
        if self._transport == "cuda_ipc":
            handle = WeightHandle(self._layout, HostSlots(slots, 0), cuda_ipc.CudaSlots(slots, self._layout.nbytes, device))
        else:
            handle = WeightHandle(self._layout, HostSlots(slots, self._layout.nbytes))
        self._handle = handle
        self._views = [self._layout.views(handle.buffer(slot)) for slot in range(slots)]
        self._lock = threading.Lock()
        self._versions: list[int] = [EMPTY] * slots  # what each slot holds whole
        self._leases: list[set[str]] = [set() for _ in range(slots)]
        self._last = EMPTY

    @property
    def handle(self) -> WeightHandle:
        return self._handle

    @property
    def layout(self) -> WeightLayout:
        return self._layout

    @property
    def transport(self) -> str:
        """The one in use: `cuda_ipc` or `shared_memory`."""
        return self._transport

    @property
    def newest(self) -> tuple[int, int] | None:
        """(version, slot) of the newest version that is still whole, or None."""
        with self._lock:
            version = max(self._versions)
            return None if version == EMPTY else (version, self._versions.index(version))

    def publish(self, tensors: Mapping[str, Tensor], version: int, *, wait: Callable[[float], None]) -> int:
        """Copies `tensors` into a slot that nobody leases, marks it as `version`, and returns the slot, which has no lease yet.

        Consumes: releases, which `wait` brings about. Waits for: a free slot, by calling `wait(seconds)`, in which the caller handles
        messages and looks at its peers. Unblocked by: `release*`. Produces: one whole version. Ends: after the copy, or with
        TimeoutError naming the holders after `timeout_s`. ValueError when the tensors do not fit the layout; nothing is written then.
        """
        assert version > self._last, f"version {version} after {self._last}: versions only grow"
        self._layout.check(tensors)
        slot = self._wait_for_slot(version, wait)
        self._handle.host.begin(slot)
        views = self._views[slot]
        with torch.no_grad():
            for name, tensor in self._layout.sources(tensors):
                views[name].copy_(tensor)
        self._synchronize()
        self._handle.host.commit(slot, version)
        with self._lock:
            self._versions[slot] = version
            self._last = version
        return slot

    def lease(self, slot: int, holder: str, version: int) -> None:
        """`holder` may read the slot until the lease is released; a second lease of the same version changes nothing."""
        with self._lock:
            assert self._versions[slot] == version, f"slot {slot} holds version {self._versions[slot]}, not {version}"
            self._leases[slot].add(holder)

    def release(self, holder: str, version: int) -> None:
        """Ends all leases of `holder` on versions up to `version`."""
        self._end(holder, lambda held: held <= version)

    def release_exact(self, holder: str, version: int) -> None:
        """Ends the lease of `holder` on `version`, if there is one."""
        self._end(holder, lambda held: held == version)

    def release_all(self, holder: str) -> None:
        """Ends all leases of `holder`: its process has ended."""
        self._end(holder, lambda held: True)

    def leases(self) -> dict[int, tuple[str, ...]]:
        """Holders by slot, sorted; slots without a lease are left out."""
        with self._lock:
            return {slot: tuple(sorted(holders)) for slot, holders in enumerate(self._leases) if holders}

    def views(self, slot: int) -> dict[str, Tensor]:
        """The slot's tensors, for the trainer itself (to save a leased version). Not to be written to."""
        return dict(self._views[slot])

    def checksum(self, slot: int) -> str:
        """Of the slot's bytes; equal to every reader's for the same version."""
        return checksum(self._handle.buffer(slot))

    def close(self) -> None:
        """Gives the slots back. All readers must have ended: memory on a GPU dies with its owner. Idempotent."""
        self._views = []
        with self._lock:
            self._versions = [EMPTY] * len(self._versions)
        if self._handle.cuda is not None:
            self._handle.cuda.close()
        self._handle.host.close()

    def _end(self, holder: str, ends: Callable[[int], bool]) -> None:
        with self._lock:
            for slot, holders in enumerate(self._leases):
                if holder in holders and ends(self._versions[slot]):
                    holders.remove(holder)

    def _wait_for_slot(self, version: int, wait: Callable[[float], None]) -> int:
        deadline = self._clock() + self._timeout_s
        while (slot := self._take()) is None:
            left = deadline - self._clock()
            if left <= 0:
                held = "; ".join(f"slot {slot} (version {self._versions[slot]}): {', '.join(names)}" for slot, names in self.leases().items())
                raise TimeoutError(
                    f"version {version} found no free slot within weights.timeout_s = {self._timeout_s:g} s. Held: {held}. "
                    f"Raise weights.slots or weights.timeout_s, or look at why these workers do not answer"
                )
            wait(min(WAIT_S, left))
        return slot

    def _take(self) -> int | None:
        """The unleased slot with the oldest content, now empty; None when all are leased."""
        with self._lock:
            free = [slot for slot, holders in enumerate(self._leases) if not holders]
            if not free:
                return None
            slot = min(free, key=self._versions.__getitem__)
            self._versions[slot] = EMPTY
            return slot

    def _synchronize(self) -> None:
        """Waits until the GPU has done the copies."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class WeightReader:
    """A worker's end. Reads only slots that the trainer leased to it, which it knows from having been sent their version."""

    def __init__(self, handle: WeightHandle, device: torch.device) -> None:
        """`device` is the one that the worker computes on, in its own numbering."""
        self._handle = handle
        self._device = device
        self._views: dict[int, dict[str, Tensor]] = {}
        self._sequences: dict[int, int] = {}

    def views(self, slot: int, version: int) -> dict[str, Tensor]:
        """Named views into the slot, where it lies: on the trainer's GPU or on the host. TornReadError if it does not hold `version`.

        Valid as long as the lease. Copy out of them and call `verify`, or compute on them and call `verify` at the end.
        """
        held, sequence = self._handle.host.state(slot)
        if held != version:
            raise TornReadError(f"slot {slot} holds {_name(held)}, not version {version}: it was read without a lease")
        self._sequences[slot] = sequence
        if slot not in self._views:
            self._views[slot] = self._handle.layout.views(self._handle.buffer(slot))
        return dict(self._views[slot])

    def verify(self, slot: int, version: int) -> None:
        """Waits for this process's pending copies, then raises TornReadError if the slot was written to since `views`."""
        for device in {self._device, self._handle.buffer(slot).device}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        held, sequence = self._handle.host.state(slot)
        if held != version or sequence != self._sequences.get(slot, sequence):
            raise TornReadError(f"slot {slot} held version {version} and now holds {_name(held)}: it was overwritten while it was read")

    def checksum(self, slot: int) -> str:
        """Of the slot's bytes; equal to the publisher's for the same version."""
        return checksum(self._handle.buffer(slot))

    def close(self) -> None:
        """Lets go of the views. Idempotent."""
        self._views = {}


def choose_transport(transport: Transport, device: torch.device) -> Literal["cuda_ipc", "shared_memory"]:
    """What `transport` means for a trainer on `device`. `auto` falls back to host memory, with the reason in the log, where CUDA IPC
    does not work; `cuda_ipc` raises ValueError there."""
    if device.type != "cuda":
        if transport == "cuda_ipc":
            raise ValueError(f"weights.transport: cuda_ipc needs a trainer on a GPU, it is on {device}; set weights.transport: auto")
        return "shared_memory"
    if transport == "shared_memory":
        return "shared_memory"
    fault = cuda_ipc.probe(device)
    if fault is None:
        return "cuda_ipc"
    variable = cuda_ipc.expandable_segments()
    remedy = f"remove expandable_segments:True from {variable}" if variable else "set weights.transport: shared_memory"
    if transport == "cuda_ipc":
        raise ValueError(f"weights.transport: cuda_ipc does not work here: {fault}; {remedy}")
    _log.warning("weights travel through host memory, which is slower: CUDA IPC does not work here: %s; to change that, %s", fault,
                 remedy if variable else "see docs of your container or driver on CUDA IPC")
    return "shared_memory"


def _name(version: int) -> str:
    return "no whole version" if version == EMPTY else f"version {version}"
