"""JSON that knows when it was damaged, and checksums of long files in pieces. No torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from thinwire.checkpoint.files import Buffer

CHUNK_BYTES = 4 << 20  # one CRC32 each: says where a file is damaged, and is checked while the next piece is read
MAX_JSON_BYTES = 64 << 20


class Damaged(ValueError):
    """What is on disk is not what was written."""


def seal(fields: Mapping[str, Any]) -> bytes:
    """One line of JSON whose last field is the CRC32 of the rest."""
    text = json.dumps(fields, separators=(",", ":"), sort_keys=True)
    return f'{text[:-1]}{"," if fields else ""}"seal":{zlib.crc32(text.encode())}}}\n'.encode()


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """The fields of sealed JSON.

    Raises:
        Damaged: it is not, byte for byte, what ``seal`` gave.
    """
    if len(data) > MAX_JSON_BYTES:
        raise Damaged(f"{what} has {len(data)} bytes, expected at most {MAX_JSON_BYTES}")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} is no JSON ({error})") from error
    if not isinstance(fields, dict) or "seal" not in fields:
        raise Damaged(f"{what} has no checksum")
    got = fields.pop("seal")
    # Against the bytes and not only the values: another spelling of the same values is damage too.
    if seal(fields) != data:
        raise Damaged(f"{what} does not fit its checksum {got}")
    return fields


def checksums(data: Buffer) -> list[int]:
    """CRC32 of each piece of ``CHUNK_BYTES``."""
    view = memoryview(data).cast("B")
    return [zlib.crc32(view[start : start + CHUNK_BYTES]) for start in range(0, len(view), CHUNK_BYTES)]
