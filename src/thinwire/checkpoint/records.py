"""The records of a gradient log: how they are framed, and how far a file of them can be trusted. No torch.

    header (56 bytes): magic, version, step, length of the payload, chain before, chain after, CRC32 of the payload, CRC32
    of this header; then the payload.

A file ends at its first record that is not whole. A torn tail is what a crash leaves and is no news; a bad record with good
ones behind it is damage, and is reported: replay ends before it all the same.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from thinwire.checkpoint import manifest as names
from thinwire.checkpoint.files import Files

MAGIC = b"TWgradlg"
VERSION = 1
_HEADER = struct.Struct(
    "<8sIIQQ8s8sI"
)  # magic, version, zero, step, payload bytes, chain before, chain after, payload CRC
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size


@dataclass(frozen=True)
class Record:
    """One step in a log file.

    Args:
        before, after: chain values.
        offset, size: of the payload in its file.
    """

    file: str
    step: int
    before: str
    after: str
    offset: int
    size: int
    crc32: int

    def payload(self, files: Files) -> bytes:
        """Checked when the file was read, and now once more."""
        data = files.read(self.file, self.offset, self.size)
        if len(data) != self.size or zlib.crc32(data) != self.crc32:
            raise OSError(f"{self.file}: the record of step {self.step} has changed while it was read")
        return data


@dataclass(frozen=True)
class LogFile:
    """What a log file holds.

    Args:
        records: good ones, from the beginning on.
        good_bytes: their length.
        damage: why the rest is not trusted; empty where the file ends well or with a torn tail.
        torn_bytes: of an incomplete last record.
    """

    name: str
    records: tuple[Record, ...]
    good_bytes: int
    damage: str = ""
    torn_bytes: int = 0


def frame(step: int, before: str, after: str, payload_bytes: int, payload_crc32: int) -> bytes:
    """The header of a record."""
    chains = bytes.fromhex(before), bytes.fromhex(after)
    header = _HEADER.pack(MAGIC, VERSION, 0, step, payload_bytes, *chains, payload_crc32)
    return header + _CRC.pack(zlib.crc32(header))


def read_log(files: Files, name: str) -> LogFile:
    """All records that can be trusted. Reads the file once, one record at a time."""
    size, offset, records = files.size(name), 0, list[Record]()
    while offset < size:
        record = _read_record(files, name, offset, size)
        wrong = record if isinstance(record, str) else _misplaced(record, records)
        if wrong:
            torn = not _followed_by_a_record(files, name, offset, size)
            return LogFile(name, tuple(records), offset, "" if torn else wrong, size - offset)
        assert isinstance(record, Record)
        records.append(record)
        offset = record.offset + record.size
    return LogFile(name, tuple(records), offset)


def follow(records: Iterable[Record], chain: str) -> list[Record]:
    """The longest line of records that continues a point.

    Where a run was restarted from a point, two records may continue it; the longer line wins, then the larger name: the
    choice must be a function of what is on disk alone, for all ranks make it.
    """
    after: dict[str, list[Record]] = {}
    for record in records:
        after.setdefault(record.before, []).append(record)
    order, stack = list[str](), [chain]
    while stack:  # chain values are hashes of those before them: no loops, but a long line, so no recursion
        order.append(stack.pop())
        stack += [record.after for record in after.get(order[-1], [])]
    length, choice = dict[str, int](), dict[str, Record]()
    for value in reversed(order):
        found = max(after.get(value, []), key=lambda record: (length[record.after], record.after), default=None)
        length[value] = 0
        if found is not None:
            length[value], choice[value] = 1 + length[found.after], found
    line = list[Record]()
    while chain in choice:
        line.append(choice[chain])
        chain = line[-1].after
    return line


def _read_record(files: Files, name: str, offset: int, size: int) -> Record | str:
    head = files.read(name, offset, HEADER_BYTES)
    if len(head) < HEADER_BYTES:
        return f"{name}: a header of {len(head)} bytes at {offset}"
    if zlib.crc32(head[: _HEADER.size]) != _CRC.unpack(head[_HEADER.size :])[0]:
        return f"{name}: a damaged header at byte {offset}"
    magic, version, _, step, length, before, after, crc32 = _HEADER.unpack(head[: _HEADER.size])
    if (magic, version) != (MAGIC, VERSION):
        return f"{name}: a record of version {version} at byte {offset}, expected {VERSION}"
    start = offset + HEADER_BYTES
    if length > size - start:  # before anything is allocated
        return f"{name}: the record of step {step} is cut off"
    if zlib.crc32(files.read(name, start, length)) != crc32:
        return f"{name}: the record of step {step} does not fit its checksum"
    return Record(name, step, before.hex(), after.hex(), start, length, crc32)


def _misplaced(record: Record, before: list[Record]) -> str:
    """A record that is whole but belongs elsewhere: a duplicated or swapped block, a renamed file."""
    found = names.log_of(record.file)
    assert found is not None, "only log files are read"
    first, run, _ = found
    expected = before[-1].step + 1 if before else first
    if record.step < expected or (before and record.before != before[-1].after):
        return f"{record.file}: the record of step {record.step} stands where step {expected} belongs"
    if record.after != names.next_chain(record.before, run, record.step):
        return f"{record.file}: the record of step {record.step} belongs to another run"
    return ""


def _followed_by_a_record(files: Files, name: str, offset: int, size: int) -> bool:
    """Whether a good header stands anywhere behind a bad record: then this is damage, and no torn tail."""
    rest = files.read(name, offset + 1, min(size - offset, 64 << 20))
    at = rest.find(MAGIC)
    while at >= 0:
        head = rest[at : at + HEADER_BYTES]
        if len(head) == HEADER_BYTES and zlib.crc32(head[: _HEADER.size]) == _CRC.unpack(head[_HEADER.size :])[0]:
            return True
        at = rest.find(MAGIC, at + 1)
    return False
