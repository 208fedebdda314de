"""A nested state as one run of bytes: the safetensors format with its JSON in the header; and several of them in a row."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.checkpoint.files import Buffer
from thinwire.checkpoint.sealed import Damaged
from thinwire.checkpoint.snapshot import fill, layout_of
from thinwire.checkpoint.tensors import Entry, Layout, read_header
from thinwire.checkpoint.tree import DTYPES, pack, unpack

_LENGTH, _COUNT = struct.Struct("<Q"), struct.Struct("<I")
_MAX_PARTS = 1 << 16
_SMALL_BYTES = 1 << 16


@dataclass(frozen=True)
class Blob:
    """A state that has a layout and is not written yet."""

    layout: Layout
    tensors: Mapping[str, Tensor]

    @property
    def size(self) -> int:
        return self.layout.total_bytes

    def write(self, target: memoryview) -> None:
        """Into exactly ``size`` bytes."""
        target[: len(self.layout.header)] = self.layout.header
        fill(target, self.layout, self.tensors)


def blob(value: Any) -> Blob:
    """``value`` as bytes to be."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(pack(value, "t", tensors), separators=(",", ":"))
    return Blob(layout_of(tensors, {"tree": text}), tensors)


def read_blob(data: bytearray | memoryview, what: str) -> Any:
    """What ``blob`` was given. Its tensors are views of ``data``. Raises Damaged."""
    entries, metadata = read_header(memoryview(data), len(data), what)
    try:
        tree = json.loads(metadata["tree"])
    except (KeyError, ValueError, RecursionError) as error:
        raise Damaged(f"{what} has no readable description ({error})") from error
    return unpack(tree, views(memoryview(data), entries))


def views(data: memoryview, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """Tensors over ``data``, without copies."""
    whole = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
    return {name: _view(whole, entry) for name, entry in entries.items()}


def _view(whole: Tensor, entry: Entry) -> Tensor:
    flat, dtype = whole[entry.start : entry.start + entry.size], DTYPES[entry.dtype]
    # In a file of somebody else's tensors may lie anywhere; and torch reads generator states as if they were aligned.
    if flat.data_ptr() % dtype.itemsize or entry.size < _SMALL_BYTES:
        flat = flat.clone()
    return flat.view(dtype).view(entry.shape)


def footer(sizes: list[int]) -> bytes:
    """Behind several blobs: how long each is."""
    return b"".join(map(_LENGTH.pack, sizes)) + _COUNT.pack(len(sizes))


def split(payload: Buffer, what: str) -> list[memoryview]:
    """The blobs before a footer; raises Damaged."""
    view = memoryview(payload)
    count = _COUNT.unpack(view[-_COUNT.size :])[0] if len(view) >= _COUNT.size else _MAX_PARTS + 1
    end = len(view) - _COUNT.size - count * _LENGTH.size
    if count > _MAX_PARTS or end < 0:
        raise Damaged(f"{what} has {len(view)} bytes and no footer")
    sizes = [_LENGTH.unpack_from(view, end + i * _LENGTH.size)[0] for i in range(count)]
    if sum(sizes) != end:
        raise Damaged(f"the parts of {what} have {sum(sizes)} bytes, expected {end}")
    parts, start = [], 0
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return parts
