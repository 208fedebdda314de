"""What a checkpoint says of itself, and how everything in a checkpoint directory is named. No torch.

    DIR/step-00000120/MANIFEST.json             the commit record: sealed JSON
    DIR/step-00000120/rank-00000.safetensors    the tensors that rank 0 wrote
    DIR/step-00000120.tmp-<run>/                not committed (yet)
    DIR/log-00000121-<run>-rank-00000.bin       gradients of steps 121, 122, ...
    DIR/lock-rank-00000                         held by a writer process
    DIR/progress-rank-00000                     how far that rank has come

A *chain* value names a point of one training run: it is made of the chain value before it, the run and the step. Whatever
fits a chain belongs together; what is stale, swapped or from another run does not fit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.checkpoint.sealed import CHUNK_BYTES, Damaged, seal, unseal

VERSION = 1
FORMAT = "thinwire-checkpoint"
MANIFEST = "MANIFEST.json"
_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-[0-9a-z-]+")
_LOG = re.compile(r"log-(\d{8,})-([0-9a-f]{16})-rank-(\d{5,})\.bin")
_SHARD = re.compile(r"rank-\d{5,}\.safetensors")
_HEX = re.compile(r"[0-9a-f]{16}")
START = "0" * 16  # the chain value of a run that was not restored from anything


@dataclass(frozen=True)
class ShardFile:
    """One file of a checkpoint, with the CRC32 of each piece of 4 MiB."""

    size: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The commit record.

    Args:
        step: training steps that are done.
        chain: names this point; see the top of this file.
        run: which start of the training wrote it.
        fingerprint: of model and optimizer: names, shapes, dtypes.
        info: versions and settings, for people.
    """

    step: int
    chain: str
    run: str
    world_size: int
    fingerprint: str
    files: Mapping[str, ShardFile]
    info: Mapping[str, str] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_bytes(self) -> bytes:
        files = {name: {"size": file.size, "crc32": list(file.crc32)} for name, file in self.files.items()}
        return seal(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "chain": self.chain,
                "run": self.run,
                "world_size": self.world_size,
                "fingerprint": self.fingerprint,
                "chunk_bytes": CHUNK_BYTES,
                "files": files,
                "info": dict(self.info),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Raises Damaged unless it is whole, of this version, and names no file outside its directory."""
        got = unseal(data, MANIFEST)
        if (got.get("format"), got.get("version"), got.get("chunk_bytes")) != (FORMAT, VERSION, CHUNK_BYTES):
            raise Damaged(f"{MANIFEST} is of {got.get('format')!r} version {got.get('version')!r}, expected {VERSION}")
        step, world_size = (_count(got, key) for key in ("step", "world_size"))
        texts = {key: _text(got, key) for key in ("chain", "run", "fingerprint")}
        files, info = got.get("files"), got.get("info")
        if not isinstance(files, dict) or not isinstance(info, dict) or not _HEX.fullmatch(texts["chain"]):
            raise Damaged(f"{MANIFEST} lacks files, info or a chain value")
        shards = {name: _shard(name, value) for name, value in files.items()}
        if set(shards) != {shard_name(rank) for rank in range(world_size)}:
            raise Damaged(f"{MANIFEST} names {sorted(shards)[:3]}..., expected one file of each of {world_size} ranks")
        return cls(step, files=shards, world_size=world_size, info={k: str(v) for k, v in info.items()}, **texts)


def next_chain(chain: str, run: str, step: int) -> str:
    """The chain value one step on. The same on all ranks: it depends on no data."""
    return hashlib.blake2b(f"{chain}/{run}/{step}".encode(), digest_size=8).hexdigest()


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def temporary_name(step: int, run: str) -> str:
    return f"{step_name(step)}.tmp-{run}"


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def log_name(first_step: int, run: str, rank: int) -> str:
    return f"log-{first_step:08d}-{run}-rank-{rank:05d}.bin"


def step_of(name: str) -> int | None:
    """The step of a committed directory; None for everything else."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def log_of(name: str) -> tuple[int, str, int] | None:
    """First step, run and rank of a log file; None for everything else."""
    match = _LOG.fullmatch(name)
    return (int(match[1]), match[2], int(match[3])) if match else None


def read_shard(fields: Mapping[str, Any], what: str) -> ShardFile:
    """A file's size and checksums out of JSON."""
    size, sums = _count(fields, "size"), fields.get("crc32")
    if not isinstance(sums, list) or len(sums) != -(-size // CHUNK_BYTES) or not all(type(s) is int for s in sums):
        raise Damaged(f"{what}: {size} bytes need {-(-size // CHUNK_BYTES)} checksums, got {str(sums)[:60]}")
    return ShardFile(size, tuple(sums))


def _shard(name: str, value: object) -> ShardFile:
    if not _SHARD.fullmatch(name) or not isinstance(value, dict):  # no path may lead out of the directory
        raise Damaged(f"{MANIFEST} names the file {name!r:.80}, expected names such as {shard_name(0)}")
    return read_shard(value, name)


def _count(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise Damaged(f"{key} is {value!r:.60}, expected a count")
    return value


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or len(value) > 200:
        raise Damaged(f"{key} is {value!r:.60}, expected a short text")
    return value
