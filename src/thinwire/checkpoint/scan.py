"""What can be recovered from a directory: every checkpoint verified byte for byte, every log record checked. No torch."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile

from thinwire.checkpoint import manifest as names
from thinwire.checkpoint.files import Files
from thinwire.checkpoint.manifest import MANIFEST, Manifest
from thinwire.checkpoint.records import LogFile, Record, follow, read_log
from thinwire.checkpoint.sealed import CHUNK_BYTES, Damaged

log = logging.getLogger(__name__)


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
    return open_verified(files, step)[0]


def open_verified(files: Files, step: int) -> tuple[Manifest, dict[str, memoryview]]:
    """A checkpoint's manifest and files, by name, every byte checked; raises Damaged."""
    manifest = read_manifest(files, step)
    found = {name: _view(files, manifest, name) for name in manifest.files}
    # zlib lets other threads run: two check, while the pages that come next are read in.
    with ThreadPoolExecutor(2, "thinwire-verify") as pool:
        for name, view in found.items():
            sums = pool.map(zlib.crc32, (view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)))
            for index, (got, expected) in enumerate(zip(sums, manifest.files[name].crc32, strict=True)):
                if got != expected:
                    start, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, len(view))
                    raise Damaged(f"{names.step_name(step)}/{name} is damaged between bytes {start} and {end}")
    return manifest, found


def fulls(files: Files) -> list[int]:
    """Steps of committed checkpoints, the newest first; nothing is known of their contents."""
    return sorted((step for step in map(names.step_of, files.names()) if step is not None), reverse=True)


def logs(files: Files, rank: int) -> list[LogFile]:
    """The log files of one rank."""
    found = [(name, names.log_of(name)) for name in files.names()]
    return [read_log(files, name) for name, of in found if of is not None and of[2] == rank]


def lines(files: Files, rank: int, check: Callable[[Files, int], Manifest] = verify) -> Iterator[Line]:
    """Every good checkpoint with what continues it, the newest first.

    Rank 0's records hold the gradients and each rank's own what differs between ranks: a point needs both.

    Args:
        check: verifies a checkpoint, and may keep what it has read.
    """
    gradients = [record for one in logs(files, 0) for record in one.records]
    own = {record.after for one in logs(files, rank) for record in one.records}
    for step in fulls(files):
        try:
            manifest = check(files, step)
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


def _view(files: Files, manifest: Manifest, name: str) -> memoryview:
    path, expected = f"{names.step_name(manifest.step)}/{name}", manifest.files[name].size
    try:
        view = files.view(path)
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror or error})") from error
    if len(view) != expected:
        raise Damaged(f"{path} has {len(view)} bytes, expected {expected}")
    return view
