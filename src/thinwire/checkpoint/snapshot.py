"""Copies tensors into shared memory while training goes on.

Between two optimizer steps weights and optimizer state do not change, so a thread may copy them during forward and backward;
everything joins before the next step. A change by anything else in that time shows in the version counters that
torch keeps: the snapshot is dropped then, never half old and half new.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from thinwire.checkpoint.arena import Arena
from thinwire.checkpoint.tensors import Layout, lay_out
from thinwire.checkpoint.tree import CODES, DTYPES


def layout_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Layout:
    """A file that holds these tensors."""
    return lay_out({name: (CODES[t.dtype], tuple(t.shape)) for name, t in tensors.items()}, metadata)


@torch.no_grad()
def fill(target: memoryview, layout: Layout, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to their places. Plain copies of memory where that is possible: torch would start threads of its own."""
    whole = torch.frombuffer(target, dtype=torch.uint8)
    base = whole.data_ptr()
    for name, tensor in tensors.items():
        entry = layout.entries[name]
        if entry.size == 0:
            continue
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            ctypes.memmove(base + entry.start, tensor.data_ptr(), entry.size)
        else:
            place = whole[entry.start : entry.start + entry.size].view(DTYPES[entry.dtype]).view(entry.shape)
            place.copy_(tensor)


class Copy:
    """One snapshot on its way into the arena.

    Args:
        now: names of tensors that change before the next optimizer step; copied before this returns.
        then: called in the copying thread when everything is in place.
    """

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        tensors: Mapping[str, Tensor],
        now: Sequence[str],
        then: Callable[[], None],
    ) -> None:
        self._view = memoryview(arena.map)
        self._view[: len(layout.header)] = layout.header
        fill(self._view, layout, {name: tensors[name] for name in now})
        chosen = set(now)
        self._later = {name: tensor for name, tensor in tensors.items() if name not in chosen}
        self._versions = [tensor._version for tensor in self._later.values()]
        self._layout, self._then = layout, then
        self._thread: threading.Thread | None = None
        self.error: str = ""

    def start(self) -> None:
        """Copy in the background."""
        self._thread = threading.Thread(target=self._run, name="thinwire-snapshot")
        self._thread.start()

    def run(self) -> None:
        """Copy at once."""
        self._copy()

    def join(self) -> str:
        """Wait for the end; why the snapshot was dropped, if it was."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.error

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # on Linux each thread has a priority of its own: training goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        try:
            self._copy()
        except Exception as error:  # the training thread must hear of it, and go on
            self.error = f"{type(error).__name__}: {error}"

    def _copy(self) -> None:
        fill(self._view, self._layout, self._later)
        changed = [
            name
            for (name, tensor), version in zip(self._later.items(), self._versions, strict=True)
            if tensor._version != version
        ]
        self._later = {}
        if changed:
            self.error = (
                f"{changed[0]} was changed while it was copied, and not by an optimizer step; save with overlap=False, or "
                "call wait() before changing weights yourself"
            )
        else:
            self._then()
