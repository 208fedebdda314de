"""A pool of buffers: every training step needs the same ones, so they are kept instead of allocated in every step.

Inside ``recycling(pool)`` the functions of this module take memory from the pool, elsewhere they make new tensors. Nothing
has to be given back: a block is free again as soon as no tensor, view or running collective refers to it any more. On
accelerators torch's own caching allocator does this, so there they always ask torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

HEADROOM_BYTES = 40  # of a message, kept free for the header that a transport may put before it
SMALL_BYTES = 4096  # below this the C allocator's own free lists are as fast
IDLE_STEPS = 50  # blocks unused for so long are given back
_CPU = torch.device("cpu")
_here = threading.local()


@dataclass
class _Block:
    memory: Tensor
    handle: int
    owners: int  # references to the storage when only the pool knows it
    used_in: int

    @property
    def free(self) -> bool:
        return torch._C._storage_Use_Count(self.handle) <= self.owners


class Pool:
    """Blocks of memory in sizes of at most an eighth more than asked for. Threads may share one.

    Attributes:
        made: how many blocks were ever made; constant once training is under way.
        held_bytes: what the pool holds now, in use or not.
    """

    def __init__(self) -> None:
        self.made = 0
        self._lock = threading.Lock()
        self._step = 0
        self._blocks: dict[int, list[_Block]] = {}

    @property
    def held_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def take(self, nbytes: int) -> Tensor:
        """At least ``nbytes`` of memory as uint8, with anything in it."""
        with self._lock:
            blocks = self._blocks.setdefault(_rounded(nbytes), [])
            for block in blocks:
                if block.free:
                    break
            else:
                block = self._make(_rounded(nbytes))
                blocks.append(block)
            block.used_in = self._step
            # The view is made under the lock: until it exists the block counts as free, and another thread could take it.
            return block.memory[:nbytes]

    def end_step(self) -> None:
        """Give back what has not been used for many steps, for example after a change of the fusion groups."""
        with self._lock:
            self._step += 1
            if self._step % IDLE_STEPS:
                return
            oldest = self._step - IDLE_STEPS
            kept = {size: [b for b in blocks if b.used_in >= oldest] for size, blocks in self._blocks.items()}
            self._blocks = {size: blocks for size, blocks in kept.items() if blocks}

    def _make(self, nbytes: int) -> _Block:
        self.made += 1
        memory = torch.empty(nbytes, dtype=torch.uint8)
        handle = memory.untyped_storage()._cdata
        owners: int = torch._C._storage_Use_Count(handle)
        return _Block(memory, handle, owners, self._step)


@contextmanager
def recycling(pool: Pool) -> Iterator[None]:
    """What this thread asks for inside comes from ``pool``."""
    before, _here.pool = getattr(_here, "pool", None), pool
    try:
        yield
    finally:
        _here.pool = before


def empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device = _CPU) -> Tensor:
    """Like ``torch.empty``: a tensor with anything in it."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    pool: Pool | None = getattr(_here, "pool", None)
    nbytes = dtype.itemsize
    for size in sizes:
        nbytes *= size
    if pool is None or device.type != "cpu" or nbytes < SMALL_BYTES:
        return torch.empty(sizes, dtype=dtype, device=device)
    return pool.take(nbytes).view(dtype).view(sizes)


def with_headroom(rows: int, length: int, device: torch.device = _CPU) -> Tensor:
    """Rows of ``length`` bytes with anything in them, behind ``HEADROOM_BYTES`` free ones each."""
    return empty((rows, HEADROOM_BYTES + length), torch.uint8, device)


def behind_headroom(headroom: Tensor) -> Tensor:
    """The rows behind the free bytes of ``with_headroom``."""
    return headroom[:, HEADROOM_BYTES:]


def zeros(shape: int | Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device = _CPU) -> Tensor:
    """Like ``torch.zeros``."""
    return empty(shape, dtype, device).zero_()


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Like ``torch.cat``; all tensors have the same dtype and the same other sizes."""
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return torch.cat(list(tensors), dim=dim, out=empty(shape, first.dtype, first.device))


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors that lie one behind the other in the same memory as one flat tensor, without a copy; None: they do not."""
    first = tensors[0]
    end, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.dtype is not first.dtype:
            return None
        if tensor.untyped_storage().data_ptr() != storage:
            return None
        end += tensor.nbytes
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


def padded(x: Tensor, numel: int) -> Tensor:
    """``x`` (flat) followed by zeros, ``numel`` elements in all; ``x`` itself where nothing is missing."""
    if x.numel() == numel:
        return x
    longer = empty(numel, x.dtype, x.device)
    longer[: x.numel()] = x
    longer[x.numel() :] = 0
    return longer


def _rounded(nbytes: int) -> int:
    """Up to a multiple of an eighth of the largest power of two in it, so that sizes that vary a little share blocks."""
    grain = max(SMALL_BYTES, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // grain) * grain
