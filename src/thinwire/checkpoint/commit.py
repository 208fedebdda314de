"""How a checkpoint becomes one: the order of writes, syncs and renames. No torch.

The order is what recovery relies on:
  1. every rank: its file and its part record are written *and synced* in a temporary directory; only then are they there
     for the coordinator, which would otherwise commit what a crash can still take away;
  2. the coordinator: MANIFEST under a temporary name, synced, renamed; the directory synced, so that all names in it last;
  3. the directory renamed to its final name, and its parent synced. That rename is the one commit point: before the parent
     is synced a crash may undo it, and nobody has been told of the checkpoint yet;
  4. only then may older ones go.
A failed sync means that this checkpoint is lost (the kernel may have dropped the pages): it is given up, never retried.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress

from thinwire.checkpoint import manifest as names
from thinwire.checkpoint.files import Buffer, Files
from thinwire.checkpoint.manifest import MANIFEST, Manifest, ShardFile
from thinwire.checkpoint.sealed import CHUNK_BYTES, Damaged, seal, unseal

POLL_S = 0.02


def write_shard(files: Files, directory: str, rank: int, data: Buffer, flush_bytes: int = CHUNK_BYTES) -> ShardFile:
    """A rank's file, durable. Its name is only once the directory is synced, which the coordinator does.

    Args:
        flush_bytes: handed to the operating system at a time; a multiple of ``CHUNK_BYTES``.
    """
    view, sums = memoryview(data).cast("B"), list[int]()
    output = files.create(f"{directory}/{names.shard_name(rank)}")
    try:
        for piece in _pieces(view, flush_bytes):
            sums += [zlib.crc32(chunk) for chunk in _pieces(piece, CHUNK_BYTES)]
            output.write(piece)
        output.sync()
    finally:
        output.close()
    return ShardFile(len(view), tuple(sums))


def write_part(files: Files, directory: str, rank: int, shard: ShardFile) -> None:
    """Tell the coordinator that this rank's file is durable. Renamed into place, so that it is never seen half written."""
    name = _part(directory, rank)
    _write_synced(files, f"{name}.tmp", seal({"size": shard.size, "crc32": list(shard.crc32)}))
    files.rename(f"{name}.tmp", name)
    files.sync_directory(directory)


def gather_parts(
    files: Files, directory: str, world_size: int, give_up: Callable[[], bool], timeout_s: float
) -> dict[str, ShardFile]:
    """What the other ranks have written, once all have.

    Raises:
        TimeoutError: some rank has not delivered.
    """
    found: dict[str, ShardFile] = {}
    until_s = time.monotonic() + timeout_s
    while True:
        there = set(files.names(directory))
        for rank in range(1, world_size):
            if names.shard_name(rank) not in found and _part("", rank).lstrip("/") in there:
                part = unseal(files.read(_part(directory, rank)), f"part of rank {rank}")
                found[names.shard_name(rank)] = names.read_shard(part, f"part of rank {rank}")
        missing = [rank for rank in range(1, world_size) if names.shard_name(rank) not in found]
        if not missing:
            return found
        if give_up() or time.monotonic() > until_s:
            raise TimeoutError(f"no file came from ranks {missing[:8]}; look for errors in their logs")
        time.sleep(POLL_S)


def commit(files: Files, directory: str, manifest: Manifest) -> None:
    """Make a temporary directory the checkpoint of its step. Returns when that survives a crash."""
    for rank in range(1, manifest.world_size):
        with suppress(OSError):
            files.remove(_part(directory, rank))
    _write_synced(files, f"{directory}/{MANIFEST}.tmp", manifest.to_bytes())
    files.rename(f"{directory}/{MANIFEST}.tmp", f"{directory}/{MANIFEST}")
    files.sync_directory(directory)
    final = names.step_name(manifest.step)
    if final in files.names():
        # A broken one, or the same step of a run that was rolled back past it. It moves aside and does not vanish: were
        # it deleted first, a crash before the rename would leave neither.
        aside = f"{names.temporary_name(manifest.step, manifest.run)}-old"
        files.rename(final, aside)
        files.sync_directory()
        files.rename(directory, final)
        files.sync_directory()
        files.remove(aside)
        return
    files.rename(directory, final)
    files.sync_directory()


def retire(files: Files, keep: int, newest: int) -> list[str]:
    """Remove checkpoints beyond the ``keep`` newest up to ``newest``, and logs that only they needed.

    Called when ``newest`` is durable. Later steps are leftovers of a run that was rolled back: they go too, or they would
    be taken for the newest after the next crash.
    """
    steps = sorted((step for step in map(names.step_of, files.names()) if step is not None), reverse=True)
    kept = [step for step in steps if step <= newest][:keep]
    gone = [names.step_name(step) for step in steps if step not in kept]
    logs = [(name, found) for name in files.names() if (found := names.log_of(name))]
    oldest = min(kept, default=0)
    oldest_run = _run_of(files, oldest)
    for name, (first, run, rank) in logs:
        following = [start for _, (start, other, who) in logs if (other, who) == (run, rank) and start > first]
        # A segment ends where the next one of its run begins. One of another run than the oldest checkpoint kept, begun
        # before it, leads to points that are gone.
        ended = bool(following) and min(following) - 1 <= oldest
        if ended or (first <= oldest and oldest_run is not None and run != oldest_run):
            gone.append(name)
    for name in gone:
        files.remove(name)
    return gone


def sweep(files: Files) -> list[str]:
    """Remove what writers that are gone have left unfinished. Nobody may be writing.

    A checkpoint that was moved aside moves back if its place is still free.
    """
    swept = []
    for name in files.names():
        if names.is_temporary(name):
            final = name.split(".tmp-")[0]
            if name.endswith("-old") and final not in files.names():
                files.rename(name, final)
            else:
                files.remove(name)
                swept.append(name)
    if swept:
        files.sync_directory()
    return swept


def _run_of(files: Files, step: int) -> str | None:
    with suppress(OSError, Damaged):
        return Manifest.from_bytes(files.read(f"{names.step_name(step)}/{MANIFEST}")).run
    return None


def _write_synced(files: Files, path: str, data: bytes) -> None:
    output = files.create(path)
    try:
        output.write(data)
        output.sync()
    finally:
        output.close()


def _part(directory: str, rank: int) -> str:
    return f"{directory}/rank-{rank:05d}.part.json"


def _pieces(view: memoryview, size: int) -> Iterator[memoryview]:
    return (view[start : start + size] for start in range(0, len(view), size))
