"""FlashInfer's workspaces, semaphores and scratch in one buffer or two, and replacements for too few semaphores."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import field
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from ...attention.runtime import Runtime
from ...attention.torch_ops import TorchScratch
from ...attention.trtllm_gen.checks import check_device
from ...dtypes import ITEM_BYTES
from ...errors import UsageError, WorkspaceError
from ...launch.workspace import REGION_ALIGNMENT, SemaphoreWorkspace, Workspace
from ...tensor import view_of
from ...values import dataclass
from .arguments import Arguments, XqaArguments

SEMAPHORE_BYTES = 8 << 20
_CTAS_PER_MULTIPROCESSOR = 32  # no device runs more
_COUNTER_BYTES = 4
_OWN_SEMAPHORE_BYTES = 4 * REGION_ALIGNMENT  # a status word and counters of a few bytes, each in a region of its own
# Replacements that a runtime keeps, besides those in captured graphs.
_MOST_EAGER = 64


def split_workspace(workspace_buffer: Any, device: int) -> SemaphoreWorkspace | TorchScratch:
    """Semaphores in the first 8 MiB of the buffer, scratch in the rest.

    Raises:
        WorkspaceError: the buffer is not larger than 8 MiB.
        UsageError: the buffer is not contiguous, misaligned or on another device.
    """
    if isinstance(workspace_buffer, TorchScratch):
        return workspace_buffer
    address, nbytes = _scratch_of(workspace_buffer, device)
    if nbytes <= SEMAPHORE_BYTES:
        raise WorkspaceError(
            f"workspace_buffer: {nbytes} bytes, expected more than {SEMAPHORE_BYTES}: those are for semaphores"
        )
    scratch = (address + SEMAPHORE_BYTES, nbytes - SEMAPHORE_BYTES)
    return SemaphoreWorkspace(semaphores=(address, SEMAPHORE_BYTES), scratch=scratch)


def with_enough_semaphores(call: XqaArguments, rows: int, device: int) -> SemaphoreWorkspace | TorchScratch:
    """A caller's semaphores and scratch as a workspace for ``rows`` tokens x heads.

    A caller who counts semaphores as FlashInfer does may have too few for native kernels: zeroed memory of the runtime
    then replaces them. It belongs to the address of the given semaphores, so it is shared only by calls that share
    those. Once a captured graph uses it, it is never freed; otherwise it is dropped, least recently used first, after
    its workspace is gone.

    Raises:
        WorkspaceError: the replacement would be allocated while the stream captures; the message states its bytes.
        UsageError: a buffer is not contiguous or on another device, the semaphores are empty, or the scratch is
            misaligned.
    """
    if isinstance(call.workspace_buffer, TorchScratch):
        return call.workspace_buffer
    rt, memory = call.runtime, _memory_of(call.semaphores, "semaphores", device)
    if not memory[1]:  # empty tensors of all streams and devices are at address 0
        raise UsageError("no bytes, expected memory: calls share those of an address", argument="semaphores")
    scratch = _scratch_of(call.workspace_buffer, device)
    counters = max(rows, _CTAS_PER_MULTIPROCESSOR * rt.driver.device(device).multiprocessors)
    needed = 3 * REGION_ALIGNMENT + counters * _COUNTER_BYTES
    if memory[1] >= needed:
        return SemaphoreWorkspace(memory, scratch)
    needed = 1 << (needed - 1).bit_length()
    with _lock:
        replaced = _replaced.setdefault(rt, _Replaced())
        workspace = replaced.captured.get(memory[0])
        if workspace is None or workspace.nbytes < needed:
            stream = rt.memory.current_stream(call.query)
            workspace = _eager(replaced, memory, needed, stream, device, rt)
    return SemaphoreWorkspace((workspace.address, workspace.nbytes), scratch, owner=workspace)


def with_own_semaphores(call: Arguments, device: int) -> SemaphoreWorkspace | TorchScratch:
    """A workspace of any contents as scratch, with semaphores that are made and zeroed for this call.

    Raises:
        UsageError: the buffer is not contiguous or on another device.
    """
    if isinstance(call.workspace_buffer, TorchScratch):
        return call.workspace_buffer
    address, nbytes = _memory_of(call.workspace_buffer, "workspace_buffer", device)
    aligned = address + -address % 16
    scratch = (aligned, max(0, nbytes - (aligned - address)))
    semaphores = call.runtime.memory.zeros(call.query, (_OWN_SEMAPHORE_BYTES,), "uint8")
    return SemaphoreWorkspace(
        (view_of(semaphores, "semaphores").pointer, _OWN_SEMAPHORE_BYTES), scratch, owner=semaphores
    )


@dataclass(frozen=True, slots=True)
class _Replaced:
    """Replacements by the address of the semaphores that they replace; of ``eager``, the least recently used first."""

    eager: OrderedDict[int, Workspace] = field(default_factory=OrderedDict)
    captured: dict[int, Workspace] = field(default_factory=dict)


_lock = threading.RLock()
_replaced: WeakKeyDictionary[Runtime, _Replaced] = WeakKeyDictionary()


def _eager(
    replaced: _Replaced, held: tuple[int, int], needed: int, stream: int, device: int, runtime: Runtime
) -> Workspace:
    """The replacement of ``held``, (address, bytes), that no graph uses yet, allocated if it is missing or too small.

    A capture takes it over. Replacements that are dropped are freed at the next allocation, behind their last launch.
    """
    address, nbytes = held
    workspace = replaced.eager.get(address)
    with runtime.driver.using(runtime.driver.context_on(device)):
        capturing = runtime.driver.is_capturing(stream)
    if workspace is None or workspace.nbytes < needed:
        if capturing:
            raise WorkspaceError(f"semaphores of {nbytes} bytes: {needed} bytes are needed while a stream captures")
        context = runtime.driver.context_of(stream, device)
        workspace = replaced.eager[address] = Workspace.allocate(runtime.driver, context, needed, stream)
    if capturing:
        workspace.keep()
        replaced.captured[address] = replaced.eager.pop(address)
        return workspace
    replaced.eager.move_to_end(address)
    if len(replaced.eager) > _MOST_EAGER:
        replaced.eager.popitem(last=False)
    return workspace


def _scratch_of(workspace_buffer: Any, device: int) -> tuple[int, int]:
    address, nbytes = _memory_of(workspace_buffer, "workspace_buffer", device)
    if address % 16:
        raise UsageError(f"address {address:#x}, expected a multiple of 16", argument="workspace_buffer")
    return address, nbytes


def _memory_of(buffer: Any, name: str, device: int) -> tuple[int, int]:
    """Address and bytes of a contiguous tensor."""
    view = view_of(buffer, name, written=True)
    check_device(name, view, device)
    if not view.is_contiguous:
        raise UsageError(f"strides {view.strides}, expected a contiguous tensor", argument=name)
    return view.pointer, prod(view.shape) * ITEM_BYTES[view.dtype]
