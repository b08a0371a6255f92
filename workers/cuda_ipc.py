"""Slots in GPU memory, which other processes open through CUDA IPC handles.

The handles are exported once, and are plain bytes. Devices are matched by UUID: the index of one GPU differs between processes whose
CUDA_VISIBLE_DEVICES differ. A process that opens a slot must see the GPU that it lies on (workers/devices.py arranges it).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from workers.slots import check_capacity

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PROBE_TIMEOUT_S = 120.0  # a new process imports torch and creates a CUDA context in it
_DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor: the storage's device


def expandable_segments(environment: Mapping[str, str] | None = None) -> str | None:
    """The variable that switches on expandable segments, whose memory cannot be exported; None if none does."""
    environment = os.environ if environment is None else environment
    for variable in ALLOCATOR_VARIABLES:
        if re.search(r"expandable_segments\s*:\s*true", environment.get(variable, ""), re.IGNORECASE):
            return variable
    return None


def device_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


class CudaSlots:
    """`slots` buffers of `nbytes` bytes on one GPU. Picklable any number of times; opened on first use in another process."""

    def __init__(self, slots: int, nbytes: int, device: torch.device) -> None:
        """Allocates and exports. ValueError when memory does not suffice, RuntimeError when CUDA refuses the export."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

        assert device.type == "cuda"
        index = torch.cuda.current_device() if device.index is None else device.index
        check_capacity(nbytes, slots, free=torch.cuda.mem_get_info(index)[0], where=f"memory on cuda:{index}")
        self._uuid = device_uuid(index)
        self._nbytes = nbytes
        # Zeroed, because the checksum covers the gaps between tensors too.
        self._tensors: dict[int, Tensor] = {slot: torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{index}") for slot in range(slots)}
        torch.cuda.synchronize(index)
        self._exports: list[tuple[Any, ...]] = []
        for slot in range(slots):
            rebuild, arguments = reduce_tensor(self._tensors[slot])
            assert rebuild is rebuild_cuda_tensor and arguments[_DEVICE_ARGUMENT] == index, "torch's way of exporting a CUDA tensor has changed"
            self._exports.append(arguments)

    def __getstate__(self) -> dict[str, Any]:
        return {"_uuid": self._uuid, "_nbytes": self._nbytes, "_exports": self._exports, "_tensors": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def tensor(self, slot: int) -> Tensor:
        """uint8 [nbytes] on the publisher's GPU, in this process's numbering. RuntimeError when it cannot be opened."""
        if slot not in self._tensors:
            self._tensors[slot] = self._import(slot)
        return self._tensors[slot]

    def _import(self, slot: int) -> Tensor:
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        indices = [index for index in range(torch.cuda.device_count()) if device_uuid(index) == self._uuid]
        if not indices:
            raise RuntimeError(
                f"the weights lie on GPU {self._uuid}, which this process does not see (CUDA_VISIBLE_DEVICES="
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); add that GPU, or set weights.transport: shared_memory"
            )
        arguments = list(self._exports[slot])
        arguments[_DEVICE_ARGUMENT] = indices[0]
        try:
            return rebuild_cuda_tensor(*arguments)
        except RuntimeError as error:
            raise RuntimeError(f"the weights on GPU {self._uuid} could not be opened ({error}); set weights.transport: shared_memory") from error

    def close(self) -> None:
        """Gives the memory back, once nobody holds a view of it any more. Idempotent. The publisher closes last."""
        self._tensors = {}


def probe(device: torch.device, timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Sends a small tensor to a new process and lets it answer what it read. None if that works, else why it does not."""
    variable = expandable_segments()
    if variable is not None:
        return f"{variable} switches on expandable_segments, whose memory cannot be shared between processes"
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    try:
        slots = CudaSlots(1, 64, device)
        slots.tensor(0).fill_(7)
        torch.cuda.synchronize(device)
        process = context.Process(target=_answer, args=(slots, theirs), name="cuda-ipc-probe", daemon=True)
        process.start()
    except (RuntimeError, ValueError, OSError) as error:
        ours.close()
        theirs.close()
        return f"{type(error).__name__}: {error}"
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(timeout_s) else f"the probing process did not answer within {timeout_s:g} s"
    except (EOFError, OSError):
        answer = "the probing process died"
    finally:
        ours.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()
    return None if answer == 7 * 64 else str(answer)


def _answer(slots: CudaSlots, connection: Connection) -> None:
    """Runs in the probing process."""
    try:
        connection.send(int(slots.tensor(0).sum()))
    except RuntimeError as error:
        connection.send(f"{type(error).__name__}: {error}")
