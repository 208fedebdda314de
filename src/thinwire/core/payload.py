"""Named tensors as one byte buffer, and back, with hostile bytes rejected.

Layout (little endian; every part starts at a multiple of 8 bytes, counted from the start):

====== ======================= =====================================================
bytes  field                   meaning
====== ======================= =====================================================
4      magic                   ``TWP1``
1      count                   number of tensors, at most 16
3      zero
16 × n entries                 8 bytes name (ASCII, NUL-padded), 1 byte dtype code,
                               3 bytes zero, 4 bytes number of elements (unsigned)
...    data                    the elements of each tensor, padded with zeros to 8 bytes
====== ======================= =====================================================
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.core import memory
from thinwire.core.errors import PayloadError

_MAGIC = b"TWP1"
_HEAD = struct.Struct("<4sB3x")
_ENTRY = struct.Struct("<8sB3xI")
_MAX_TENSORS = 16
_NAME_BYTES = 8
_CODE_OF: dict[torch.dtype, int] = {
    torch.uint8: 1,
    torch.int8: 2,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.float16: 6,
    torch.bfloat16: 7,
    torch.float32: 8,
}
_DTYPE_OF = {code: dtype for dtype, code in _CODE_OF.items()}


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


class Payload(dict[str, Tensor]):
    """A dict of 1-D tensors that knows its wire form."""

    @staticmethod
    def size(sizes: Mapping[str, tuple[torch.dtype, int]]) -> int:
        """Bytes on the wire of a payload with these dtypes and element counts, without making it."""
        data = sum(_padded(dtype.itemsize * numel) for dtype, numel in sizes.values())
        return _HEAD.size + _ENTRY.size * len(sizes) + data

    def to_bytes(self) -> Tensor:
        """One contiguous uint8 tensor on the device of the tensors.

        Raises:
            PayloadError: the layout cannot hold this; the message says what it can hold.
        """
        _check_contents(self)
        sizes = {name: (tensor.dtype, tensor.numel()) for name, tensor in self.items()}
        device = next(iter(self.values())).device
        buffer = memory.empty(self.size(sizes), torch.uint8, device)
        entries = b"".join(_ENTRY.pack(name.encode(), _CODE_OF[dtype], n) for name, (dtype, n) in sizes.items())
        head = _HEAD.pack(_MAGIC, len(self)) + entries
        buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        start = len(head)
        for tensor in self.values():
            end = start + tensor.nbytes
            buffer[start:end] = tensor.contiguous().view(torch.uint8)
            start += _padded(tensor.nbytes)
            buffer[end:start] = 0
        return buffer

    @classmethod
    def from_bytes(cls, buffer: Tensor) -> Payload:
        """Read a payload; the tensors are views of ``buffer``.

        Raises:
            PayloadError: the bytes are not a payload. Nothing is allocated from what they claim.
        """
        entries, start = _read_entries(buffer)
        payload = cls()
        for name, dtype, numel in entries:
            nbytes = dtype.itemsize * numel
            payload[name] = buffer[start : start + nbytes].view(dtype)
            start += _padded(nbytes)
        return payload


def _check_contents(payload: Payload) -> None:
    """A name that is cut or a shape that is lost would be noticed only by the receiver."""
    if not 0 < len(payload) <= _MAX_TENSORS:
        raise PayloadError(f"a payload holds 1 to {_MAX_TENSORS} tensors, got {len(payload)}")
    for name, tensor in payload.items():
        if not (name.isascii() and 0 < len(name) <= _NAME_BYTES):
            raise PayloadError(f"the name {name!r} does not fit; expected 1 to {_NAME_BYTES} ASCII characters")
        if tensor.dim() != 1 or tensor.dtype not in _CODE_OF:
            known = ", ".join(str(dtype) for dtype in _CODE_OF)
            raise PayloadError(
                f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected a 1-D tensor of one of {known}"
            )


def _read_entries(buffer: Tensor) -> tuple[list[tuple[str, torch.dtype, int]], int]:
    """The checked table of contents, and where the data begin."""
    _require(buffer.dtype == torch.uint8 and buffer.dim() == 1, "a payload is a 1-D uint8 tensor")
    _require(buffer.numel() >= _HEAD.size, f"{buffer.numel()} bytes are too short for a payload")
    magic, count = _HEAD.unpack(bytes(buffer[: _HEAD.size].cpu().numpy()))
    _require(magic == _MAGIC, f"it begins with {magic!r}, not {_MAGIC!r}")
    _require(0 < count <= _MAX_TENSORS, f"it claims {count} tensors, allowed are 1 to {_MAX_TENSORS}")
    start = _HEAD.size + _ENTRY.size * count
    _require(buffer.numel() >= start, f"{buffer.numel()} bytes are too short for {count} entries")
    table = bytes(buffer[_HEAD.size : start].cpu().numpy())
    entries: dict[str, tuple[torch.dtype, int]] = {}
    for raw_name, code, numel in _ENTRY.iter_unpack(table):
        name = raw_name.rstrip(b"\0").decode("ascii", errors="replace")
        _require(code in _DTYPE_OF, f"tensor {name!r} has the unknown dtype code {code}")
        _require(name not in entries, f"tensor {name!r} appears twice")
        entries[name] = (_DTYPE_OF[code], numel)
    expected = Payload.size(entries)
    _require(buffer.numel() == expected, f"it has {buffer.numel()} bytes, its entries add up to {expected}")
    return [(name, dtype, numel) for name, (dtype, numel) in entries.items()], start


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise PayloadError(f"not a valid payload: {problem}. Sender and receiver must run the same thinwire version.")
