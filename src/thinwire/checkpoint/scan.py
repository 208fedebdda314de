"""What can be recovered from a directory: every checkpoint verified byte for byte, every log record checked. No torch."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile

from thinwire.checkpoint import manifest as names
from thinwire.checkpoint.files import Files
from thinwire.checkpoint.manifest import MANIFEST, Manifest
from thinwire.checkpoint.records import LogFile, Record, follow, read_log
from thinwire.checkpoint.sealed import CHUNK_BYTES, Damaged

log = logging.getLogger(__name__)
_Chunk = tuple[str, int, int, int]  # path, start, size, CRC32


@dataclass(frozen=True)
class Finding:
    """One thing in a checkpoint directory.

    Args:
        kind: ``full``, ``log``, ``temporary`` or ``unknown``.
        damage: empty if it is whole.
    """

    name: str
    kind: str
    damage: str = ""
    manifest: Manifest | None = None
    log: LogFile | None = None


@dataclass(frozen=True)
class Line:
    """A checkpoint and the log records of one rank that continue it."""

    manifest: Manifest
    records: tuple[Record, ...] = field(default=())

    @property
    def chains(self) -> list[str]:
        """Of every point on it, the checkpoint first."""
        return [self.manifest.chain, *(record.after for record in self.records)]

    @property
    def last_step(self) -> int:
        return self.records[-1].step if self.records else self.manifest.step


def read_manifest(files: Files, step: int) -> Manifest:
    """The commit record of a step; raises Damaged unless it is whole and stands where it belongs."""
    name = names.step_name(step)
    try:
        data = files.read(f"{name}/{MANIFEST}")
    except OSError as error:
        raise Damaged(f"{name}/{MANIFEST} cannot be read ({error.strerror or error})") from error
    manifest = Manifest.from_bytes(data)
    if manifest.step != step:
        raise Damaged(f"{name} holds the checkpoint of step {manifest.step}: a directory was renamed or copied")
    return manifest


def verify(files: Files, step: int) -> Manifest:
    """The manifest of a checkpoint of which every byte is as it was written; raises Damaged otherwise."""
    manifest = read_manifest(files, step)
    with ThreadPoolExecutor(2, "thinwire-verify") as pool:
        for name in manifest.files:
            damage = [wrong for wrong in pool.map(lambda job: _wrong(files, job), _chunks(manifest, name)) if wrong]
            _check_size(files, manifest, name)
            if damage:
                raise Damaged(damage[0])
    return manifest


def read_verified(files: Files, manifest: Manifest, name: str, into: memoryview) -> None:
    """One file of a checkpoint, checked while it is read; raises Damaged."""
    _check_size(files, manifest, name)
    with ThreadPoolExecutor(2, "thinwire-read") as pool:
        wrong = [one for one in pool.map(lambda job: _wrong(files, job, into), _chunks(manifest, name)) if one]
    if wrong:
        raise Damaged(wrong[0])


def fulls(files: Files) -> list[int]:
    """Steps of committed checkpoints, the newest first; nothing is known of their contents."""
    return sorted((step for step in map(names.step_of, files.names()) if step is not None), reverse=True)


def logs(files: Files, rank: int) -> list[LogFile]:
    """The log files of one rank."""
    found = [(name, names.log_of(name)) for name in files.names()]
    return [read_log(files, name) for name, of in found if of is not None and of[2] == rank]


def lines(files: Files, rank: int) -> Iterator[Line]:
    """Every good checkpoint with what continues it, the newest first.

    Rank 0's records hold the gradients and each rank's own what differs between ranks: a point needs both.
    """
    gradients = [record for one in logs(files, 0) for record in one.records]
    own = {record.after for one in logs(files, rank) for record in one.records}
    for step in fulls(files):
        try:
            manifest = verify(files, step)
        except Damaged as damage:
            log.warning("%s is passed over: %s", names.step_name(step), damage)
            continue
        line = follow(gradients, manifest.chain)
        if rank < manifest.world_size:
            line = list(takewhile(lambda record: record.after in own, line))
        yield Line(manifest, tuple(line))


def survey(files: Files) -> list[Finding]:
    """Everything in the directory, verified; for people."""
    found = []
    for name in files.names():
        step = names.step_of(name)
        if step is not None:
            try:
                found.append(Finding(name, "full", manifest=verify(files, step)))
            except Damaged as damage:
                found.append(Finding(name, "full", str(damage)))
        elif names.log_of(name) is not None:
            read = read_log(files, name)
            found.append(Finding(name, "log", read.damage, log=read))
        elif names.is_temporary(name):
            found.append(Finding(name, "temporary"))
        elif not name.startswith(("lock-", "progress-")):
            found.append(Finding(name, "unknown"))
    return found


def _chunks(manifest: Manifest, name: str) -> Iterator[_Chunk]:
    path, shard = f"{names.step_name(manifest.step)}/{name}", manifest.files[name]
    for index, expected in enumerate(shard.crc32):
        start = index * CHUNK_BYTES
        yield path, start, min(CHUNK_BYTES, shard.size - start), expected


def _wrong(files: Files, job: _Chunk, into: memoryview | None = None) -> str:
    path, start, size, expected = job
    try:
        data = files.read(path, start, size)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    if len(data) != size or zlib.crc32(data) != expected:
        return f"{path} is damaged between bytes {start} and {start + size}"
    if into is not None:
        into[start : start + size] = data
    return ""


def _check_size(files: Files, manifest: Manifest, name: str) -> None:
    path, expected = f"{names.step_name(manifest.step)}/{name}", manifest.files[name].size
    try:
        size = files.size(path)
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror or error})") from error
    if size != expected:
        raise Damaged(f"{path} has {size} bytes, expected {expected}")
