"""The safetensors format, written and read here: eight bytes of length, a JSON header, then tensors without gaps. No torch.

The format has no checksums; ours are in the manifest. A header is validated before anything is made from it: sizes against
shapes, offsets against each other and against the length of the file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from thinwire.checkpoint.files import Buffer
from thinwire.checkpoint.sealed import MAX_JSON_BYTES, Damaged

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_MAX_NUMEL = 1 << 56


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, counted from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Layout:
    """A whole file: its header as bytes, and where each tensor goes behind it."""

    header: bytes
    entries: Mapping[str, Entry]
    total_bytes: int


def lay_out(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> Layout:
    """A file for tensors of these dtypes and shapes.

    Large items come first: there are no gaps in the format, and so every tensor begins at a multiple of its item size.
    """
    order = sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name][0]])
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    spans, offset = dict[str, tuple[int, int]](), 0
    for name in order:
        dtype, shape = tensors[name]
        size = ITEM_BYTES[dtype] * prod(shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        spans[name] = offset, size
        offset += size
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % 64)  # so that the first tensor begins at an aligned address
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"the state has a description of {len(text)} bytes, expected at most {MAX_JSON_BYTES}; "
                         "keep large lists as tensors")  # fmt: skip
    start = _LENGTH.size + len(text)
    entries = {
        name: Entry(tensors[name][0], tuple(tensors[name][1]), start + at, size) for name, (at, size) in spans.items()
    }
    return Layout(_LENGTH.pack(len(text)) + text, entries, start + offset)


def read_header(data: Buffer, total_bytes: int, what: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Where the tensors are, and the metadata.

    Args:
        data: the beginning of the file, or all of it.
        total_bytes: of the file.

    Raises:
        Damaged: any of it does not fit; nothing was allocated.
    """
    if len(data) < _LENGTH.size:
        raise Damaged(f"{what} has {total_bytes} bytes, expected a header")
    (length,) = _LENGTH.unpack(bytes(data[: _LENGTH.size]))
    start = _LENGTH.size + length
    if length > MAX_JSON_BYTES or start > total_bytes or start > len(data):
        raise Damaged(f"{what} announces a header of {length} bytes and has {total_bytes}")
    try:
        fields = json.loads(bytes(data[_LENGTH.size : start]))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"the header of {what} is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise Damaged(f"the header of {what} is a {type(fields).__name__}, expected an object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(one, str) for one in metadata.values()):
        raise Damaged(f"the metadata of {what} are no texts")
    entries = {name: _entry(name, value, start, what) for name, value in fields.items()}
    reached = start
    for entry in sorted(entries.values(), key=lambda one: (one.start, one.size)):
        if entry.start != reached:
            raise Damaged(f"the tensors of {what} overlap or leave a gap at byte {reached}")
        reached += entry.size
    if reached != total_bytes:
        raise Damaged(f"the tensors of {what} end at byte {reached}, the file at {total_bytes}")
    return entries, metadata


def _entry(name: str, value: object, start: int, what: str) -> Entry:
    dtype, shape, offsets = (
        (value.get(key) for key in ("dtype", "shape", "data_offsets")) if isinstance(value, dict) else (None,) * 3
    )
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES or not _counts(shape) or not _counts(offsets):
        raise Damaged(f"{what} describes {name!r:.80} as {str(value)[:80]}")
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    numel = 1
    for extent in shape:
        numel *= extent
        if numel > _MAX_NUMEL:
            raise Damaged(f"{what} gives {name!r:.80} the shape {str(shape)[:80]}")
    if len(offsets) != 2 or offsets[1] - offsets[0] != numel * ITEM_BYTES[dtype]:
        raise Damaged(f"{what} gives {name!r:.80} {offsets}, which does not fit {dtype} {shape}")
    return Entry(dtype, tuple(shape), start + offsets[0], offsets[1] - offsets[0])


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 60 for one in value)
