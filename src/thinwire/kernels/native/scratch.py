"""Working memory of the C kernels, kept per thread: fresh pages for every call would cost more than the work."""

import ctypes
import threading

import torch
from torch import Tensor

_PAD_ELEMS = 16  # TW_PAD in tw.h
_COPY_BANKS = 16  # TW_COPY_BANKS in tw.h


class _ScratchPointers(ctypes.Structure):
    """`tw_scratch` in tw.h."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
    )


class _Scratch(threading.local):
    """Grows to the largest unit seen; what a kernel never touches takes address space, not memory."""

    def __init__(self) -> None:
        self._elems = self._column_elems = -1
        self._pointers = _ScratchPointers()

    def for_selection_from(self, numel: int) -> tuple[Tensor, Tensor]:
        """Space for all of `numel` values and their indices."""
        if numel > self._elems:
            self._grow(numel)
        return self._values, self._indices

    def for_groups_of(self, longest: int, *, with_columns: bool) -> ctypes.c_void_p:
        """A pointer to the `tw_scratch` for rows or banks of up to `longest` elements."""
        if longest > self._elems:
            self._grow(longest)
        if with_columns and longest > self._column_elems:
            self._columns = torch.empty(longest * _COPY_BANKS + _PAD_ELEMS)
            self._pointers.columns = self._columns.data_ptr()
            self._column_elems = longest
        return self._address

    def _grow(self, numel: int) -> None:
        self._elems = numel
        self._values = torch.empty(numel + _PAD_ELEMS)
        self._indices = torch.empty(numel + _PAD_ELEMS, dtype=torch.int32)
        self._keys = torch.empty(numel + _PAD_ELEMS, dtype=torch.int32)
        self._pointers.values = self._values.data_ptr()
        self._pointers.indices = self._indices.data_ptr()
        self._pointers.keys = self._keys.data_ptr()
        self._address = ctypes.c_void_p(ctypes.addressof(self._pointers))


SCRATCH = _Scratch()
