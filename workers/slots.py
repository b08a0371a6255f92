"""The memory that weights travel in: K equal slots that several processes see, and a header that says what each one holds.

On the host: one anonymous file (memfd_create), mapped by everyone who received its descriptor. It has no name in any file system,
so it is gone when the last process that maps it is gone, however that process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor

EMPTY: Final = -1  # version of a slot that holds nothing whole
_HEADER_WORDS = 8  # int64 per slot: a cache line of its own
_VERSION, _SEQUENCE = 0, 1
_HUGE_PAGE = 2 << 20
_SHM = Path("/dev/shm")


class TornReadError(RuntimeError):
    """A slot does not hold the version that its reader was told it holds: it is being overwritten, or was in between."""


def free_host_memory() -> int:
    """Bytes that can still be allocated: what the machine has available, or less where a control group allows less."""
    free = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = Path(limit_file).read_text().strip(), Path(used_file).read_text().strip()
        except OSError:
            continue  # not this kind of control group
        if limit != "max":
            free = min(free, max(0, int(limit) - int(used)))
    return free


def check_capacity(nbytes: int, slots: int, *, free: int | None = None, where: str = "host memory") -> None:
    """ValueError with the numbers when `slots` slots of `nbytes` bytes do not fit into `free` bytes (None: measured on the host)."""
    available = free_host_memory() if free is None else free
    needed = nbytes * slots
    if needed > available:
        fitting = available // nbytes
        remedy = f"set weights.slots: {fitting} or " if 2 <= fitting < slots else ""
        raise ValueError(
            f"weights.slots: {slots} slots of {nbytes / 1e9:.2f} GB need {needed / 1e9:.2f} GB of {where}, {available / 1e9:.2f} GB are free; "
            f"{remedy}free memory or use a smaller model"
        )


class HostSlots:
    """`slots` buffers of `nbytes` bytes in shared host memory, and a header for each.

    Picklable while a process is being spawned (the descriptor is passed on) and, between processes of one family, through queues;
    any number of times, so a restarted worker gets it as the first one did. `nbytes` may be 0: then there are only headers.
    """

    def __init__(self, slots: int, nbytes: int, *, memfd: bool | None = None) -> None:
        """Allocates. `memfd`: None takes an anonymous file where the system has it. ValueError when memory does not suffice."""
        assert slots >= 1 and nbytes >= 0
        anonymous = hasattr(os, "memfd_create") if memfd is None else memfd
        if nbytes:
            check_capacity(nbytes, slots)
        offset, stride = _geometry(slots, nbytes)
        size = offset + stride * slots
        fd = os.memfd_create("tandem-weights", os.MFD_CLOEXEC) if anonymous else _unlinked_file(size, nbytes, slots)
        try:
            os.ftruncate(fd, size)
            # Pages are taken now: later, a lack of them would be a bus error in the middle of a copy.
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.close(fd)
            raise ValueError(
                f"weights.slots: {slots} slots of {nbytes / 1e9:.2f} GB could not be allocated in shared memory ({error}); free memory or use fewer slots"
            ) from error
        self._open(fd, slots, nbytes)
        self._headers[:, _VERSION] = EMPTY

    def _open(self, fd: int, slots: int, nbytes: int) -> None:
        offset, stride = _geometry(slots, nbytes)
        size = offset + stride * slots
        self._fd = fd
        self._slots = slots
        self._nbytes = nbytes
        # Populated at once: page faults belong to the start, not to the first adoption.
        memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        self._headers: NDArray[np.int64] = np.frombuffer(memory, dtype=np.int64, count=slots * _HEADER_WORDS).reshape(slots, _HEADER_WORDS)
        self._tensors = [
            torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset + stride * slot) if nbytes else torch.empty(0, dtype=torch.uint8)
            for slot in range(slots)
        ]
        self._closer = weakref.finalize(self, os.close, fd)

    @staticmethod
    def _attach(duplicate: Any, slots: int, nbytes: int) -> HostSlots:
        fd = duplicate.detach()
        os.set_inheritable(fd, False)
        memory = HostSlots.__new__(HostSlots)
        memory._open(fd, slots, nbytes)
        return memory

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._closer.alive, "the slots are closed"
        return HostSlots._attach, (DupFd(self._fd), self._slots, self._nbytes)

    def __len__(self) -> int:
        return self._slots

    def tensor(self, slot: int) -> Tensor:
        """uint8 [nbytes] in shared memory."""
        return self._tensors[slot]

    def begin(self, slot: int) -> None:
        """Marks the slot as being written."""
        header = self._headers[slot]
        header[_SEQUENCE] += 1 + header[_SEQUENCE] % 2  # odd while being written; a write that failed left it odd
        header[_VERSION] = EMPTY

    def commit(self, slot: int, version: int) -> None:
        """Marks the slot as holding `version`, whole."""
        header = self._headers[slot]
        assert header[_SEQUENCE] % 2 == 1, "commit without begin"
        header[_VERSION] = version
        header[_SEQUENCE] += 1

    def state(self, slot: int) -> tuple[int, int]:
        """(version or EMPTY, sequence number). Equal before and after a read: nothing was written in between.

        The announcement of a version travels through a pipe, whose system calls order it after the writes on every architecture.
        """
        header = self._headers[slot]
        sequence = int(header[_SEQUENCE])
        version = int(header[_VERSION])
        return (version if sequence % 2 == 0 else EMPTY), sequence

    def close(self) -> None:
        """Gives the memory back, once nobody holds a view of it any more. Idempotent."""
        self._tensors = []
        self._headers = np.zeros((self._slots, _HEADER_WORDS), dtype=np.int64)
        self._headers[:, _VERSION] = EMPTY
        self._closer()


def _geometry(slots: int, nbytes: int) -> tuple[int, int]:
    """(offset of the first slot, distance between slots), page-aligned; large slots begin on huge pages, where the system may use them."""
    page = mmap.PAGESIZE if nbytes < _HUGE_PAGE else _HUGE_PAGE
    header = slots * _HEADER_WORDS * 8
    return -(-header // page) * page, -(-nbytes // page) * page


def _unlinked_file(size: int, nbytes: int, slots: int) -> int:
    """A descriptor of a file in /dev/shm that has no name any more: the way without memfd_create."""
    if not _SHM.is_dir():
        raise ValueError(f"shared memory needs memfd_create or {_SHM}, and this system has neither")
    status = os.statvfs(_SHM)
    free = status.f_bavail * status.f_frsize
    if size > free:
        raise ValueError(
            f"weights.slots: {slots} slots of {nbytes / 1e9:.2f} GB need {size / 1e9:.2f} GB in {_SHM}, {free / 1e9:.2f} GB are free; "
            f"enlarge it (a container's --shm-size) or use fewer slots"
        )
    fd, path = tempfile.mkstemp(prefix="tandem-weights-", dir=_SHM)
    os.unlink(path)
    return fd
